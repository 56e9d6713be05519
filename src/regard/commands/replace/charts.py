"""Panels and maps of a report on replaced heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.replace import words
from regard.commands.replace.scores import NONE, axis_places, constant_rows, curves, fraction_name, shown_constants
from regard.report import labels


def score_panels(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plot each task's score, a line per source of constants, in the run's main ranking."""
    _, ranking = shown_constants(scores, metadata)
    all_curves = curves(constant_rows(scores))
    selected = (
        pd.concat([_one_order(group, ranking) for _, group in all_curves.groupby(_PANEL, sort=False)])
        if len(all_curves)
        else all_curves
    )
    return _panels(selected, "constants")


def order_panels(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plot each task's score, a line per ranking, with the run's main constants; nothing for one ranking."""
    constants, _ = shown_constants(scores, metadata)
    all_curves = curves(constant_rows(scores))
    selected = all_curves[all_curves["constants"] == constants]
    return _panels(selected, "rank_heads_by") if selected["rank_heads_by"].nunique() > 1 else []


_PANEL = ["model", "task", "metric", "constants"]


def _one_order(group: pd.DataFrame, ranking: str) -> pd.DataFrame:
    """Select one ranking, or the first if these constants were not run in it."""
    names = list(group["rank_heads_by"].unique())
    return group[group["rank_heads_by"] == (ranking if ranking in names else names[0])]


def _panels(points: pd.DataFrame, series: str) -> list[dict[str, Any]]:
    multiple_models = points["model"].nunique() > 1 if len(points) else False
    panels = []
    for (model, task, metric), rows in points.groupby(["model", "task", "metric"], sort=False):
        positions = axis_places(rows["dynamic_fraction"].tolist())
        panels.append(
            {
                "caption": words.title(str(model), str(task), with_model=multiple_models),
                "note": words.metric(str(metric)),
                "axis": "fraction",
                "ticks": _ticks(positions),
                "points": [_point(row, positions, series) for row in rows.to_dict("records")],
            }
        )
    return panels


def _ticks(positions: Mapping[float, float]) -> dict[str, list[Any]]:
    return {"places": list(positions.values()), "names": [fraction_name(fraction) for fraction in positions]}


def _point(row: Mapping[Any, Any], positions: Mapping[float, float], series: str) -> dict[str, Any]:
    fraction, (mean, ci_low, ci_high) = (
        float(row["dynamic_fraction"]),
        (float(row[key]) for key in ("mean", "ci_low", "ci_high")),
    )
    seeds = f" ({row['n']} {'seed' if row['n'] == 1 else 'seeds'})"
    text = words.interval(mean, ci_low, ci_high) + seeds
    return point(positions[fraction], fraction, mean, str(row[series]), text, ci_low, ci_high)


def point(
    position: float,
    fraction: float,
    value: float,
    series: str,
    text: str,
    low: float = math.nan,
    high: float = math.nan,
) -> dict[str, Any]:
    """Make a point of a line as the page's script reads it."""
    numbers = {"value": value, "low": low, "high": high}
    rounded = {name: None if math.isnan(x) else float(f"{x:.6g}") for name, x in numbers.items()}
    return {
        "place": position,
        "fraction": fraction_name(fraction),
        "series": series,
        "part": "",
        "shown": text,
        **rounded,
    }


def cost_panels(cost: pd.DataFrame) -> list[dict[str, Any]]:
    """Plot time and FLOPs in percent of the original model's, by fraction; nothing for one point."""
    costs = words.relative_cost(cost)
    positions = axis_places(costs["dynamic_fraction"].tolist())
    points = [
        point(
            positions[row["dynamic_fraction"]],
            row["dynamic_fraction"],
            row[key],
            name,
            f"{labels.number(row[key], 3)} %",
        )
        for key, name in (("time", "time"), ("work", "FLOPs"))
        for row in costs.to_dict("records")
        if not math.isnan(row[key])
    ]
    if len(points) < 2:
        return []
    return [
        {
            "caption": "Relative to the original model",
            "note": "%",
            "axis": "fraction",
            "ticks": _ticks(positions),
            "points": points,
        }
    ]


def order_maps(heads: pd.DataFrame, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Map the rank of each head, 0 for the one that stays dynamic longest, for each site."""
    rankings = labels.section(metadata, "config").get("rank_heads_by")
    ranking = rankings[0] if isinstance(rankings, (list, tuple)) and rankings else rankings
    value_name = str(ranking) if isinstance(ranking, str) and ranking != NONE else "value"
    multiple_models, maps = heads["site"].nunique() > 1, []
    for site, rows in heads.dropna(subset="rank").groupby("site", sort=False):
        maps.append(
            {
                "caption": "Rank" + (f", {labels.site(str(site))}" if multiple_models else ""),
                "layers": sorted(int(layer) for layer in rows["layer"].unique()),
                "heads": sorted(int(head) for head in rows["head"].unique()),
                "last": int(heads["rank"].max()),
                "cells": [_cell(row, value_name) for row in rows.to_dict("records")],
            }
        )
    return maps


def _cell(row: Mapping[Any, Any], value_name: str) -> dict[str, Any]:
    rank, value, pattern = int(row["rank"]), row["value"], row["pattern"]
    parts = [f"rank {rank}"]
    parts += [] if pd.isna(value) else [f"{value_name} {labels.number(float(value), 3)}"]
    parts += [] if pd.isna(pattern) else [str(pattern)]
    return {"layer": int(row["layer"]), "x": int(row["head"]), "value": rank, "shown": ", ".join(parts)}
