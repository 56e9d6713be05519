"""Images of constant matrices, and how often each pattern occurs."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.report import labels
from regard.report.words import join

SIDE, MOST = 64, 12
"""The most rows and columns of an image, and images on a page."""


@dataclass(frozen=True)
class Picture:
    """Matrix of one head, reduced to block means of at most `SIDE` × `SIDE`; `size` and `largest` of the full one."""

    site: str
    layer: int
    head: int
    rank: int | None
    pattern: str
    weights: NDArray[np.float64]
    size: tuple[int, int]
    largest: float


def pictures(heads: pd.DataFrame, matrices: Mapping[str, Tensor], max_images: int = MOST) -> list[Picture]:
    """Make images of the heads of each pattern that become constant first, pattern by pattern in turn."""
    is_known = [f"{site}.{layer}" in matrices for site, layer in zip(heads["site"], heads["layer"], strict=True)]
    ordered = heads.loc[is_known].sort_values("rank", ascending=False, na_position="last", kind="stable")
    turn = ordered.groupby(ordered["pattern"].fillna("").astype(str), sort=False).cumcount()
    selected = ordered.assign(turn=turn).sort_values("turn", kind="stable").head(max_images)
    images = [_picture(row, matrices) for row in selected.to_dict("records")]
    return sorted(images, key=lambda image: (image.site, image.layer, image.head))


def _picture(row: Mapping[Hashable, Any], matrices: Mapping[str, Tensor]) -> Picture:
    matrix = matrices[f"{row['site']}.{row['layer']}"][int(row["head"])].detach().double().cpu()
    query, key = matrix.shape
    small = torch.nn.functional.adaptive_avg_pool2d(matrix[None, None], (min(SIDE, query), min(SIDE, key)))[0, 0]
    return Picture(
        site=str(row["site"]),
        layer=int(row["layer"]),
        head=int(row["head"]),
        rank=None if pd.isna(row["rank"]) else int(row["rank"]),
        pattern="" if pd.isna(row["pattern"]) else str(row["pattern"]),
        weights=small.numpy(),
        size=(query, key),
        largest=float(matrix.abs().max()),
    )


def payload(images: list[Picture]) -> list[dict[str, Any]]:
    """Encode images for the page's script: shades 0–255 as base64, row by row."""
    multiple_sites = len({image.site for image in images}) > 1
    encoded = []
    for image in images:
        site = labels.site(image.site) if multiple_sites else ""
        rank = "" if image.rank is None else f"rank {image.rank}"
        encoded.append(
            {
                "caption": join([f"Layer {image.layer}, head {image.head}", site]),
                "note": join([image.pattern, rank, f"max. {labels.number(image.largest, 2)}"]),
                "size": list(image.weights.shape),
                "shades": base64.b64encode(_shades(image.weights).tobytes()).decode("ascii"),
            }
        )
    return encoded


def _shades(weights: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Scale the square root of each weight, relative to the largest, to 0–255."""
    size = np.abs(weights)
    return np.round(255 * np.sqrt(size / max(float(size.max()), 1e-300))).astype(np.uint8)


def about(images: list[Picture]) -> str:
    """Describe how to read the images."""
    if not images:
        return ""
    words = (
        "Rows are queries, columns keys, with the first token at the top left. The shade is the square root of the "
        "weight relative to the largest. Of each pattern, the heads that become constant first are shown."
    )
    reduced = sorted({image.size for image in images if image.size != image.weights.shape})
    if reduced:
        sizes = ", ".join(f"{query}×{key}" for query, key in reduced)
        words += f" Matrices of {sizes} are reduced to means of blocks, at most {SIDE}×{SIDE}."
    return words


def pattern_counts(heads: pd.DataFrame) -> list[tuple[str, int, float]]:
    """Count heads by pattern, with fractions, most frequent first."""
    named = heads["pattern"].dropna()
    counts = named[named != ""].value_counts()
    return [(str(name), int(count), float(count / counts.sum())) for name, count in counts.items()]
