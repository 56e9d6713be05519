"""The tables of a run of continual learning: what they must hold, which runs they are of, and how tasks are named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.errors import UserError

SETTINGS = {"til": "TIL", "cil": "CIL"}
"""The settings and their names: with the task known, and among the classes of all tasks so far."""

COLUMNS = {
    "matrix": ("stream", "method", "seed", "order", "after_task", "task_index", "task", "scenario", "score"),
    "metrics": ("method", "seed", "order", "scenario", "metric", "value"),
    "summary": ("method", "scenario", "metric", "n", "mean", "ci_low", "ci_high"),
    "differences": ("method", "against", "scenario", "metric", "n", "difference", "ci_low", "ci_high", "overlaps"),
    "cost": (
        *("method", "seed", "task_index", "seconds", "flops", "peak_memory_mib", "memory_bytes"),
        *("memory_examples", "examples_per_second"),
    ),
    "diagnostics": ("method", "seed", "after_task", "task_index", "task", "statistic", "layer", "value"),
    "interference": ("method", "seed", "after_task", "task_index_a", "task_index_b", "dot", "cosine"),
    "gate": ("method", "seed", "after_task", "task_index", "statistic", "adapter", "value"),
    "pseudo": ("method", "seed", "task_index", "statistic", "value"),
}
"""The columns that the report reads of each table."""

NEEDED = ("matrix", "metrics", "summary")
"""The tables without which there is no report; the others may be empty or missing."""

RUN = ["method", "seed", "order"]

Tables = Mapping[str, pd.DataFrame]


def check_tables(tables: Tables) -> None:
    """Nothing, or a UserError: a table is missing, empty, lacks a column, or tells a score twice."""
    for name, wanted in COLUMNS.items():
        found = tables.get(name)
        if found is None or found.empty:
            if name in NEEDED:
                there = "there is no such table" if found is None else "the table is empty"
                raise UserError(f"{name}: expected at least one row, {there}")
            continue
        missing = [one for one in wanted if one not in found]
        if missing:
            raise UserError(f"{name}: expected the columns {', '.join(wanted)}; missing: {', '.join(missing)}")
    if len(table(tables, "differences")):
        learn_metrics.tested(tables["differences"])
    _check_matrix(tables["matrix"])


def _check_matrix(matrix: pd.DataFrame) -> None:
    streams = [str(name) for name in matrix["stream"].unique()]
    if len(streams) > 1:
        raise UserError(f"matrix: expected the runs of one stream, got {', '.join(streams)}")
    unknown = sorted({str(one) for one in matrix["scenario"].unique()} - set(SETTINGS))
    if unknown:
        raise UserError(f"scenario: expected {' or '.join(SETTINGS)}, got {', '.join(unknown)}")
    keys = [*RUN, "after_task", "task_index", "scenario"]
    twice = matrix[matrix.duplicated(keys)]
    if len(twice):
        told = ", ".join(f"{key} {twice.iloc[0][key]}" for key in keys)
        raise UserError(f"matrix: expected one row for each score, several are of {told}")


def table(tables: Tables, name: str) -> pd.DataFrame:
    """The table of that name, with its columns and no row where it is missing or empty."""
    found = tables.get(name)
    return pd.DataFrame(columns=list(COLUMNS[name])) if found is None or found.empty else found


def methods(matrix: pd.DataFrame) -> list[str]:
    """The methods in the order in which they come."""
    return [str(name) for name in matrix["method"].unique()]


def settings(matrix: pd.DataFrame) -> list[str]:
    """The settings that have scores of learnt tasks, TIL first."""
    there = set(learnt(matrix)["scenario"])
    return [one for one in SETTINGS if one in there]


def count_tasks(matrix: pd.DataFrame) -> int:
    """The number of tasks of the stream, as far as there are scores of them."""
    return int(matrix["task_index"].max())


def learnt(matrix: pd.DataFrame, setting: str | None = None) -> pd.DataFrame:
    """The rows of tasks that have been learnt, of one setting or of all."""
    rows = matrix[matrix["task_index"] <= matrix["after_task"]]
    return rows if setting is None else rows[rows["scenario"] == setting]


def agree(matrix: pd.DataFrame) -> bool:
    """Whether each place has the same task in all runs."""
    return bool((matrix.groupby("task_index")["task"].nunique() == 1).all())


def task_names(matrix: pd.DataFrame) -> list[str]:
    """A name for each place: the task's where the orders of all runs agree, else "Task 1", "Task 2" and so on."""
    places = range(1, count_tasks(matrix) + 1)
    if not agree(matrix):
        return [f"Task {place}" for place in places]
    by = matrix.drop_duplicates("task_index").set_index("task_index")["task"].to_dict()
    return [str(by.get(place, f"Task {place}")) for place in places]


def run_names(matrix: pd.DataFrame) -> dict[tuple[int, str], str]:
    """The runs of any method by seed and order, as in "seed 508, order 2-0-1"; the order where a seed has several."""
    pairs = matrix[["seed", "order"]].drop_duplicates()
    found = [(int(seed), str(order)) for seed, order in zip(pairs["seed"], pairs["order"], strict=True)]
    several = len({order for _, order in found}) > 1
    return {(seed, order): f"seed {seed}" + (f", order {order}" if several else "") for seed, order in found}


def unfinished(matrix: pd.DataFrame) -> list[tuple[str, int, int]]:
    """The runs without a score after the last task: method, seed, and how many tasks they have learnt."""
    last, whole = learnt(matrix).groupby(RUN, sort=False)["after_task"].max(), count_tasks(matrix)
    return [(str(run[0]), int(run[1]), int(after)) for run, after in last.items() if after < whole]


def forgotten(matrix: pd.DataFrame, setting: str) -> pd.DataFrame:
    """How much each old task of a finished run lost: its score when it was learnt minus that after the last task.

    Columns: method, seed, order, position, task, forgetting (points).
    """
    rows, whole = learnt(matrix, setting), count_tasks(matrix)
    first = rows[(rows["after_task"] == rows["task_index"]) & (rows["task_index"] < whole)]
    last = rows[rows["after_task"] == whole][[*RUN, "task_index", "score"]].rename(columns={"score": "at_end"})
    both = first.merge(last, on=[*RUN, "task_index"])
    return both.assign(forgetting=both["score"] - both["at_end"])[[*RUN, "task_index", "task", "forgetting"]]


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation; NaN for fewer than three pairs, or where one side does not vary."""
    frame = pd.DataFrame({"x": list(x), "y": list(y)}, dtype="float64")
    if len(frame) < 3 or frame.nunique().min() < 2:
        return math.nan
    return float(frame["x"].corr(frame["y"]))


def styles(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """For each method an ink and a stroke of its own, as many as there are."""
    return [(name, i % INKS, i // INKS) for i, name in enumerate(names[: INKS * STROKES])]


INKS, STROKES = 6, 3


def rounded(value: Any) -> float | None:
    """The number to five digits, None where it is not finite."""
    return float(f"{float(value):.5g}") if pd.notna(value) and math.isfinite(float(value)) else None
