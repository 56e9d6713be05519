"""Routing of adapters: weights by task, sharpness, and scores by adapter."""

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

TIMES = {"learning": "after each task", "inference": "at the end"}
"""When a gate is measured: right after each task, and after the last one."""

LINES = {
    "own_adapter_weight": ("Weight of the task’s own adapter", "share of the task’s rows"),
    "entropy": ("Entropy of a row’s weights", "nats"),
    "reflection": ("Divergence from the stored weights", "nats"),
}
"""Statistics drawn by task: title and unit."""

_ABOUT = (
    "Mean weight that the dev rows of a task give to each adapter, averaged over runs: right after the task, and after "
    "the last task. {blocks} A gate is closed if a task’s own adapter gets almost no weight: it was then hardly "
    "trained. Scores (test, TIL) with the routed weights, with the own adapter alone, and with another one alone (the "
    "last one trained), after the task and at the end. Routed below own: the gate selects the wrong adapters. Own no "
    "better than another: the adapter learned nothing."
)
_OWNED = "Each task has its own adapter: adapter 2 belongs to the second task."
_SHARED = (
    "Adapters are numbered in order of creation and may be shared by tasks ({methods}): adapter 2 need not belong to "
    "the second task, nor be the same in every run. The score tables name the adapter of each task.{others}"
)
_OTHERS = " With the other methods adapter 2 belongs to the second task."
_STROKES = {"learning": (4, 1), "inference": (0, 0)}
_SCORES = (
    ("learning", "routed_score", "Routed, after"),
    ("learning", "own_adapter_score", "Own adapter, after"),
    ("learning", "last_adapter_score", "Other adapter, after"),
    ("inference", "routed_score", "Routed, end"),
    ("inference", "own_adapter_score", "Own adapter, end"),
    ("inference", "last_adapter_score", "Other adapter, end"),
)


def make_gate_data(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Average routing weights by task (row) and adapter (column), for each method with a gate.

    Returns:
        `methods`, `tasks`, `times` (titles), `blocks` (adapter names by method), `cells` by method and time, and
        `lines` (panels) by method; empty without a gate.
    """
    rows = table.dropna(subset=["value"])
    if rows.empty:
        return {}
    names = learn_tables.task_names(matrix)
    methods = [str(name) for name in rows["method"].unique()]
    by_time = {name: _by_time(rows[rows["method"] == name], len(names)) for name in methods}
    adapters = {name: _blocks(rows[rows["method"] == name], names) for name in methods}
    return {
        "methods": methods,
        "tasks": names,
        "times": TIMES,
        "blocks": adapters,
        "cells": {
            name: {
                time: _weights(time_rows, len(names), len(adapters[name])) for time, time_rows in by_time[name].items()
            }
            for name in methods
        },
        "lines": {name: _lines(name, by_time[name]) for name in methods},
    }


def _by_time(rows: pd.DataFrame, num_tasks: int) -> dict[str, pd.DataFrame]:
    """Split rows by when they were measured."""
    return {
        "learning": rows[rows["after_task"] == rows["task_index"]],
        "inference": rows[rows["after_task"] == num_tasks],
    }


def has_adapter_per_task(rows: pd.DataFrame) -> bool:
    """Return whether each task has its own adapter, numbered as the task, in every run."""
    weights = rows[rows["statistic"] == "own_adapter_weight"]
    return bool(len(weights)) and bool((weights["adapter"] == weights["task_index"]).all())


def _blocks(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Name a method's adapters by task if each has its own, else by number."""
    if has_adapter_per_task(rows):
        return [f"adapter of {name}" for name in names]
    indices = rows["adapter"].dropna()
    return [f"adapter {index}" for index in range(1, int(indices.max()) + 1)] if len(indices) else []


def describe_gates(table: pd.DataFrame) -> str:
    """Describe how to read the weights and the scores."""
    rows = table.dropna(subset=["value"])
    by_method = {
        str(name): has_adapter_per_task(method_rows) for name, method_rows in rows.groupby("method", sort=False)
    }
    shared = ", ".join(name for name, has_own in by_method.items() if not has_own)
    sentence = _SHARED.format(methods=shared, others=_OTHERS if any(by_method.values()) else "") if shared else _OWNED
    return _ABOUT.format(blocks=sentence)


def _weights(rows: pd.DataFrame, num_tasks: int, num_adapters: int) -> Cells:
    weights = rows[rows["statistic"] == "weight"]
    means = weights.astype({"value": "float64"}).groupby(["task_index", "adapter"])["value"].mean().to_dict()
    adapters = range(1, num_adapters + 1)
    return [
        [learn_tables.round_value(means.get((task, adapter))) for adapter in adapters]
        for task in range(1, num_tasks + 1)
    ]


def _lines(method: str, times: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """Draw a panel per statistic: one line at each time, by task."""
    panels: list[Panel] = []
    for statistic, (title, unit) in LINES.items():
        points = []
        for time, rows in times.items():
            means = _means(rows, statistic)
            points += line("task_index", TIMES[time], [float(position) for position in means], list(means.values()))
        styles = [(TIMES[time], *style) for time, style in _STROKES.items()]
        panels += panel(title, f"{method}, {unit}", "task_index", points, styles)
    return panels


def _means(rows: pd.DataFrame, statistic: str) -> dict[int, float]:
    """Average a statistic over runs, by task."""
    values = rows[rows["statistic"] == statistic].astype({"value": "float64"})
    return {int(task): float(value) for task, value in values.groupby("task_index", sort=True)["value"].mean().items()}


def make_score_tables(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    """Make a table per method with a gate: the scores of its tasks by adapter."""
    rows, names = table.dropna(subset=["value"]), learn_tables.task_names(matrix)
    score_tables = [
        _scores(str(method), method_rows, names) for method, method_rows in rows.groupby("method", sort=False)
    ]
    return [part for table in score_tables if table for part in (Heading(table.caption), table)]


def _scores(method: str, rows: pd.DataFrame, names: Sequence[str]) -> Table:
    """Make a method's table, with each task's adapter if tasks share adapters."""
    times = _by_time(rows, len(names))
    columns = [_means(times[time], statistic) for time, statistic, _ in _SCORES]
    assigned = {} if has_adapter_per_task(rows) else _given(rows)
    lines: list[Row] = []
    for task, name in enumerate(names, 1):
        if any(task in column for column in columns):
            cells = [assigned.get(task, "–")] if assigned else []
            cells += [learn_metrics.format_fixed(column.get(task, math.nan), 1) for column in columns]
            lines.append((name, "", cells))
    head = ["Task", *(["Adapter"] if assigned else []), *(title for _, _, title in _SCORES)]
    return Table(lines, head, f"{method}, scores", method)


def _given(rows: pd.DataFrame) -> dict[int, str]:
    """Return the adapter assigned to each task; all of them if runs differ."""
    weights = rows[rows["statistic"] == "own_adapter_weight"]
    return {
        int(task): " or ".join(str(int(adapter)) for adapter in sorted(adapters.dropna().unique()))
        for task, adapters in weights.groupby("task_index")["adapter"]
    }
