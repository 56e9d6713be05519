"""Routing of adapters: weights by task, sharpness, and scores by adapter."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn.tables import Cells, average_statistic, make_cells, task_names
from regard.report.labels import format_fixed
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
_ADAPTERS = {"routed": "Routed", "own_adapter": "Own adapter", "last_adapter": "Other adapter"}
_SCORES = [
    (time, f"{adapter}_score", f"{title}, {when}")
    for time, when in (("learning", "after"), ("inference", "end"))
    for adapter, title in _ADAPTERS.items()
]


def make_gate_data(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Average routing weights by task (row) and adapter (column) for each method with a gate; empty without one."""
    if table.empty:
        return {}
    names = task_names(matrix)
    by_time = {name: _split_times(rows, len(names)) for name, rows in table.groupby("method", sort=False)}
    adapters = {name: _name_adapters(rows, names) for name, rows in table.groupby("method", sort=False)}
    return {
        "methods": list(by_time),
        "tasks": names,
        "times": TIMES,
        "blocks": adapters,
        "cells": {
            name: {time: _weights(rows, len(names), len(adapters[name])) for time, rows in times.items()}
            for name, times in by_time.items()
        },
        "lines": {name: _lines(name, times) for name, times in by_time.items()},
    }


def _split_times(rows: pd.DataFrame, num_tasks: int) -> dict[str, pd.DataFrame]:
    """Split rows by when they were measured."""
    after = rows["after_task"]
    return {"learning": rows[after == rows["task_index"]], "inference": rows[after == num_tasks]}


def has_adapter_per_task(rows: pd.DataFrame) -> bool:
    """Return whether each task has its own adapter, numbered as the task, in every run."""
    weights = rows[rows["statistic"] == "own_adapter_weight"]
    return bool(len(weights)) and bool((weights["adapter"] == weights["task_index"]).all())


def _name_adapters(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Name a method's adapters by task if each has its own, else by number."""
    if has_adapter_per_task(rows):
        return [f"adapter of {name}" for name in names]
    return [f"adapter {index}" for index in range(1, int(rows["adapter"].fillna(0).max()) + 1)]


def describe_gates(table: pd.DataFrame) -> str:
    """Describe how to read the weights and the scores."""
    by_method = {name: has_adapter_per_task(rows) for name, rows in table.groupby("method", sort=False)}
    shared = ", ".join(name for name, has_own in by_method.items() if not has_own)
    sentence = _SHARED.format(methods=shared, others=_OTHERS if any(by_method.values()) else "") if shared else _OWNED
    return _ABOUT.format(blocks=sentence)


def _weights(rows: pd.DataFrame, num_tasks: int, num_adapters: int) -> Cells:
    means = average_statistic(rows, "weight", "task_index", "adapter")
    return make_cells(means, range(1, num_tasks + 1), range(1, num_adapters + 1))


def _lines(method: str, times: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """Draw a panel per statistic: one line at each time, by task."""
    panels: list[Panel] = []
    styles = [(TIMES[time], *style) for time, style in _STROKES.items()]
    for statistic, (title, unit) in LINES.items():
        points = []
        for time, rows in times.items():
            means = average_statistic(rows, statistic, "task_index")
            points += line("task_index", TIMES[time], list(means), list(means.values()))
        panels += panel(title, f"{method}, {unit}", "task_index", points, styles)
    return panels


def make_score_tables(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    """Make a table per method with a gate: the scores of its tasks by adapter."""
    tables = [_scores(name, rows, task_names(matrix)) for name, rows in table.groupby("method", sort=False)]
    return [part for table in tables if table for part in (Heading(table.caption), table)]


def _scores(method: str, rows: pd.DataFrame, names: Sequence[str]) -> Table:
    """Make a method's table, with each task's adapter if tasks share adapters; all of them if runs differ."""
    times = _split_times(rows, len(names))
    columns = [average_statistic(times[time], statistic, "task_index") for time, statistic, _ in _SCORES]
    assigned: dict[int, str] = {}
    if not has_adapter_per_task(rows):
        weights = rows[rows["statistic"] == "own_adapter_weight"]
        for task, adapters in weights.groupby("task_index")["adapter"]:
            assigned[task] = " or ".join(map(str, sorted(adapters.dropna().unique())))
    lines: list[Row] = []
    for task, name in enumerate(names, 1):
        if any(task in column for column in columns):
            cells = [assigned.get(task, "–")] if assigned else []
            cells += [format_fixed(column.get(task, math.nan), 1) for column in columns]
            lines.append((name, "", cells))
    head = ["Task", *(["Adapter"] if assigned else []), *(title for _, _, title in _SCORES)]
    return Table(lines, head, f"{method}, scores", method)
