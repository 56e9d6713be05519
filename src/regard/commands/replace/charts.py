"""Panels and maps of a report on replaced heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.replace import words
from regard.commands.replace.scores import GROUP, NONE, Outcome, axis_places, constant_rows, curves, fraction_name
from regard.report import labels
from regard.report.panels import Panel, panel
from regard.report.words import join, pluralize


def score_panels(outcome: Outcome) -> list[Panel]:
    """Plot each task's score, a line per source of constants, in the run's main ranking."""
    points = curves(constant_rows(outcome.scores))
    is_main = points["rank_heads_by"] == outcome.ranking
    keys = [*GROUP, "constants"]
    if len(points):  # constants that were not run in the main ranking are shown in their first one
        first = points.groupby(keys, sort=False)["rank_heads_by"].transform("first")
        has_main = is_main.groupby([points[key] for key in keys], sort=False).transform("any")
        is_main |= ~has_main & (points["rank_heads_by"] == first)
    return _panels(outcome, points[is_main], "constants")


def order_panels(outcome: Outcome) -> list[Panel]:
    """Plot each task's score, a line per ranking, with the run's main constants; nothing for one ranking."""
    points = curves(constant_rows(outcome.scores))
    selected = points[points["constants"] == outcome.constants]
    return _panels(outcome, selected, "rank_heads_by") if selected["rank_heads_by"].nunique() > 1 else []


def _panels(outcome: Outcome, points: pd.DataFrame, series: str) -> list[Panel]:
    panels = []
    for (model, task, metric), rows in points.groupby(GROUP, sort=False):
        positions = axis_places(rows["dynamic_fraction"].tolist())
        written = []
        for row in rows.to_dict("records"):
            margin = "" if math.isnan(row["ci_low"]) else f" ± {labels.number((row['ci_high'] - row['ci_low']) / 2, 2)}"
            shown = f"{labels.number(row['mean'], 3)}{margin} ({pluralize(row['n'], 'seed')})"
            fraction, numbers = float(row["dynamic_fraction"]), (row["mean"], row["ci_low"], row["ci_high"])
            named = dict(zip(("value", "low", "high"), numbers, strict=True))
            written.append(_point(positions, fraction, str(row[series]), shown, **named))
        caption = words.title(outcome, str(model), str(task))
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


def order_maps(heads: pd.DataFrame, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Map the rank of each head, 0 for the one that stays dynamic longest, for each site."""
    rankings = labels.section(metadata, "config").get("rank_heads_by")
    ranking = rankings[0] if isinstance(rankings, (list, tuple)) and rankings else rankings
    value_name = str(ranking) if isinstance(ranking, str) and ranking != NONE else "value"
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
    shown = join([f"rank {rank}", formatted_value, "" if pd.isna(pattern) else str(pattern)])
    return {"layer": int(row["layer"]), "x": int(row["head"]), "value": rank, "shown": shown}
