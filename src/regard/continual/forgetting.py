"""Whether old tasks have been forgotten: what `regard check` decides by."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from regard.continual.metrics import PAIRED, SEPARATE, Matrix, Scenario, accuracy_matrix, check_scores, split_runs
from regard.errors import UserError
from regard.runs.intervals import check_confidence, fall_interval, paired_correlation, t_interval

Verdict = Literal["dropped", "cannot tell", "kept"]
MOST = 100.0
"""Points of the largest drop, and of the largest rise."""
_Changes = dict[str, tuple[float, float]]
"""Test rows that were lost and gained, by task."""


class _Fall(NamedTuple):
    """A task in one run: its score just after it was learnt, its last score, its test rows, and φ of these if known."""

    seed: int
    before: float
    after: float
    n: int
    correlation: float | None


@dataclass(frozen=True)
class ForgottenTask:
    """How far an old task has fallen from just after it was learnt to the last score: means over runs, in per cent.

    `n`: test rows, the smallest if runs differ. `verdict`: "dropped" if `ci_low` is more than the margin, "kept" if
    `ci_high` is not, else "cannot tell".
    """

    stream: str
    method: str
    scenario: str
    task: str
    before: float
    after: float
    drop: float
    ci_low: float
    ci_high: float
    n: int
    seeds: tuple[int, ...]
    verdict: Verdict


def check(
    scores: pd.DataFrame, margin: float = 1.0, confidence: float = 0.95, *, scenario: Scenario = "til"
) -> list[ForgottenTask]:
    """Return the old tasks that have dropped by more than `margin` points; their verdict says whether that is sure."""
    return [task for task in find_drops(scores, margin, confidence, scenario=scenario) if task.drop > margin]


def find_drops(
    scores: pd.DataFrame, margin: float = 1.0, confidence: float = 0.95, *, scenario: Scenario = "til"
) -> list[ForgottenTask]:
    """Return the drop of every old task of every stream and method, in the order of the rows of matrix.parquet.

    A task is old in the runs that have learned another after it. With two runs or more, the interval is Student's over
    their drops, which says nothing of other test rows where they share theirs. With one, or with equal drops, it is
    that of two proportions of the same test rows (`fall_interval`), paired row by row where `lost` and `gained` say how
    many changed. No interval is wider than the drops that scores can have: Student's knows nothing of their bounds.
    The models of `separate` cannot forget: their drops and intervals are 0.
    """
    check_scores(scores)
    check_confidence(confidence)
    if not (math.isfinite(margin) and margin >= 0):
        raise UserError(f"margin: expected a number of points of at least 0, got {margin}")
    tasks = []
    for (stream, method, task), falls in _collect_falls(scores, scenario).items():
        seeds, first_scores, last_scores, counts, correlations = zip(*falls, strict=True)
        before, after = float(np.mean(first_scores)), float(np.mean(last_scores))
        drop, n = before - after, min(counts)
        over_runs = t_interval([fall.before - fall.after for fall in falls], confidence)
        low, high = over_runs.ci_low, over_runs.ci_high
        if method == SEPARATE:
            low = high = drop
        elif over_runs.n < 2 or over_runs.std == 0:
            known = [value for value in correlations if value is not None]
            correlation = min(known) if len(known) == len(falls) else None
            bounds = fall_interval(before / 100, after / 100, n, confidence, correlation=correlation)
            low, high = (100 * bound for bound in bounds)
        low, high = max(low, -MOST), min(high, MOST)
        verdict: Verdict = "dropped" if low > margin else "kept" if high <= margin else "cannot tell"
        row = (stream, method, scenario, task, before, after, drop, low, high, n, seeds, verdict)
        tasks.append(ForgottenTask(*row))
    return tasks


def explain_nothing_to_check(scores: pd.DataFrame, *, scenario: Scenario = "til") -> str | None:
    """Return why no task can be checked, in one line; None if at least one can."""
    check_scores(scores)
    if _collect_falls(scores, scenario):
        return None
    tasks_trained = max((len(matrix) for _, _, matrix, _ in _collect_matrices(scores, scenario)), default=None)
    if tasks_trained is None:
        return f"nothing to check: no score is of the scenario {scenario}"
    if tasks_trained < 2:
        return f"nothing to check: no run has learnt a second task, the most is {tasks_trained}"
    return "nothing to check: no task was scored just after it was learnt"


def _collect_matrices(scores: pd.DataFrame, scenario: Scenario) -> list[tuple[tuple[str, str], int, Matrix, _Changes]]:
    """Return stream and method, seed, matrix, and changed test rows of every run that has scores in the scenario."""
    return [
        ((stream, method), int(seed), accuracy_matrix(run, scenario), _last_changes(run, scenario))
        for (stream, method, seed, _), run in split_runs(scores)
        if (run["scenario"] == scenario).any()
    ]


def _collect_falls(scores: pd.DataFrame, scenario: Scenario) -> dict[tuple[str, str, str], list[_Fall]]:
    """Return, by stream, method and task, the falls of the runs in which the task is old, and was scored twice."""
    falls_by_task: dict[tuple[str, str, str], list[_Fall]] = {}
    for (stream, method), seed, matrix, changes in _collect_matrices(scores, scenario):
        for j, task in enumerate(matrix.tasks[:-1]):
            before, after, n = float(matrix.learned[j]), float(matrix.final[j]), int(matrix.rows[j])
            if math.isfinite(before) and math.isfinite(after):
                fall = _Fall(seed, before, after, n, _correlation(before / 100, n, *changes.get(task, ())))
                falls_by_task.setdefault((stream, method, task), []).append(fall)
    return falls_by_task


def _correlation(before: float, n: int, lost: float = math.nan, gained: float = math.nan) -> float | None:
    """Return φ of the test rows; None where it is not known how many changed."""
    return None if math.isnan(lost) or math.isnan(gained) else paired_correlation(before, n, lost, gained)


def _last_changes(run: pd.DataFrame, scenario: Scenario) -> dict[str, tuple[float, float]]:
    """Return, by task, the test rows that were lost and gained after the last task."""
    if not {*PAIRED} <= {*run.columns}:
        return {}
    last = run[(run["scenario"] == scenario) & (run["after_task"] == run["after_task"].max())]
    return {str(task): (float(lost), float(gained)) for task, lost, gained in last[["task", *PAIRED]].itertuples(False)}
