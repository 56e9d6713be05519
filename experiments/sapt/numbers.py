"""Numbers of a run in an analysis of SAPT, each with the name of its measure."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from regard.continual.metrics import accuracy_matrix, compute_metrics
from regard.continual.pseudo.quality import measure_privacies, measure_task_quality
from regard.continual.run_state import RunState

Number = dict[str, Any]
WRITTEN = {"told apart": "two_sample_accuracy", "near duplicates": "near_duplicates", "copied 8-grams": "copied_8grams"}
"""Measures of generated texts, by the names of `measure_task_quality`."""


def make_number(measure: str, value: float | None, x: float | None = None) -> list[Number]:
    """Return a list with one number; empty for None."""
    return [] if value is None else [{"measure": measure, "x": x, "value": float(value)}]


def collect_numbers(run: RunState) -> list[Number]:
    """Return scores and forgetting in both scenarios, numbers of the gate, and seconds of training."""
    numbers: list[Number] = []
    for setting in ("cil", "til"):
        metrics = _metrics(run, setting)
        for name in ("average_performance", "forgetting_rate", "learning_accuracy"):
            numbers += make_number(f"{name} {setting}", metrics.get(name))
    return numbers + collect_gate_numbers(run) + make_number("seconds", sum(row["seconds"] for row in run.rows["cost"]))


def _metrics(run: RunState, setting: Any) -> dict[str, float | None]:
    order = "-".join(map(str, range(len(run.learner.stream))))
    rows = pd.DataFrame([row for row in run.rows["matrix"] if row["scenario"] == setting])
    if rows.empty:
        return {}
    return compute_metrics(accuracy_matrix(rows.assign(stream="x", method="x", seed=0, order=order), setting))


def collect_gate_numbers(run: RunState) -> list[Number]:
    """Return means over tasks of the gate's statistics, when learnt and at the end; `least`: the lowest of a task."""
    numbers: list[Number] = []
    gate = pd.DataFrame(run.rows["gate"])
    if gate.empty:
        return numbers
    last = gate["after_task"].max()
    for statistic in ("own_adapter_weight", "entropy"):
        of_statistic = gate[gate["statistic"] == statistic]
        for when, rows in (
            ("learning", of_statistic[of_statistic["after_task"] == of_statistic["task_index"]]),
            ("end", of_statistic[of_statistic["after_task"] == last]),
        ):
            numbers += make_number(f"{statistic} {when}", rows["value"].mean())
            if statistic == "own_adapter_weight":
                numbers += make_number(f"least {statistic} {when}", rows["value"].min())
    for statistic in ("routed_score", "own_adapter_score", "last_adapter_score"):
        scored = gate[gate["statistic"] == statistic]["value"]
        numbers += make_number(statistic, scored.mean() if len(scored) else None)
    return numbers


def collect_by_task(run: RunState) -> list[Number]:
    """Return seconds a step, AP, own weight and entropy by the number of tasks learnt."""
    numbers: list[Number] = []
    for row in run.rows["cost"]:
        numbers += make_number("seconds a step", row["seconds"] / row["steps"], row["task_index"])
        numbers += make_number("seconds in hooks", row["hook_seconds"], row["task_index"])
    parts = [("average_performance by tasks", _task_scores(run, "cil"))]
    gate = pd.DataFrame(run.rows["gate"], columns=["after_task", "statistic", "value"])
    parts += [
        (f"{name} by tasks", gate[gate["statistic"] == name]) for name in ("own_adapter_weight", "entropy") if len(gate)
    ]
    for name, rows in parts:
        for after, value in rows.groupby("after_task")["value"].mean().items():
            numbers += make_number(name, value, float(after))
    return numbers


def _task_scores(run: RunState, setting: str) -> pd.DataFrame:
    """Return the scores of the tasks learnt so far, after each task."""
    cells = [row for row in run.rows["matrix"] if row["scenario"] == setting and row["after_task"] >= row["task_index"]]
    return pd.DataFrame([{"after_task": row["after_task"], "value": row["score"]} for row in cells])


def collect_reflection_numbers(run: RunState) -> list[Number]:
    """Return the numbers of a run, and privacy and quality of what stands for its tasks, means over tasks.

    `membership`: success of membership inference, 0.5 if nothing leaks. `WRITTEN` and `kept`: of generated texts.
    """
    learner, method, numbers = run.learner, run.method, collect_numbers(run)
    kind, tasks = method.config.reflection, range(len(run.learner.stream) - 1)
    if kind != "none":
        numbers += _mean("membership", [measure_privacies(learner, method, task)[kind].membership for task in tasks])
    quality = [measure_task_quality(learner, method, task) for task in tasks if method.pseudo_inputs(task) is not None]
    if quality:
        for name, key in WRITTEN.items():
            numbers += _mean(name, [value for sample in quality if (value := sample[key]) is not None])
        numbers += _mean("kept", [sample["kept"] or 0 for sample in quality])
    return numbers


def _mean(measure: str, values: Sequence[float]) -> list[Number]:
    return make_number(measure, sum(values) / len(values) if values else None)
