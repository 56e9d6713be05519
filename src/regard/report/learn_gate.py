"""What gates did: which blocks the rows of each task got, how sure the gate was, and what it cost their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from regard.report import learn_metrics, learn_tables, markup
from regard.report.learn_matrix import Cells
from regard.report.pretrain_curves import Panel, line, panel

TIMES = {"learning": "when each task was learnt", "inference": "at the end"}
"""When a gate is looked at: right after each task, and after the last one."""

LINES = {
    "own_weight": ("Weight of the own block", "share of the task’s rows"),
    "entropy": ("Entropy of a row’s weights", "nats"),
    "reflection": ("Divergence from the weights that were kept", "nats"),
}
"""The statistics that are drawn by task: their titles, and what their values are."""

ABOUT = (
    "Mean weight that the rows of a task (dev) give to the block of each task, means over runs: when the task had just "
    "been learnt, and after the last one. A gate is shut where a task’s own block gets next to nothing: the block was "
    "then hardly trained. Scores (test, TIL) as the gate routes, with the own block alone, and with another one alone, "
    "when the task was learnt and at the end: routed below own means that the gate takes the wrong blocks; own no "
    "better than another, that the block learnt nothing."
)
_STROKES = {"learning": (4, 1), "inference": (0, 0)}
_SCORES = (
    ("learning", "routed_score", "Routed, learnt"),
    ("learning", "forced_score", "Own block, learnt"),
    ("inference", "routed_score", "Routed, end"),
    ("inference", "forced_score", "Own block, end"),
    ("inference", "other_score", "Other block, end"),
)


def gates(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Mean weights of tasks (rows) and blocks (columns), and lines by task, for each method with a gate; empty without.

    Keys: `methods`, `tasks`, `times` (their titles by name), `cells` by method and time, `lines` (panels) by method.
    """
    rows = table.dropna(subset=["value"])
    if rows.empty:
        return {}
    names = learn_tables.task_names(matrix)
    methods = [str(name) for name in rows["method"].unique()]
    each = {name: _by_time(rows[rows["method"] == name], len(names)) for name in methods}
    return {
        "methods": methods,
        "tasks": names,
        "times": TIMES,
        "cells": {name: {time: _weights(found, len(names)) for time, found in each[name].items()} for name in methods},
        "lines": {name: _lines(name, each[name]) for name in methods},
    }


def _by_time(rows: pd.DataFrame, whole: int) -> dict[str, pd.DataFrame]:
    """The rows of each time."""
    return {"learning": rows[rows["after_task"] == rows["position"]], "inference": rows[rows["after_task"] == whole]}


def _weights(rows: pd.DataFrame, whole: int) -> Cells:
    weights = rows[rows["statistic"] == "weight"]
    by = weights.astype({"value": "float64"}).groupby(["position", "block"])["value"].mean().to_dict()
    places = range(1, whole + 1)
    return [[learn_tables.rounded(by.get((task, block))) for block in places] for task in places]


def _lines(method: str, times: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """A panel for each statistic that was measured, its two lines by the places of the tasks."""
    found: list[Panel] = []
    for statistic, (title, unit) in LINES.items():
        points = []
        for time, rows in times.items():
            means = _means(rows, statistic)
            points += line("position", TIMES[time], [float(one) for one in means], list(means.values()))
        styles = [(TIMES[time], *style) for time, style in _STROKES.items()]
        found += panel(title, f"{method}, {unit}", "position", points, styles)
    return found


def _means(rows: pd.DataFrame, statistic: str) -> dict[int, float]:
    """The mean over runs by the place of the task."""
    ours = rows[rows["statistic"] == statistic].astype({"value": "float64"})
    return {int(place): float(value) for place, value in ours.groupby("position", sort=True)["value"].mean().items()}


def scores(table: pd.DataFrame, matrix: pd.DataFrame) -> str:
    """A table for each method with a gate: its tasks, with the score that they have under different weights."""
    rows, names, parts = table.dropna(subset=["value"]), learn_tables.task_names(matrix), []
    for method in rows["method"].unique():
        times = _by_time(rows[rows["method"] == method], len(names))
        columns = [_means(times[time], statistic) for time, statistic, _ in _SCORES]
        lines = [
            (name, "", [learn_metrics.fixed(column.get(place, math.nan), 1) for column in columns])
            for place, name in enumerate(names, 1)
            if any(place in column for column in columns)
        ]
        if lines:
            head = ["Task", *(title for _, _, title in _SCORES)]
            parts.append(f"<h3>{escape(str(method))}</h3>" + markup.values_table(head, lines, f"{method}, scores"))
    return "".join(parts)
