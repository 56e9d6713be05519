"""Accuracy matrices and gradient interference as the page's script reads them: nested lists, by method and run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.learn import tables as learn_tables

NUMBERS = 150_000
"""The most numbers of matrices that one page holds; beyond it single runs are left away."""

MEAN = "mean over runs"

Cells = list[list[float | None]]


def matrices(matrix: pd.DataFrame) -> dict[str, Any]:
    """The scores after each number of tasks learnt (rows) of each task (columns), by setting, method and run.

    Keys: `settings`, `methods`, `runs` (the mean over runs first where there are several), `afters` and `low` (the
    scale's lower end) by setting, `tasks` by run, `cells` by setting, method and run.
    """
    names, whole = learn_tables.run_names(matrix), learn_tables.count_tasks(matrix)
    kept = list(names.values()) if _fits(matrix, whole) else []
    runs = [MEAN, *kept] if len(names) > 1 else list(names.values())
    settings = learn_tables.settings(matrix)
    return {
        "settings": {one: learn_tables.SETTINGS[one] for one in settings},
        "methods": learn_tables.methods(matrix),
        "runs": runs,
        "afters": {one: _afters(matrix[matrix["scenario"] == one]) for one in settings},
        "low": {one: _low(matrix[matrix["scenario"] == one]) for one in settings},
        "tasks": _tasks(matrix, names, runs),
        "cells": {one: _by_method(matrix[matrix["scenario"] == one], names, runs, whole) for one in settings},
    }


def _fits(matrix: pd.DataFrame, whole: int) -> bool:
    groups = matrix[[*learn_tables.RUN, "scenario"]].drop_duplicates()
    return len(groups) * whole * (whole + 1) <= NUMBERS


def left_out(matrix: pd.DataFrame) -> bool:
    """Whether the page has room for the means only."""
    return not _fits(matrix, learn_tables.count_tasks(matrix)) and len(learn_tables.run_names(matrix)) > 1


def _afters(rows: pd.DataFrame) -> list[int]:
    return sorted(int(after) for after in rows["after_task"].unique())


def _low(rows: pd.DataFrame) -> float:
    """The ten below the smallest score, so that all methods share a scale up to 100."""
    least = float(rows["score"].min())
    return max(0.0, 10.0 * math.floor(least / 10)) if least < 100 else 0.0


def _tasks(matrix: pd.DataFrame, names: Mapping[tuple[int, str], str], runs: list[str]) -> dict[str, list[str]]:
    """The columns' names by run: of the mean, places instead of tasks where orders differ."""
    found = {MEAN: learn_tables.task_names(matrix)}
    for (seed, order), name in names.items():
        rows = matrix[(matrix["seed"] == seed) & (matrix["order"] == order)]
        found[name] = [*learn_tables.task_names(rows), *found[MEAN][learn_tables.count_tasks(rows) :]]
    return {run: found[run] for run in runs}


def _by_method(
    rows: pd.DataFrame, names: Mapping[tuple[int, str], str], runs: list[str], whole: int
) -> dict[str, dict[str, Cells]]:
    afters, found = _afters(rows), {}
    for method, ours in rows.groupby("method", sort=False):
        each = {MEAN: cells(ours, afters, whole)} if MEAN in runs else {}
        for (seed, order), of_run in ours.groupby(["seed", "order"], sort=False):
            name = names[int(seed), str(order)]
            each |= {name: cells(of_run, afters, whole)} if name in runs else {}
        found[str(method)] = each
    return found


def cells(rows: pd.DataFrame, afters: list[int], whole: int) -> Cells:
    """The mean score by number of tasks learnt and place; None where there is none."""
    by = rows.groupby(["after_task", "task_index"])["score"].mean().to_dict()
    return [[learn_tables.rounded(by.get((after, place))) for place in range(1, whole + 1)] for after in afters]


def interference(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """The mean cosine and dot product of two tasks' gradients over runs, by method and number of tasks learnt.

    Keys: `methods`, `afters`, `tasks`, `top` (the largest size of a cosine), `cells` by method and number: for each
    pair of places its cosine and its dot product. Empty where nothing was measured.
    """
    rows = table.dropna(subset=["cosine"])
    if rows.empty:
        return {}
    names = learn_tables.task_names(matrix)
    turned = rows.rename(columns={"task_index_a": "task_index_b", "task_index_b": "task_index_a"})
    keys = ["method", "after_task", "task_index_a", "task_index_b"]
    every = pd.concat([rows, turned]).groupby(keys, sort=False)[["cosine", "dot"]].mean().astype("float64")
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for (method, after), of_pair in every.groupby(level=[0, 1], sort=False):
        by = {(int(a), int(b)): (row["cosine"], row["dot"]) for (_, _, a, b), row in of_pair.iterrows()}
        square = [[_pair(by.get((a + 1, b + 1))) for b in range(len(names))] for a in range(len(names))]
        found.setdefault(str(method), {})[str(int(after))] = square
    other = every[every.index.get_level_values("task_index_a") != every.index.get_level_values("task_index_b")]
    size = float(other["cosine"].abs().max()) if len(other) else 1.0
    return {
        "methods": list(found),
        "afters": sorted({int(after) for of_method in found.values() for after in of_method}),
        "tasks": names,
        "top": min(1.0, max(0.1, math.ceil(10 * size) / 10)),
        "cells": found,
    }


def _pair(values: tuple[float, float] | None) -> list[float | None] | None:
    return None if values is None else [learn_tables.rounded(value) for value in values]
