"""Rows of matrix.parquet from matrices that are written down as triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

Triangle = Sequence[Sequence[float]]

PEAK = ((80.0,), (84.0, 90.0), (70.0, 85.0, 60.0))
"""Three tasks; the first is best after the second was learnt, not when it was learnt itself."""
RISE = ((60.0,), (65.0, 75.0))
"""Two tasks; the second helps the first."""


def rows(
    triangle: Triangle,
    *,
    method: str = "finetune",
    seed: int = 0,
    order: str | None = None,
    unlearnt: Sequence[float] = (),
    stream: str = "letters",
    scenario: str = "til",
    n: int = 100,
) -> pd.DataFrame:
    """One run: `triangle[i]` has the scores after i + 1 tasks, `unlearnt[j]` that of a task just before it is learnt.

    The tasks are called a, b, c, … by their numbers as published, which the order tells.
    """
    order = order or "-".join(map(str, range(len(triangle))))
    names = ["abcdefgh"[int(number)] for number in order.split("-")]
    found = [(i + 1, j + 1, score) for i, scores in enumerate(triangle) for j, score in enumerate(scores)]
    found += [(j, j + 1, score) for j, score in enumerate(unlearnt)]
    return _frame(found, names, stream=stream, method=method, seed=seed, order=order, scenario=scenario, n=n)


def at_end(scores: Sequence[float], *, method: str = "joint", **key: Any) -> pd.DataFrame:
    """One run that was scored after its last task only."""
    every = rows([scores[: i + 1] for i in range(len(scores))], method=method, **key)
    return every[every["after_task"] == len(scores)]


def own(scores: Sequence[float], *, method: str = "separate", **key: Any) -> pd.DataFrame:
    """One run in which each task was scored just after it was learnt and no more."""
    every = rows([scores[: i + 1] for i in range(len(scores))], method=method, **key)
    return every[every["after_task"] == every["task_index"]]


def _frame(found: Sequence[tuple[int, int, float]], names: Sequence[str], **same: Any) -> pd.DataFrame:
    frame = pd.DataFrame(found, columns=["after_task", "task_index", "score"])
    return frame.assign(task=[names[position - 1] for position in frame["task_index"]], **same)
