"""Which test rows were right just after their task was learnt, and how many of them have changed since."""

from collections.abc import Sequence

import numpy as np

from regard.continual.learner import Row


def compare_with_learnt(
    learnt: list[Row], task: int, scenario: str, tasks_trained: int, right: Sequence[bool] | None
) -> Row:
    """Return how many test rows were right just after the task was learnt and are wrong now (`lost`), and the reverse.

    Both are None before that, for grades between right and wrong, and where what was right is not known any more.

    Args:
        learnt: What was right of each task and scenario just after it was learnt; a task learnt just now is added.
        task: Its place in the stream, from 0.
        scenario: That of the score.
        tasks_trained: Number of tasks that are learnt.
        right: Whether each row is right; None for grades.
    """
    if right is None or tasks_trained <= task:
        return {"lost": None, "gained": None}
    now = np.asarray(right, dtype=bool)
    if tasks_trained == task + 1:
        packed = np.packbits(now).tobytes().hex()
        learnt.append({"task_index": task + 1, "scenario": scenario, "right": packed})
        return {"lost": 0.0, "gained": 0.0}
    records = [row["right"] for row in learnt if (row["task_index"], row["scenario"]) == (task + 1, scenario)]
    if not records:
        return {"lost": None, "gained": None}
    before = np.unpackbits(np.frombuffer(bytes.fromhex(records[-1]), dtype=np.uint8), count=len(now)).astype(bool)
    return {"lost": float((before & ~now).sum()), "gained": float((now & ~before).sum())}
