"""What gates did: which blocks the rows of each task got, how sure the gate was, and what it cost their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.matrix import Cells
from regard.report.page import Heading, Part, Row, Table
from regard.report.panels import Panel, line, panel

TIMES = {"learning": "when each task was learnt", "inference": "at the end"}
"""When a gate is looked at: right after each task, and after the last one."""

LINES = {
    "own_adapter_weight": ("Weight of the own block", "share of the task’s rows"),
    "entropy": ("Entropy of a row’s weights", "nats"),
    "reflection": ("Divergence from the weights that were kept", "nats"),
}
"""The statistics that are drawn by task: their titles, and what their values are."""

_ABOUT = (
    "Mean weight that the rows of a task (dev) give to each block, means over runs: when the task had just been "
    "learnt, and after the last one. {blocks} A gate is shut where a task’s own block, the one that it was given, gets "
    "next to nothing: the block was then hardly trained. Scores (test, TIL) as the gate routes, with the own block "
    "alone, and with another one alone (the one that was learnt last), when the task was learnt and at the end: routed "
    "below own means that the gate takes the wrong blocks; own no better than another, that the block learnt nothing."
)
_OWNED = "Each task has a block of its own: block 2 is that of the second task."
_SHARED = (
    "Blocks are numbered as they came and may be shared by tasks ({methods}): block 2 need not be that of the second "
    "task, nor the same in every run. Which block a task was given stands beside its scores.{others}"
)
_OTHERS = " With the other methods block 2 is that of the second task."
_STROKES = {"learning": (4, 1), "inference": (0, 0)}
_SCORES = (
    ("learning", "routed_score", "Routed, learnt"),
    ("learning", "own_adapter_score", "Own block, learnt"),
    ("learning", "last_adapter_score", "Other block, learnt"),
    ("inference", "routed_score", "Routed, end"),
    ("inference", "own_adapter_score", "Own block, end"),
    ("inference", "last_adapter_score", "Other block, end"),
)


def gates(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Mean weights of tasks (rows) and blocks (columns), and lines by task, for each method with a gate; empty without.

    Keys: `methods`, `tasks`, `times` (their titles by name), `blocks` by method (what each is called), `cells` by
    method and time, `lines` (panels) by method.
    """
    rows = table.dropna(subset=["value"])
    if rows.empty:
        return {}
    names = learn_tables.task_names(matrix)
    methods = [str(name) for name in rows["method"].unique()]
    each = {name: _by_time(rows[rows["method"] == name], len(names)) for name in methods}
    blocks = {name: _blocks(rows[rows["method"] == name], names) for name in methods}
    return {
        "methods": methods,
        "tasks": names,
        "times": TIMES,
        "blocks": blocks,
        "cells": {
            name: {time: _weights(found, len(names), len(blocks[name])) for time, found in each[name].items()}
            for name in methods
        },
        "lines": {name: _lines(name, each[name]) for name in methods},
    }


def _by_time(rows: pd.DataFrame, whole: int) -> dict[str, pd.DataFrame]:
    """The rows of each time."""
    return {"learning": rows[rows["after_task"] == rows["task_index"]], "inference": rows[rows["after_task"] == whole]}


def owned(rows: pd.DataFrame) -> bool:
    """Whether each task of a method has a block of its own, in every run: the one at its place."""
    own = rows[rows["statistic"] == "own_adapter_weight"]
    return bool(len(own)) and bool((own["adapter"] == own["task_index"]).all())


def _blocks(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """What a method's blocks are called: by their tasks where each task has its own, else by their numbers."""
    if owned(rows):
        return [f"block of {name}" for name in names]
    there = rows["adapter"].dropna()
    return [f"block {number}" for number in range(1, int(there.max()) + 1)] if len(there) else []


def about(table: pd.DataFrame) -> str:
    """How the weights and the scores are to be read."""
    rows = table.dropna(subset=["value"])
    own = {str(name): owned(ours) for name, ours in rows.groupby("method", sort=False)}
    shared = ", ".join(name for name, one in own.items() if not one)
    told = _SHARED.format(methods=shared, others=_OTHERS if any(own.values()) else "") if shared else _OWNED
    return _ABOUT.format(blocks=told)


def _weights(rows: pd.DataFrame, tasks: int, blocks: int) -> Cells:
    weights = rows[rows["statistic"] == "weight"]
    by = weights.astype({"value": "float64"}).groupby(["task_index", "adapter"])["value"].mean().to_dict()
    places = range(1, blocks + 1)
    return [[learn_tables.rounded(by.get((task, block))) for block in places] for task in range(1, tasks + 1)]


def _lines(method: str, times: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """A panel for each statistic that was measured, its two lines by the places of the tasks."""
    found: list[Panel] = []
    for statistic, (title, unit) in LINES.items():
        points = []
        for time, rows in times.items():
            means = _means(rows, statistic)
            points += line("task_index", TIMES[time], [float(one) for one in means], list(means.values()))
        styles = [(TIMES[time], *style) for time, style in _STROKES.items()]
        found += panel(title, f"{method}, {unit}", "task_index", points, styles)
    return found


def _means(rows: pd.DataFrame, statistic: str) -> dict[int, float]:
    """The mean over runs by the place of the task."""
    ours = rows[rows["statistic"] == statistic].astype({"value": "float64"})
    return {int(place): float(value) for place, value in ours.groupby("task_index", sort=True)["value"].mean().items()}


def scores(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    """A table for each method with a gate: its tasks, with the score that they have under different weights."""
    rows, names = table.dropna(subset=["value"]), learn_tables.task_names(matrix)
    tables = [_scores(str(method), ours, names) for method, ours in rows.groupby("method", sort=False)]
    return [part for one in tables if one for part in (Heading(one.caption), one)]


def _scores(method: str, rows: pd.DataFrame, names: Sequence[str]) -> Table:
    """A method's table, with the block of each task where tasks share blocks."""
    times = _by_time(rows, len(names))
    columns = [_means(times[time], statistic) for time, statistic, _ in _SCORES]
    given = {} if owned(rows) else _given(rows)
    lines: list[Row] = []
    for place, name in enumerate(names, 1):
        if any(place in column for column in columns):
            cells = [given.get(place, "–")] if given else []
            cells += [learn_metrics.format_fixed(column.get(place, math.nan), 1) for column in columns]
            lines.append((name, "", cells))
    head = ["Task", *(["Given block"] if given else []), *(title for _, _, title in _SCORES)]
    return Table(lines, head, f"{method}, scores", method)


def _given(rows: pd.DataFrame) -> dict[int, str]:
    """The block that each task was given, by its place; all of them where runs differ."""
    own = rows[rows["statistic"] == "own_adapter_weight"]
    return {
        int(place): " or ".join(str(int(block)) for block in sorted(blocks.dropna().unique()))
        for place, blocks in own.groupby("task_index")["adapter"]
    }
