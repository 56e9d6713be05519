"""Panels, maps and images of a report on replaced heads."""

import base64
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.commands.replace import words
from regard.commands.replace.scores import (
    GROUP,
    NONE,
    Outcome,
    axis_places,
    constant_rows,
    curves,
    fewest_dynamic,
    fraction_name,
)
from regard.report import labels
from regard.report.panels import Panel, assign_styles, panel, round_value

SIDE, MOST = 64, 12
"""The most rows and columns of an image, and images on a page."""


def score_panels(outcome: Outcome) -> list[Panel]:
    """Plot each task's score, a line per source of constants, in the run's main ranking."""
    points = curves(constant_rows(outcome.scores))
    is_main = points["rank_heads_by"] == outcome.ranking
    keys = [*GROUP, "constants"]
    if len(points):  # constants that were not run in the main ranking are shown in their first one
        first = points.groupby(keys, sort=False)["rank_heads_by"].transform("first")
        has_main = is_main.groupby([points[key] for key in keys], sort=False).transform("any")
        is_main |= ~has_main & (points["rank_heads_by"] == first)
    return fraction_panels(points[is_main], "constants", partial(words.title, outcome))


def order_panels(outcome: Outcome) -> list[Panel]:
    """Plot each task's score, a line per ranking, with the run's main constants; nothing for one ranking."""
    points = curves(constant_rows(outcome.scores))
    selected = points[points["constants"] == outcome.constants]
    if selected["rank_heads_by"].nunique() < 2:
        return []
    return fraction_panels(selected, "rank_heads_by", partial(words.title, outcome))


def fraction_panels(points: pd.DataFrame, series: str, title: Callable[[str, str], str]) -> list[Panel]:
    """Plot points of `curves` by fraction, a panel a model and task, which `title` names, and a line a `series`."""
    panels = []
    for (model, task, metric), rows in points.groupby(GROUP, sort=False):
        positions = axis_places(rows["dynamic_fraction"].tolist())
        written = []
        for row in rows.to_dict("records"):
            margin = (row["ci_high"] - row["ci_low"]) / 2
            over_text = row["n"] == 1 and not math.isnan(margin)
            times = "over parts of the text" if over_text else labels.pluralize(row["n"], "seed")
            shown = f"{labels.with_margin(row['mean'], margin, digits=3)} ({times})"
            fraction, numbers = float(row["dynamic_fraction"]), (row["mean"], row["ci_low"], row["ci_high"])
            named = dict(zip(("value", "low", "high"), numbers, strict=True))
            written.append(_point(positions, fraction, str(row[series]), shown, **named))
        caption = title(str(model), str(task))
        panels += panel(caption, words.metric(str(metric)), "fraction", written, ticks=_ticks(positions))
    return panels


def _ticks(positions: Mapping[float, float]) -> dict[str, list[Any]]:
    return {"places": list(positions.values()), "names": [fraction_name(fraction) for fraction in positions]}


def _point(
    positions: Mapping[float, float], fraction: float, series: str, shown: str, **numbers: float
) -> dict[str, Any]:
    """Make a point of a line as the page's script reads it, with a value and the interval from low to high."""
    rounded = {name: None if math.isnan(x) else float(f"{x:.6g}") for name, x in numbers.items()}
    place = {"place": positions[fraction], "fraction": fraction_name(fraction)}
    return {**place, "series": series, "shown": shown, **rounded}


def model_panels(outcome: Outcome) -> list[Panel]:
    """Plot the drop with the fewest dynamic heads over the original score, a dot a model, for each task with two."""
    drops = fewest_dynamic(outcome.main).dropna(subset="drop")
    styles = assign_styles([str(model) for model in outcome.scores["model"].unique()])
    known = {name for name, _, _ in styles}
    panels = []
    for (task, metric, unit), rows in drops.groupby(["task", "metric", "unit"], sort=False):
        dots = [
            {
                "series": str(row["model"]),
                "part": "",
                "what": str(task),
                "x": round_value(row["original"]),
                "value": round_value(row["drop"]),
                "shown": f"original {labels.number(row['original'], 3)}, drop {words.drop(row['drop'], str(unit))}",
            }
            for row in rows.to_dict("records")
            if str(row["model"]) in known
        ]
        axis = f"Original {words.metric(str(metric))}"
        caption = words.task_title(str(task))
        panels += panel(
            caption, f"drop, {unit}", axis, dots if len(dots) > 1 else [], styles, kind="dots", names=["Model", "Task"]
        )
    return panels


def cost_panels(cost: pd.DataFrame) -> list[Panel]:
    """Plot time and FLOPs in percent of the original model's, by fraction; nothing for one point."""
    costs = words.relative_cost(cost)
    positions = axis_places(costs["dynamic_fraction"].tolist())
    unknown = {"low": math.nan, "high": math.nan}
    points = [
        _point(positions, row["dynamic_fraction"], name, f"{labels.number(row[key], 3)} %", value=row[key], **unknown)
        for key, name in (("time", "time"), ("work", "FLOPs"))
        for row in costs.to_dict("records")
        if not math.isnan(row[key])
    ]
    shown = points if len(points) > 1 else []
    return panel("Relative to the original model", "%", "fraction", shown, ticks=_ticks(positions))


def head_ranking(metadata: Mapping[str, Any]) -> str:
    """Return the ranking in the table of heads, the first of a run; empty if it has none."""
    rankings = labels.section(metadata, "config").get("rank_heads_by")
    ranking = rankings[0] if isinstance(rankings, (list, tuple)) and rankings else rankings
    return ranking if isinstance(ranking, str) and ranking != NONE else ""


def order_maps(heads: pd.DataFrame, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Map the rank of each head, 0 for the one that stays dynamic longest, for each site."""
    value_name = head_ranking(metadata) or "value"
    multiple_sites = heads["site"].nunique() > 1
    return [
        {
            "caption": "Rank" + (f", {labels.site(str(site))}" if multiple_sites else ""),
            "layers": sorted(int(layer) for layer in rows["layer"].unique()),
            "heads": sorted(int(head) for head in rows["head"].unique()),
            "last": int(heads["rank"].max()),
            "cells": [_cell(row, value_name) for row in rows.to_dict("records")],
        }
        for site, rows in heads.dropna(subset="rank").groupby("site", sort=False)
    ]


def _cell(row: Mapping[Any, Any], value_name: str) -> dict[str, Any]:
    rank, value, pattern = int(row["rank"]), row["value"], row["pattern"]
    formatted_value = "" if pd.isna(value) else f"{value_name} {labels.number(float(value), 3)}"
    shown = labels.join([f"rank {rank}", formatted_value, "" if pd.isna(pattern) else str(pattern)])
    return {"layer": int(row["layer"]), "x": int(row["head"]), "value": rank, "shown": shown}


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
                "caption": labels.join([f"Layer {image.layer}, head {image.head}", site]),
                "note": labels.join([image.pattern, rank, f"max. {labels.number(image.largest, 2)}"]),
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
