"""Warnings about a run of a method: closed gates, tasks that were not learnt, training that did harm."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from regard.continual.gate import find_closed_gates
from regard.continual.learner import Row
from regard.continual.method import Method
from regard.continual.training_phase import MethodLearningRate
from regard.data.stream import ClassificationTask, Stream, TextTask

SHARED_WEIGHT = 0.5
"""Mean weight of the tasks' own adapters below which a run warns."""
FITTED_SCORE = 75.0
"""Per cent of its training rows that are right after a task, below which a run warns."""
_SUGGEST_OTHER_QUERY = (
    "the model's states tell its texts from others' too little; other layers with --set query_layers=N"
)


def write_gate_warnings(gate: Sequence[Row], method: Method) -> list[str]:
    """Warn about closed gates, right after a task and at the end."""
    warnings, named = [], set[str]()
    by_time: dict[int, list[Row]] = {}
    for row in gate:
        by_time.setdefault(int(row["after_task"]), []).append(row)
    for num_tasks, rows in by_time.items():
        for task, weight in find_closed_gates(rows, num_tasks, newest_only=True).items():
            message = f"gate: the adapter of {task} got {weight:.2g} of its rows' weight; it was not trained."
            warnings.append(f"{message} Open it: {_suggest_opening(method.config)}")
            named.add(task)
    for num_tasks, rows in list(by_time.items())[-1:]:
        for task, weight in find_closed_gates(rows, num_tasks, newest_only=False).items():
            if task not in named:
                message = f"gate: the adapter of {task} got {weight:.2g} of its rows' weight at the end; it is lost."
                warnings.append(f"{message} Preserve it: {_suggest_preserving(method.config)}")
        weights = [row["value"] for row in rows if row["statistic"] == "own_adapter_weight"]
        if weights and (mean := sum(weights) / len(weights)) < SHARED_WEIGHT:
            message = f"gate: tasks give their own adapters {mean:.2g} of their rows' weight on average at the end"
            warnings.append(f"{message}; either the gate is closed, or their texts are similar and share adapters")
    return warnings


def find_unlearnt(matrix: Sequence[Row], stream: Stream) -> list[str]:
    """Find the tasks whose first score once trained is no better than that of their most frequent test label, or 0."""
    scores: dict[str, float] = {}
    for row in matrix:
        if row["scenario"] == "til" and row["after_task"] >= row["task_index"]:
            scores.setdefault(row["task"], row["score"])
    return [
        task.name
        for task in stream.tasks
        if task.name in scores and scores[task.name] <= (majority_score(_test_labels(task)) if task.labels else 0.0)
    ]


def write_score_warnings(tasks: Sequence[str], rate: MethodLearningRate | None = None) -> list[str]:
    """Warn about tasks that were not learnt, as `find_unlearnt` finds them; `rate` is the method's own, if any."""
    if not tasks:
        return []
    hint = "more --num-epochs or --learning-rate"
    if rate is not None:
        hint = f"more epochs or another {rate.option.rstrip(' =')}"
    problem = "no better than the most frequent label, or 0, right after training"
    return [f"scores: {problem}: {', '.join(tasks)}. Try {hint}"]


def write_fit_warnings(training: Sequence[Row], not_learnt: Collection[str], *, adapts_few: bool) -> list[str]:
    """Warn about tasks with many training rows wrong just after them.

    `not_learnt`: tasks that another warning names; `adapts_few`: whether only some layers have adapters.
    """
    poor = [
        f"{row['task']} ({row['score']:.1f} %)"
        for row in training
        if row["score"] < FITTED_SCORE and row["task"] not in not_learnt
    ]
    if not poor:
        return []
    problem = f"less than {FITTED_SCORE:.0f} % of training rows are right just after their task"
    hint = ", or adapters in more layers (--set target_modules=all-linear)" if adapts_few else ""
    return [f"training: {problem}: {', '.join(poor)}. More steps (--min-steps) may learn more{hint}"]


def write_training_warnings(matrix: Sequence[Row], gate: Sequence[Row], num_rows: Mapping[str, int]) -> list[str]:
    """Warn about tasks with lower scores right after training than before it, or than under another task's adapter.

    `num_rows` are the test rows of each task: a difference below two standard errors of a score is none.
    """
    before, after = dict[str, float](), dict[str, float]()
    for row in matrix:
        if row["scenario"] == "til" and row["after_task"] < row["task_index"]:
            before[row["task"]] = row["score"]
        elif row["scenario"] == "til":
            after.setdefault(row["task"], row["score"])
    lower = [
        f"{task} ({score:.1f} after {before[task]:.1f})"
        for task, score in after.items()
        if task in before and _is_lower(score, before[task], num_rows[task])
    ]
    warnings = [f"training: lower scores than before: {', '.join(lower)}. Try more epochs"] if lower else []
    alone: dict[str, dict[str, float]] = {}
    for row in gate:
        if row["after_task"] == row["task_index"] and str(row["statistic"]).endswith("_adapter_score"):
            alone.setdefault(row["task"], {})[str(row["statistic"]).split("_")[0]] = row["value"]
    poor = [
        f"{task} ({scores['own']:.1f} against {scores['last']:.1f})"
        for task, scores in alone.items()
        if {"own", "last"} <= scores.keys() and _is_lower(scores["own"], scores["last"], num_rows[task])
    ]
    problem = "gate: adapters score less on the rows of their tasks than those of others"
    return [*warnings, *([f"{problem}: {', '.join(poor)}. Try more epochs"] if poor else [])]


def _is_lower(score: float, other: float, num_rows: int) -> bool:
    """Return whether a score in per cent is lower than another by more than two standard errors of that one."""
    share = min(max(other / 100, 0.0), 1.0)
    return other - score > 200 * math.sqrt(share * (1 - share) / max(num_rows, 1)) + 1e-9


def _test_labels(task: ClassificationTask | TextTask) -> Sequence[Any]:
    """Return the label of each test row, or the first answer."""
    if isinstance(task, TextTask):
        return [answers[0] for answers in task.test.targets]
    return task.test.labels


def majority_score(labels: Sequence[Any]) -> float:
    """Return the percentage of the most frequent label."""
    return 100 * max(Counter(labels).values()) / len(labels)


def _suggest_opening(config: Any) -> str:
    if not config.learns_router:
        return _SUGGEST_OTHER_QUERY
    if config.gate != "open":
        return "--set gate=open"
    return f"more than --set router_warmup_steps={config.router_warmup_steps:g}, --set freeze_router=true"


def _suggest_preserving(config: Any) -> str:
    if not config.learns_router:
        return _SUGGEST_OTHER_QUERY
    if config.reflection == "none":
        return "--set reflection=real"
    if config.gate == "open":
        return "more vectors with --set memory_size=N"
    return f"more than --set reflection_weight={config.reflection_weight:g}, or gate=open"
