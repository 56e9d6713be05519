"""Constant matrices as small pictures, and how often each pattern occurs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.report import labels

SIDE = 64
"""The most rows and columns of a picture."""

MOST = 12
"""The most pictures on a page."""


@dataclass(frozen=True)
class Picture:
    """The matrix of one head: its weights, reduced to at most `SIDE` × `SIDE` means of blocks, and what is known of it.

    `size` is the whole matrix's; `largest` its largest weight before it was reduced.
    """

    site: str
    layer: int
    head: int
    rank: int | None
    pattern: str
    weights: NDArray[np.float64]
    size: tuple[int, int]
    largest: float


def pictures(heads: pd.DataFrame, matrices: Mapping[str, Tensor], most: int = MOST) -> list[Picture]:
    """The heads of each pattern that become constant first, at most `most` in all, taken pattern by pattern in turn.

    Without an order or names of patterns they are the first heads there are.
    """
    found = [_picture(row, matrices) for row in _chosen(heads, matrices, most)]
    return sorted(found, key=lambda one: (one.site, one.layer, one.head))


def _chosen(heads: pd.DataFrame, matrices: Mapping[str, Tensor], most: int) -> list[dict[str, Any]]:
    known = heads[[f"{site}.{layer}" in matrices for site, layer in zip(heads["site"], heads["layer"], strict=True)]]
    if known.empty:
        return []
    ordered = known.sort_values("rank", ascending=False, na_position="last", kind="stable")
    turn = ordered.groupby(ordered["pattern"].fillna("").astype(str), sort=False).cumcount()
    taken = ordered.assign(turn=turn).sort_values("turn", kind="stable").head(most)
    return [{str(name): value for name, value in row.items()} for row in taken.to_dict("records")]


def _picture(row: Mapping[str, Any], matrices: Mapping[str, Tensor]) -> Picture:
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


def payload(found: list[Picture]) -> list[dict[str, Any]]:
    """The pictures as the page's script reads them: shades 0–255 as base64, row by row."""
    several = len({one.site for one in found}) > 1
    return [
        {
            "caption": f"Layer {one.layer}, head {one.head}" + (f", {labels.site(one.site)}" if several else ""),
            "note": _note(one),
            "size": list(one.weights.shape),
            "shades": base64.b64encode(_shades(one.weights).tobytes()).decode("ascii"),
        }
        for one in found
    ]


def _note(one: Picture) -> str:
    rank = "" if one.rank is None else f"rank {one.rank}"
    return ", ".join(part for part in (one.pattern, rank, f"max. {labels.number(one.largest, 2)}") if part)


def _shades(weights: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The square root of each weight's share of the picture's largest, as 0–255."""
    size = np.abs(weights)
    return np.round(255 * np.sqrt(size / max(float(size.max()), 1e-300))).astype(np.uint8)


def about(found: list[Picture]) -> str:
    """How to read the pictures, in a few sentences."""
    if not found:
        return ""
    words = (
        "Rows are queries, columns keys, the first token at the top left; the shade is the square root of the weight "
        "relative to the largest. Shown are, of each pattern, the heads that become constant first."
    )
    reduced = sorted({one.size for one in found if one.size != one.weights.shape})
    if reduced:
        whole = ", ".join(f"{query}×{key}" for query, key in reduced)
        words += f" Matrices of {whole} are reduced to means of blocks, at most {SIDE}×{SIDE}."
    return words


def pattern_counts(heads: pd.DataFrame) -> list[tuple[str, int, float]]:
    """By pattern the number of heads and their share of all, the most frequent first; empty where none is named."""
    named = heads["pattern"].dropna()
    counts = named[named != ""].value_counts()
    return [(str(name), int(count), float(count / counts.sum())) for name, count in counts.items()]
