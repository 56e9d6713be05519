"""Data of the page's accuracy matrices and gradient interference: nested lists by method and run."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import tables as learn_tables
from regard.commands.learn.tables import SCENARIOS, Cells, count_tasks, make_cells, round_value, run_names, task_names

MAX_NUMBERS = 150_000
"""Numbers of matrices on a page, at most; beyond it single runs are omitted."""

MEAN = "mean over runs"


def make_matrix_data(matrix: pd.DataFrame) -> dict[str, Any]:
    """Collect `cells`, the scores by tasks trained (row) and task (column), by scenario, method and run.

    If there are several runs, the first is the mean over runs. `low` is the lower end of the scale.
    """
    names, tasks = run_names(matrix), task_names(matrix)
    matrix = matrix.assign(run=[names[key] for key in zip(matrix["seed"], matrix["order"], strict=True)])
    single_runs = [] if omits_runs(matrix) else list(names.values())
    by_run = {MEAN: matrix, **dict(iter(matrix.groupby("run", sort=False)))}
    by_scenario = {name: matrix[matrix["scenario"] == name] for name in learn_tables.find_scenarios(matrix)}
    runs = [MEAN, *single_runs] if len(names) > 1 else single_runs
    return {
        "settings": {scenario: SCENARIOS[scenario] for scenario in by_scenario},
        "methods": learn_tables.method_names(matrix),
        "runs": runs,
        "afters": {scenario: find_afters(rows) for scenario, rows in by_scenario.items()},
        "low": {scenario: _low(rows) for scenario, rows in by_scenario.items()},
        # Tasks that a run has not trained are named by the other runs.
        "tasks": {run: [*task_names(by_run[run]), *tasks[count_tasks(by_run[run]) :]] for run in runs},
        "cells": {scenario: _cells_by_method(rows, runs, len(tasks)) for scenario, rows in by_scenario.items()},
    }


def omits_runs(matrix: pd.DataFrame) -> bool:
    """Return whether the page holds means only."""
    groups, num_tasks = matrix[[*learn_tables.RUN_KEYS, "scenario"]].drop_duplicates(), count_tasks(matrix)
    return len(groups) * num_tasks * (num_tasks + 1) > MAX_NUMBERS and len(run_names(matrix)) > 1


def find_afters(rows: pd.DataFrame) -> list[int]:
    """Return the numbers of trained tasks after which there are scores."""
    return sorted(set(rows["after_task"]))


def _low(rows: pd.DataFrame) -> float:
    """Round the lowest score down to a multiple of ten, for a scale shared by all methods."""
    lowest = float(rows["score"].min())
    return max(0.0, 10.0 * math.floor(lowest / 10)) if lowest < 100 else 0.0


def _cells_by_method(rows: pd.DataFrame, runs: Sequence[str], num_tasks: int) -> dict[str, dict[str, Cells]]:
    afters, cells = find_afters(rows), {}
    for method, method_rows in rows.groupby("method", sort=False):
        by_run = {MEAN: method_rows, **dict(iter(method_rows.groupby("run", sort=False)))}
        cells[method] = {run: average_scores(by_run[run], afters, num_tasks) for run in runs if run in by_run}
    return cells


def average_scores(rows: pd.DataFrame, afters: Sequence[int], num_tasks: int) -> Cells:
    """Average scores by tasks trained and task; None where there are none."""
    means = rows.groupby(["after_task", "task_index"])["score"].mean().to_dict()
    return make_cells(means, afters, range(1, num_tasks + 1))


def make_interference_data(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Average `cells`, cosine and dot product of each pair of tasks, over runs, by method and tasks trained.

    `top` is the largest absolute cosine, rounded up. Empty if nothing was measured.
    """
    rows = table.dropna(subset=["cosine"])
    if rows.empty:
        return {}
    names = task_names(matrix)
    mirrored = rows.rename(columns={"task_index_a": "task_index_b", "task_index_b": "task_index_a"})
    keys = ["method", "after_task", "task_index_a", "task_index_b"]
    means = pd.concat([rows, mirrored]).groupby(keys, sort=False)[["cosine", "dot"]].mean().astype("float64")
    pairs = {key: [round_value(cosine), round_value(dot)] for key, cosine, dot in means.itertuples(name=None)}
    positions = range(1, len(names) + 1)
    squares: dict[str, dict[str, list[list[Any]]]] = {}
    for method, after in dict.fromkeys(key[:2] for key in pairs):
        square = [[pairs.get((method, after, a, b)) for b in positions] for a in positions]
        squares.setdefault(method, {})[str(after)] = square
    others = means.query("task_index_a != task_index_b")["cosine"]
    largest = float(others.abs().max()) if len(others) else 1.0
    return {
        "methods": list(squares),
        "afters": find_afters(rows),
        "tasks": names,
        "top": min(1.0, max(0.1, math.ceil(10 * largest) / 10)),
        "cells": squares,
    }
