"""What a run of an analysis of SAPT came to, as numbers with a measure's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from regard.continual.metrics import accuracy_matrix, average_performance, forgetting_from_best, learning_accuracy
from regard.continual.pseudo.quality import measure_privacies, measure_task_quality
from regard.continual.run_state import RunState

Number = dict[str, Any]
WRITTEN = {"told apart": "two_sample_accuracy", "near duplicates": "near_duplicates", "copied 8-grams": "copied_8grams"}
"""Measures of texts that stand for tasks, by their names here."""


def number(measure: str, value: float | None, x: float | None = None) -> list[Number]:
    """A number, as a list; none where it is not known."""
    return [] if value is None else [{"measure": measure, "x": x, "value": float(value)}]


def numbers(ran: RunState) -> list[Number]:
    """What a run came to: scores and forgetting in both settings, its gate, and seconds of training."""
    found: list[Number] = []
    names = {
        "average_performance": average_performance,
        "forgetting_rate": forgetting_from_best,
        "learning_accuracy": learning_accuracy,
    }
    for setting in ("cil", "til"):
        for name, measure in names.items():
            found += number(f"{name} {setting}", _measured(ran, setting, measure))
    return found + gate_numbers(ran) + number("seconds", sum(row["seconds"] for row in ran.rows["cost"]))


def _measured(ran: RunState, setting: Any, measure: Callable[[Any], float | None]) -> float | None:
    order = "-".join(map(str, range(len(ran.learner.stream))))
    rows = pd.DataFrame([row for row in ran.rows["matrix"] if row["scenario"] == setting])
    if rows.empty:
        return None
    return measure(accuracy_matrix(rows.assign(stream="x", method="x", seed=0, order=order), setting))


def gate_numbers(ran: RunState) -> list[Number]:
    """Means over tasks of what a run's gate did, when each was learnt and at the end; `least`: the least of a task."""
    found: list[Number] = []
    gate = pd.DataFrame(ran.rows["gate"])
    if gate.empty:
        return found
    last = gate["after_task"].max()
    for statistic in ("own_adapter_weight", "entropy"):
        asked = gate[gate["statistic"] == statistic]
        for when, rows in (
            ("learning", asked[asked["after_task"] == asked["task_index"]]),
            ("end", asked[asked["after_task"] == last]),
        ):
            found += number(f"{statistic} {when}", rows["value"].mean())
            if statistic == "own_adapter_weight":
                found += number(f"least {statistic} {when}", rows["value"].min())
    for statistic in ("routed_score", "own_adapter_score", "last_adapter_score"):
        scored = gate[gate["statistic"] == statistic]["value"]
        found += number(statistic, scored.mean() if len(scored) else None)
    return found


def by_count(ran: RunState) -> list[Number]:
    """How a run went by the number of tasks that were learnt: seconds a step, AP, own weight and entropy."""
    found: list[Number] = []
    for row in ran.rows["cost"]:
        found += number("seconds a step", row["seconds"] / row["steps"], row["task_index"])
        found += number("seconds in hooks", row["hook_seconds"], row["task_index"])
    parts = [("average_performance by tasks", _cells(ran, "cil"))]
    gate = pd.DataFrame(ran.rows["gate"], columns=["after_task", "statistic", "value"])
    parts += [
        (f"{name} by tasks", gate[gate["statistic"] == name]) for name in ("own_adapter_weight", "entropy") if len(gate)
    ]
    for name, rows in parts:
        for after, value in rows.groupby("after_task")["value"].mean().items():
            found += number(name, value, float(after))
    return found


def _cells(ran: RunState, setting: str) -> pd.DataFrame:
    """The scores after each task, of those that were learnt."""
    kept = [row for row in ran.rows["matrix"] if row["scenario"] == setting and row["after_task"] >= row["task_index"]]
    return pd.DataFrame([{"after_task": row["after_task"], "value": row["score"]} for row in kept])


def standing(ran: RunState) -> list[Number]:
    """The numbers of a run, and how good what stands for its tasks is and what it gives away: means over tasks.

    `membership`: of `Private`, 0.5 where nothing is given away; `WRITTEN` and `kept`: of texts that were written.
    """
    learner, method, found = ran.learner, ran.method, numbers(ran)
    kind, tasks = method.config.reflection, range(len(ran.learner.stream) - 1)
    if kind != "none":
        found += _mean("membership", [measure_privacies(learner, method, task)[kind].membership for task in tasks])
    told = [measure_task_quality(learner, method, task) for task in tasks if method.pseudo_inputs(task) is not None]
    if told:
        for name, of in WRITTEN.items():
            found += _mean(name, [value for one in told if (value := one[of]) is not None])
        found += _mean("kept", [one["kept"] or 0 for one in told])
    return found


def _mean(measure: str, values: Sequence[float]) -> list[Number]:
    return number(measure, sum(values) / len(values) if values else None)
