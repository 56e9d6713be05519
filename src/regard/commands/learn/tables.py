"""Tables of a continual-learning run: runs, scenarios, task names."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from regard.report import panels

SCENARIOS = {"til": "TIL", "cil": "CIL"}
"""Names of the scenarios: task-incremental (task known) and class-incremental learning."""

RUN_KEYS = ["method", "seed", "order"]

Tables = Mapping[str, pd.DataFrame]
Cells = list[list[float | None]]


def drop_unknown(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return all tables, those of measured statistics without the rows that have no value."""
    measured = {name: tables[name].dropna(subset=["value"]) for name in ("diagnostics", "gate", "pseudo")}
    return {**tables, **{name: table.astype({"value": "float64"}) for name, table in measured.items()}}


def method_names(matrix: pd.DataFrame) -> list[str]:
    """Return the methods in order of appearance."""
    return [str(name) for name in matrix["method"].unique()]


def find_scenarios(matrix: pd.DataFrame) -> list[str]:
    """Return the scenarios with scores of trained tasks, TIL first."""
    available = set(select_trained(matrix)["scenario"])
    return [scenario for scenario in SCENARIOS if scenario in available]


def count_tasks(matrix: pd.DataFrame) -> int:
    """Return the number of tasks with scores."""
    return int(matrix["task_index"].max())


def select_trained(matrix: pd.DataFrame, scenario: str | None = None) -> pd.DataFrame:
    """Return the rows of tasks already trained, of one scenario or all."""
    rows = matrix[matrix["task_index"] <= matrix["after_task"]]
    return rows if scenario is None else rows[rows["scenario"] == scenario]


def has_one_order(matrix: pd.DataFrame) -> bool:
    """Return whether all runs have the same task at each position."""
    return bool((matrix.groupby("task_index")["task"].nunique() == 1).all())


def task_names(matrix: pd.DataFrame) -> list[str]:
    """Return a name for each position: the task's, or "Task 1", … if orders differ between runs."""
    positions = range(1, count_tasks(matrix) + 1)
    if not has_one_order(matrix):
        return [f"Task {position}" for position in positions]
    names = matrix.drop_duplicates("task_index").set_index("task_index")["task"].to_dict()
    return [str(names.get(position, f"Task {position}")) for position in positions]


def run_names(matrix: pd.DataFrame) -> dict[tuple[int, str], str]:
    """Name runs by seed and order, as in "seed 508, order 2-0-1"; the order only if there are several."""
    has_orders = matrix["order"].nunique() > 1
    runs = dict.fromkeys(zip(matrix["seed"], matrix["order"], strict=True))
    return {(seed, order): f"seed {seed}" + (f", order {order}" if has_orders else "") for seed, order in runs}


def find_unfinished_runs(matrix: pd.DataFrame) -> list[tuple[str, int, int]]:
    """Find runs without a score after the last task: method, seed, tasks trained."""
    last, num_tasks = select_trained(matrix).groupby(RUN_KEYS, sort=False)["after_task"].max(), count_tasks(matrix)
    return [(str(run[0]), int(run[1]), int(after)) for run, after in last.items() if after < num_tasks]


def compute_forgetting(matrix: pd.DataFrame) -> pd.DataFrame:
    """Return how many points (`forgetting`) each old task of a finished run lost since it was trained; TIL if known."""
    rows, num_tasks = select_trained(matrix, *find_scenarios(matrix)[:1]), count_tasks(matrix)
    initial = rows[(rows["after_task"] == rows["task_index"]) & (rows["task_index"] < num_tasks)]
    final = rows[rows["after_task"] == num_tasks][[*RUN_KEYS, "task_index", "score"]]
    scores = initial.merge(final, on=[*RUN_KEYS, "task_index"], suffixes=("", "_at_end"))
    scores["forgetting"] = scores["score"] - scores["score_at_end"]
    return scores[[*RUN_KEYS, "task_index", "task", "forgetting"]]


def compute_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Pearson's correlation; NaN for fewer than three pairs or a constant side."""
    frame = pd.DataFrame({"x": x, "y": y}, dtype="float64")
    return float(frame["x"].corr(frame["y"])) if len(frame) > 2 and frame.nunique().min() > 1 else math.nan


def average_statistic(rows: pd.DataFrame, statistic: str, *keys: str) -> dict[Any, float]:
    """Average a statistic over runs, by the values of the columns `keys`."""
    return rows[rows["statistic"] == statistic].groupby([*keys])["value"].mean().to_dict()


def make_cells(means: Mapping[Any, float], rows: Iterable[int], columns: Iterable[int]) -> Cells:
    """Return means by row and column as nested lists, None where there are none."""
    return [[round_value(means.get((row, column))) for column in columns] for row in rows]


def assign_styles(matrix: pd.DataFrame) -> list[tuple[str, int, int]]:
    """Assign an ink and a stroke to each method, as far as they suffice."""
    return panels.assign_styles(method_names(matrix))


def round_value(value: Any) -> float | None:
    """Round to five digits; None if not finite."""
    return panels.round_value(float(value)) if pd.notna(value) and math.isfinite(float(value)) else None
