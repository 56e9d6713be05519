"""What a run of continual learning comes to: the accuracy matrix, and the measures that are taken from it.

a_ij is the score, in per cent, on the j-th task after the i-th was learnt, T the number of tasks. In the formulas both
count from 1; a_0j is the score before any training. What a run does not define is None, never 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from regard.errors import UserError
from regard.report.arrays import check_table
from regard.runs.intervals import Floats

Scenario = Literal["til", "cil"]
COLUMNS = ("stream", "method", "seed", "order", "after_task", "task", "task_index", "scenario", "score", "n")
"""The columns of matrix.parquet."""
PAIRED = ("lost", "gained")
"""Further ones: test rows right just after the task was learnt and wrong now, and the reverse; null if unknown."""
RUN = ("stream", "method", "seed", "order")
"""What tells one run from another."""
SEPARATE, JOINT = "separate", "joint"
"""The methods that the others are held against: a model for each task, and one for all tasks at once."""
TITLES = {
    "average_performance": "Average performance",
    "forgetting_rate": "Forgetting from the best",
    "forgetting": "Forgetting",
    "bwt": "Backward transfer",
    "fwt": "Forward transfer",
    "learning_accuracy": "Learning accuracy",
    "intransigence": "Intransigence",
    "zero_shot_transfer": "Zero-shot transfer",
    "area": "Area under the curve",
}
"""The measures in the order in which they are told, with their names in words."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix:
    """The scores of one run in one scenario: of T tasks learnt so far, of `planned` in all, with `rows` test rows.

    `scores` (T + 1, T), in per cent: row i after i tasks, column j the task at position j + 1, NaN if not scored.
    """

    tasks: tuple[str, ...]
    scores: Floats
    rows: npt.NDArray[np.int64]
    planned: int

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def finished(self) -> bool:
        return len(self) == self.planned

    @property
    def learned(self) -> Floats:
        """a_jj: the score of each task just after it was learnt."""
        return np.diagonal(self.scores, offset=-1)

    @property
    def final(self) -> Floats:
        """a_Tj: the score of each task at the end."""
        return self.scores[-1] if len(self) else np.zeros(0)

    @property
    def before_learning(self) -> Floats:
        """a_(j−1)j: the score of each task just before it was learnt."""
        return np.diagonal(self.scores)


def compute_metrics(
    matrix: Matrix,
    *,
    separate: Mapping[str, float] | None = None,
    joint: Mapping[str, float] | None = None,
    initial: Mapping[str, float] | None = None,
) -> dict[str, float | None]:
    """Return the measures over the tasks learnt so far by name, in points of per cent; None those not defined.

    The others are scores by name of task: `separate` of models trained on each alone, `joint` of one trained on all,
    `initial` of an untrained one, or by chance (100 / number of classes).
    """
    best = np.array([matrix.scores[j + 1 : len(matrix), j].max() for j in range(len(matrix) - 1)])
    averages = [matrix.scores[i, :i].mean() for i in range(1, len(matrix) + 1)]
    values = {
        # AP, also called ACC: 1/T Σ_j a_Tj (SAPT, arXiv 2401.08295; pre-scaling, arXiv 2410.05648)
        "average_performance": matrix.final,
        # F.Ra: 1/(T−1) Σ_{j<T} (max_{j≤i<T} a_ij − a_Tj) (Chaudhry et al. 2018, arXiv 1801.10112; SAPT)
        "forgetting_rate": best - matrix.final[:-1],
        # FGT: 1/(T−1) Σ_{j<T} (a_jj − a_Tj) = −BWT (pre-scaling)
        "forgetting": (matrix.learned - matrix.final)[:-1],
        # 1/(T−1) Σ_{j<T} (a_Tj − a_jj) (Lopez-Paz and Ranzato 2017, arXiv 1706.08840); SAPT's script divides by T
        "bwt": (matrix.final - matrix.learned)[:-1],
        # 1/T Σ_j (a_jj − ã_j), ã_j the score of a model trained on j alone (SAPT, whose script takes a constant)
        "fwt": matrix.learned - _scores_in_order(matrix, separate),
        # 1/T Σ_j a_jj: how well each task is learnt when it comes (Riemer et al. 2019, arXiv 1810.11910)
        "learning_accuracy": matrix.learned,
        # 1/T Σ_j (a*_j − a_jj), a*_j the score of the model trained on all tasks, not on the first j as in Chaudhry
        # et al. 2018. Against models trained on each task alone it would be −FWT.
        "intransigence": _scores_in_order(matrix, joint) - matrix.learned,
        # 1/(T−1) Σ_{j>1} (a_(j−1)j − b_j), b_j the initial score (Lopez-Paz and Ranzato 2017, who call it FWT)
        "zero_shot_transfer": (matrix.before_learning - _scores_in_order(matrix, initial))[1:],
        # 1/T Σ_i (1/i Σ_{j≤i} a_ij): the average incremental accuracy (Rebuffi et al. 2017, arXiv 1611.07725)
        "area": np.array(averages),
    }
    is_known = {name: len(points) > 0 and not np.isnan(points).any() for name, points in values.items()}
    return {name: float(points.mean()) if is_known[name] else None for name, points in values.items()}


def accuracy_matrix(frame: pd.DataFrame, scenario: Scenario) -> Matrix:
    """Return the matrix of one run in a scenario, from rows of `COLUMNS`; scores of `separate` stand from then on."""
    check_scores(frame)
    if (runs := len(frame[[*RUN]].drop_duplicates())) > 1:
        raise UserError(f"matrix: expected the rows of one run, got those of {runs}")
    return _make_matrix(frame, scenario)


