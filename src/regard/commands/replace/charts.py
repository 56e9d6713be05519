"""The panels and maps of a report on replaced heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.replace import words
from regard.commands.replace.scores import NONE, axis_places, constant_rows, curves, fraction_name, shown_constants
from regard.report import labels


def score_panels(scores: pd.DataFrame, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A panel for each task, a line for each source of constants, in the order that the run is about."""
    _, select = shown_constants(scores, record)
    every = curves(constant_rows(scores))
    kept = (
        pd.concat([_one_order(group, select) for _, group in every.groupby(_PANEL, sort=False)])
        if len(every)
        else every
    )
    return _panels(kept, "constants")


def order_panels(scores: pd.DataFrame, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A panel for each task, a line for each order, with the constants that the run is about; empty for one order."""
    constants, _ = shown_constants(scores, record)
    every = curves(constant_rows(scores))
    ours = every[every["constants"] == constants]
    return _panels(ours, "rank_heads_by") if ours["rank_heads_by"].nunique() > 1 else []


_PANEL = ["model", "task", "metric", "constants"]


def _one_order(group: pd.DataFrame, select: str) -> pd.DataFrame:
    """The rows of one order: the wanted one, or the first where these constants were not run in it."""
    names = list(group["rank_heads_by"].unique())
    return group[group["rank_heads_by"] == (select if select in names else names[0])]


def _panels(points: pd.DataFrame, series: str) -> list[dict[str, Any]]:
    several = points["model"].nunique() > 1 if len(points) else False
    found = []
    for (model, task, metric), rows in points.groupby(["model", "task", "metric"], sort=False):
        at = axis_places(rows["dynamic_fraction"].tolist())
        found.append(
            {
                "caption": words.title(str(model), str(task), with_model=several),
                "note": words.metric(str(metric)),
                "axis": "fraction",
                "ticks": _ticks(at),
                "points": [_point(row, at, series) for row in rows.to_dict("records")],
            }
        )
    return found


def _ticks(at: Mapping[float, float]) -> dict[str, list[Any]]:
    return {"places": list(at.values()), "names": [fraction_name(fraction) for fraction in at]}


def _point(row: Mapping[Any, Any], at: Mapping[float, float], series: str) -> dict[str, Any]:
    fraction, (mean, low, high) = (
        float(row["dynamic_fraction"]),
        (float(row[key]) for key in ("mean", "ci_low", "ci_high")),
    )
    seeds = f" ({row['n']} {'seed' if row['n'] == 1 else 'seeds'})"
    shown = words.interval(mean, low, high) + seeds
    return point(at[fraction], fraction, mean, str(row[series]), shown, low, high)


def point(
    place: float, fraction: float, value: float, series: str, shown: str, low: float = math.nan, high: float = math.nan
) -> dict[str, Any]:
    """One point of a line as the page's script reads it."""
    numbers = {"value": value, "low": low, "high": high}
    rounded = {name: None if math.isnan(number) else float(f"{number:.6g}") for name, number in numbers.items()}
    return {
        "place": place,
        "fraction": fraction_name(fraction),
        "series": series,
        "part": "",
        "shown": shown,
        **rounded,
    }


def cost_panels(cost: pd.DataFrame) -> list[dict[str, Any]]:
    """One panel: time and FLOPs in percent of the untouched model's, by fraction; empty without two points."""
    shares = words.relative_cost(cost)
    at = axis_places(shares["dynamic_fraction"].tolist())
    points = [
        point(at[row["dynamic_fraction"]], row["dynamic_fraction"], row[key], name, f"{labels.number(row[key], 3)} %")
        for key, name in (("time", "time"), ("work", "FLOPs"))
        for row in shares.to_dict("records")
        if not math.isnan(row[key])
    ]
    if len(points) < 2:
        return []
    return [
        {
            "caption": "Relative to the untouched model",
            "note": "%",
            "axis": "fraction",
            "ticks": _ticks(at),
            "points": points,
        }
    ]


def order_maps(heads: pd.DataFrame, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map for each site: the rank of each head, 0 for the one that stays dynamic longest."""
    told = labels.section(record, "config").get("rank_heads_by")
    select = told[0] if isinstance(told, (list, tuple)) and told else told
    what = str(select) if isinstance(select, str) and select != NONE else "value"
    several, found = heads["site"].nunique() > 1, []
    for site, rows in heads.dropna(subset="rank").groupby("site", sort=False):
        found.append(
            {
                "caption": "Rank" + (f", {labels.site(str(site))}" if several else ""),
                "layers": sorted(int(layer) for layer in rows["layer"].unique()),
                "heads": sorted(int(head) for head in rows["head"].unique()),
                "last": int(heads["rank"].max()),
                "cells": [_cell(row, what) for row in rows.to_dict("records")],
            }
        )
    return found


def _cell(row: Mapping[Any, Any], what: str) -> dict[str, Any]:
    rank, value, pattern = int(row["rank"]), row["value"], row["pattern"]
    parts = [f"rank {rank}"]
    parts += [] if pd.isna(value) else [f"{what} {labels.number(float(value), 3)}"]
    parts += [] if pd.isna(pattern) else [str(pattern)]
    return {"layer": int(row["layer"]), "x": int(row["head"]), "value": rank, "shown": ", ".join(parts)}
