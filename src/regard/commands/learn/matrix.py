"""Data of the page's accuracy matrices and gradient interference: nested lists by method and run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.learn import tables as learn_tables

MAX_NUMBERS = 150_000
"""Numbers of matrices on a page, at most; beyond it single runs are omitted."""

MEAN = "mean over runs"

Cells = list[list[float | None]]


def make_matrix_data(matrix: pd.DataFrame) -> dict[str, Any]:
    """Collect scores by tasks trained (row) and task (column).

    Returns:
        `settings` (scenario titles), `methods`, `runs` (the mean first if there are several), `afters` and `low` (lower
        end of the scale) by scenario, `tasks` by run, and `cells` by scenario, method and run.
    """
    names, num_tasks = learn_tables.run_names(matrix), learn_tables.count_tasks(matrix)
    shown_runs = list(names.values()) if _fits(matrix, num_tasks) else []
    runs = [MEAN, *shown_runs] if len(names) > 1 else list(names.values())
    scenarios = learn_tables.find_scenarios(matrix)
    return {
        "settings": {scenario: learn_tables.SCENARIOS[scenario] for scenario in scenarios},
        "methods": learn_tables.method_names(matrix),
        "runs": runs,
        "afters": {scenario: _afters(matrix[matrix["scenario"] == scenario]) for scenario in scenarios},
        "low": {scenario: _low(matrix[matrix["scenario"] == scenario]) for scenario in scenarios},
        "tasks": _tasks(matrix, names, runs),
        "cells": {
            scenario: _by_method(matrix[matrix["scenario"] == scenario], names, runs, num_tasks)
            for scenario in scenarios
        },
    }


def _fits(matrix: pd.DataFrame, num_tasks: int) -> bool:
    groups = matrix[[*learn_tables.RUN_KEYS, "scenario"]].drop_duplicates()
    return len(groups) * num_tasks * (num_tasks + 1) <= MAX_NUMBERS


def omits_runs(matrix: pd.DataFrame) -> bool:
    """Return whether the page holds means only."""
    return not _fits(matrix, learn_tables.count_tasks(matrix)) and len(learn_tables.run_names(matrix)) > 1


def _afters(rows: pd.DataFrame) -> list[int]:
    return sorted(int(after) for after in rows["after_task"].unique())


def _low(rows: pd.DataFrame) -> float:
    """Round the lowest score down to a multiple of ten, for a scale shared by all methods."""
    lowest = float(rows["score"].min())
    return max(0.0, 10.0 * math.floor(lowest / 10)) if lowest < 100 else 0.0


def _tasks(matrix: pd.DataFrame, names: Mapping[tuple[int, str], str], runs: list[str]) -> dict[str, list[str]]:
    """Name the columns by run; those of the mean by position if orders differ."""
    columns = {MEAN: learn_tables.task_names(matrix)}
    for (seed, order), name in names.items():
        rows = matrix[(matrix["seed"] == seed) & (matrix["order"] == order)]
        columns[name] = [*learn_tables.task_names(rows), *columns[MEAN][learn_tables.count_tasks(rows) :]]
    return {run: columns[run] for run in runs}


def _by_method(
    rows: pd.DataFrame, names: Mapping[tuple[int, str], str], runs: list[str], num_tasks: int
) -> dict[str, dict[str, Cells]]:
    afters, by_method = _afters(rows), {}
    for method, method_rows in rows.groupby("method", sort=False):
        by_run = {MEAN: average_scores(method_rows, afters, num_tasks)} if MEAN in runs else {}
        for (seed, order), run_rows in method_rows.groupby(["seed", "order"], sort=False):
            name = names[int(seed), str(order)]
            by_run |= {name: average_scores(run_rows, afters, num_tasks)} if name in runs else {}
        by_method[str(method)] = by_run
    return by_method


def average_scores(rows: pd.DataFrame, afters: list[int], num_tasks: int) -> Cells:
    """Average scores by tasks trained and task; None where there are none."""
    means = rows.groupby(["after_task", "task_index"])["score"].mean().to_dict()
    return [
        [learn_tables.round_value(means.get((after, task))) for task in range(1, num_tasks + 1)] for after in afters
    ]


def make_interference_data(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Average the gradient similarity of two tasks over runs.

    Returns:
        `methods`, `afters`, `tasks`, `top` (largest absolute cosine, rounded up), and `cells` by method and tasks
        trained: cosine and dot product of each pair. Empty if nothing was measured.
    """
    rows = table.dropna(subset=["cosine"])
    if rows.empty:
        return {}
    names = learn_tables.task_names(matrix)
    mirrored = rows.rename(columns={"task_index_a": "task_index_b", "task_index_b": "task_index_a"})
    keys = ["method", "after_task", "task_index_a", "task_index_b"]
    means = pd.concat([rows, mirrored]).groupby(keys, sort=False)[["cosine", "dot"]].mean().astype("float64")
    squares: dict[str, dict[str, list[list[Any]]]] = {}
    for (method, after), pairs in means.groupby(level=[0, 1], sort=False):
        values = {(int(a), int(b)): (row["cosine"], row["dot"]) for (_, _, a, b), row in pairs.iterrows()}
        square = [[_pair(values.get((a + 1, b + 1))) for b in range(len(names))] for a in range(len(names))]
        squares.setdefault(str(method), {})[str(int(after))] = square
    off_diagonal = means[means.index.get_level_values("task_index_a") != means.index.get_level_values("task_index_b")]
    largest = float(off_diagonal["cosine"].abs().max()) if len(off_diagonal) else 1.0
    return {
        "methods": list(squares),
        "afters": sorted({int(after) for by_after in squares.values() for after in by_after}),
        "tasks": names,
        "top": min(1.0, max(0.1, math.ceil(10 * largest) / 10)),
        "cells": squares,
    }


def _pair(values: tuple[float, float] | None) -> list[float | None] | None:
    return None if values is None else [learn_tables.round_value(value) for value in values]