def metrics_table(scores: pd.DataFrame, *, initial: Mapping[str, float] | None = None) -> pd.DataFrame:
    """Return the measures of every run: `stream, method, seed, order, scenario, metric, value`, null if not defined.

    A run is compared with the rows of `separate` and `joint` of its stream, seed and scenario, and order if there are
    such, else the mean over the orders. An unfinished run has no measures yet.
    """
    check_scores(scores)
    rows: list[tuple[Any, ...]] = []
    for key, run in split_runs(scores):
        stream, _, seed, order = key
        for scenario in run["scenario"].unique():
            matrix = _make_matrix(run, scenario)
            values: dict[str, float | None] = dict.fromkeys(TITLES)
            if matrix.finished:
                like = scores[(scores["stream"] == stream) & (scores["seed"] == seed)]
                like = like[like["scenario"] == scenario]
                separate, joint = (_last_scores(like[like["method"] == name], order) for name in (SEPARATE, JOINT))
                values = compute_metrics(matrix, separate=separate, joint=joint, initial=initial)
            rows += [(*key, scenario, name, value) for name, value in values.items()]
    return pd.DataFrame(rows, columns=[*RUN, "scenario", "metric", "value"]).astype({"value": "float64"})


def split_runs(scores: pd.DataFrame) -> Iterator[tuple[tuple[str, str, int, str], pd.DataFrame]]:
    """Return each run's stream, method, seed and order, and its rows, in the order in which they come."""
    yield from scores.groupby([*RUN], sort=False)


def check_unique(expected: str, table: pd.DataFrame, key: Sequence[str]) -> None:
    """Raise UserError if several rows of a table share a key."""
    repeated = table[table.duplicated([*key])]
    if len(repeated):
        values = ", ".join(f"{name} {repeated.iloc[0][name]}" for name in key)
        raise UserError(f"{expected}, several are of {values}")


def check_scores(scores: pd.DataFrame) -> None:
    """Raise UserError if these are no rows of matrix.parquet."""
    check_table("matrix", scores, COLUMNS)
    for name in COLUMNS:
        if scores[name].isna().any():
            raise UserError(f"matrix: expected {name} in every row, got none in {int(scores[name].isna().sum())}")
    for name, low, high in (("score", 0, 100), ("n", 1, np.inf), ("after_task", 0, np.inf), ("task_index", 1, np.inf)):
        outside = scores.loc[~scores[name].between(low, high), name]
        if len(outside):
            limit = f"of at least {low}" if high == np.inf else f"from {low} to {high}"
            raise UserError(f"matrix: expected {name} {limit}, got {outside.iloc[0]}")
    check_unique("matrix: expected each score once", scores, (*RUN, "scenario", "after_task", "task_index"))


def _make_matrix(run: pd.DataFrame, scenario: str) -> Matrix:
    rows = run[run["scenario"] == scenario]
    if rows.empty:
        scored = ", ".join(run["scenario"].unique())
        raise UserError(f"scenario: expected one that was scored ({scored}), got {scenario}")
    order, tasks_trained = str(rows["order"].iloc[0]), int(rows["after_task"].max())
    if not re.fullmatch(r"\d+(-\d+)*", order):
        raise UserError(f'order: expected numbers of tasks as in "2-0-1", got {order!r}')
    planned, last = order.count("-") + 1, max(tasks_trained, int(rows["task_index"].max()))
    if last > planned:
        raise UserError(f"matrix: expected {planned} tasks as in the order {order}, got a task {last}")
    rows = rows[rows["task_index"] <= tasks_trained]
    tasks = rows[["task_index", "task", "n"]].drop_duplicates().sort_values("task_index")
    if tasks["task_index"].tolist() != list(range(1, tasks_trained + 1)) or tasks["task"].duplicated().any():
        problem = ", ".join(f"{row.task_index} {row.task} (n {row.n})" for row in tasks.itertuples())
        expected = f"one task, with one n, at each task_index from 1 to {tasks_trained}"
        raise UserError(f"matrix: expected {expected}, got {problem}")
    scores = np.full((tasks_trained + 1, tasks_trained), np.nan)
    scores[rows["after_task"], rows["task_index"] - 1] = rows["score"]
    if run["method"].iloc[0] == SEPARATE:  # a task's score stands after every later task, where there is none
        i, j = np.indices(scores.shape)
        learned = np.broadcast_to(np.diagonal(scores, offset=-1), scores.shape)
        scores = np.where((i > j) & np.isnan(scores), learned, scores)
    names = tuple(map(str, tasks["task"]))
    return Matrix(tasks=names, scores=scores, rows=tasks["n"].to_numpy(dtype=np.int64), planned=planned)


def _last_scores(rows: pd.DataFrame, order: str) -> dict[str, float]:
    """Return the last score of each learnt task: of the rows of the order if there are such, else the mean over all."""
    same = rows[rows["order"] == order]
    rows = rows if same.empty else same
    tasks_trained = rows[rows["after_task"] >= rows["task_index"]].sort_values("after_task")
    last = tasks_trained.drop_duplicates(["order", "task"], keep="last")
    return {str(task): float(score) for task, score in last.groupby("task")["score"].mean().items()}


def _scores_in_order(matrix: Matrix, scores: Mapping[str, float] | None) -> Floats:
    return np.array([(scores or {}).get(task, np.nan) for task in matrix.tasks])
