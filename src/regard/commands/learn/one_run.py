"""One run of a comparison: a method over a stream, with diagnostics."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.commands.learn.config import LearnConfig
from regard.commands.learn.encoder_diagnostics import make_diagnostics, measure_interference
from regard.commands.learn.heads import HEAD, chosen_head
from regard.commands.learn.lengths import LENGTHS, describe_lengths
from regard.commands.learn.references import LORA, describe_references
from regard.continual.earlier_tasks import EarlierTasks, keep_method_state
from regard.continual.gate import find_closed_gates
from regard.continual.harness import make_evaluation
from regard.continual.held_out import make_held_out
from regard.continual.learner import Learner, Row
from regard.continual.method import Method
from regard.continual.models import INDEX, TaskDeltas
from regard.continual.pseudo.quality import collect_rows
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import LEARNT, ProgressEvent
from regard.continual.scoring import score_task
from regard.continual.text_lengths import measure_truncation
from regard.continual.training_phase import MethodLearningRate, TrainingBudget
from regard.data.splits import check_disjoint, describe_protocol_differences
from regard.data.stream import ClassificationTask, Stream, TextTask
from regard.models.pretrained import Loaded
from regard.runs import distributed as processes
from regard.runs.provenance import peak_memory
from regard.runs.rank import is_main_process

TASK_END = "learnt"
"""Phase reported when a task is done and saved, with its scores (`collect_numbers`)."""
PROTOCOLS = "protocols"
"""Phase reported before the first task if the protocols differ; `metrics` holds the differences."""
NOTE = "note"
"""Phase reported before the first task if there is something to say; `note` says it."""
SHARED_WEIGHT = 0.5
"""Mean weight of the tasks' own adapters below which a run warns."""


@dataclass(frozen=True)
class Run:
    """One method with one seed, over its stream."""

    config: LearnConfig
    stream: Stream
    fitted: bool = False  # the length to the stream's texts
    lora: Mapping[str, Any] | None = None  # adapters of a reference, see `choose_reference_lora`
    earlier: EarlierTasks | None = None  # of a finished run
    search: Sequence[Row] = ()  # for the learning rate, in a finished run

    @property
    def key(self) -> str:
        """Name of the run, usable as a folder name."""
        parts = (self.config.label, str(self.config.seed))
        return "-".join("".join(c if c.isalnum() or c in "+=." else "-" for c in part) for part in parts)

    @property
    def columns(self) -> Row:
        """Columns of all tables that are constant in the run."""
        order = "-".join(map(str, self.stream.order))
        return {"stream": self.stream.name, "method": self.config.label, "seed": self.config.seed, "order": order}


def run_method(
    run: Run,
    loaded: Loaded,
    *,
    states: Path,
    models: Path | None,
    resume: bool,
    tell: Callable[[ProgressEvent], None] | None,
) -> Row:
    """Run one method over a stream, and return the rows of the tables by name, and metadata. Raises UserError.

    The run resumes from its state in `states`. The tasks' changes to the model go to `models`, if any. `tell` is called
    with progress, first with phase `PROTOCOLS` if the stream's protocols differ, and `NOTE`.
    """
    start, config, stream, lora = time.perf_counter(), run.config, run.stream, run.lora
    method = config.make_method()
    method_rate = method.own_learning_rate(config.budget())
    budget, search = _budget(run, loaded) if method_rate is None else (config.budget(lora=lora), [])
    learner = _make_learner(run, method, loaded, budget)
    tell_main = tell if is_main_process() else None
    if tell_main is not None and (numbers := describe_protocol_differences(stream)):
        tell_main(ProgressEvent(1, stream.tasks[0].name, PROTOCOLS, 0, 0, numbers))
    lengths = {name: getattr(budget, name) for name in LENGTHS if stream.text or name != "truncation_side"}
    lengths |= {"fitted": run.fitted, "truncation": measure_truncation(learner)}
    for note in (describe_lengths([lengths]), describe_references([{"method": config.method, LORA: lora}])):
        if tell_main is not None and note:
            tell_main(ProgressEvent(1, stream.tasks[0].name, NOTE, 0, 0, {}, note))
    deltas = TaskDeltas(models) if models is not None and is_main_process() else None
    with processes.raise_on_all_ranks():
        if deltas is not None:
            deltas.begin(learner, method, config.method)
            if run.earlier is not None and not (deltas.folder / INDEX).exists():
                run.earlier.copy_deltas(learner, deltas.folder)
    pairs: list[Row] = measure_interference(learner, config, num_tasks=0)

    def save_task(learner: Learner, num_tasks: int) -> None:
        with processes.raise_on_all_ranks():
            if deltas is not None:
                deltas.write(learner, num_tasks)

    def report_task(num_tasks: int, rows: Mapping[str, Sequence[Row]]) -> None:
        if tell_main is not None:
            numbers = collect_numbers(rows, num_tasks)
            tell_main(ProgressEvent(num_tasks, stream.tasks[num_tasks - 1].name, TASK_END, 0, 0, numbers))

    run_state = run_stream(
        learner,
        method,
        folder=states,
        resume=resume,
        earlier=run.earlier,
        checkpoint_every=config.save_steps,
        diagnose=make_diagnostics(config, loaded) if config.diagnostic_samples else None,
        evaluate=_make_evaluations(config, learner),
        gated=config.diagnostic_samples,
        on_progress=tell,
        on_task=save_task,
        on_kept=report_task,
    )
    if deltas is not None:
        keep_method_state(deltas.folder, learner, method.state, run_state.rows[LEARNT])
    pairs += measure_interference(learner, config, num_tasks=len(stream))
    rows = run_state.rows
    gate, not_learnt = rows["gate"], find_unlearnt(rows["matrix"], stream)
    return {
        **rows,
        "interference": pairs,
        "pseudo": collect_rows(learner, method, len(stream)) if config.diagnostic_samples else [],
        "seconds": round(run_state.seconds_before + time.perf_counter() - start, 3),
        "peak_memory_mib": round(max(run_state.peak_memory, peak_memory(learner.device)), 1),
        "tasks": task_hashes(stream),
        "device": str(learner.device),
        "parameters": sum(parameter.numel() for parameter in learner.network.classifier.parameters()),
        "learning_rate": budget.learning_rate if method_rate is None else method_rate.value,
        "own_rate": method_rate is not None,
        "search": search,
        "settings": method.config.to_dict(),
        "truncated": sum(split.truncated for split in learner.encoded.values()),
        **lengths,
        LORA: None if lora is None else dict(lora),
        HEAD: chosen_head(config),
        "blocks": {row["task"]: row["adapter"] for row in gate if row["statistic"] == "own_adapter_weight"},
        "not_learnt": not_learnt,
        "warnings": [
            *write_gate_warnings(gate, method),
            *write_score_warnings(not_learnt, method_rate),
            *write_training_warnings(rows["matrix"], gate, {task.name: len(task.test) for task in stream.tasks}),
        ],
    }


def collect_numbers(rows: Mapping[str, Sequence[Row]], num_tasks: int) -> dict[str, float]:
    """Return the scores after a task, "SCENARIO/TASK" and "SCENARIO/average", and what else was evaluated."""
    numbers: dict[str, float] = {}
    scores = [row for row in rows["matrix"] if row["after_task"] == num_tasks >= row["task_index"]]
    for scenario in dict.fromkeys(row["scenario"] for row in scores):
        by_task = {row["task"]: float(row["score"]) for row in scores if row["scenario"] == scenario}
        numbers |= {f"{scenario}/{task}": score for task, score in by_task.items()}
        numbers[f"{scenario}/average"] = sum(by_task.values()) / len(by_task)
    evaluated = [row for row in rows["general"] if row["after_task"] == num_tasks]
    return numbers | {f"general/{row['statistic']}": float(row["value"]) for row in evaluated}


def check_method(run: Run, loaded: Loaded) -> None:
    """Check that a run can begin. Raises UserError."""
    learner = _make_learner(run, run.config.make_method(), loaded, run.config.budget(lora=run.lora))
    _make_evaluations(run.config, learner)


def task_hashes(stream: Stream) -> dict[str, dict[str, str]]:
    """Return the hash of each split of each task."""
    return {task.name: dict(task.sha256) for task in stream.tasks}


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


_SUGGEST_OTHER_QUERY = (
    "the model's states tell its texts from others' too little; other layers with --set query_layers=N"
)


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


def _make_learner(run: Run, method: Method, loaded: Loaded, budget: TrainingBudget) -> Learner:
    config = run.config
    lora = run.lora if config.lora_rank is None else {"rank": config.lora_rank}
    return make_learner(run.stream, method, loaded, budget, seed=config.seed, lora=lora, head=chosen_head(config))


def _budget(run: Run, loaded: Loaded) -> tuple[TrainingBudget, list[Row]]:
    """Return the budget, with the learning rate searched on the first task's dev rows if there are several."""
    config = run.config
    if len(config.learning_rates) <= 1:
        return config.budget(lora=run.lora), []
    first_task = replace(run, stream=replace(run.stream, tasks=run.stream.tasks[:1], order=(0,)))
    check_disjoint(run.stream.tasks[0])
    search = []
    for rate in config.learning_rates:
        method = config.make_method()
        learner = _make_learner(first_task, method, loaded, config.budget(rate))
        run_stream(learner, method)
        search.append({"learning_rate": rate, "score": score_task(learner, 0, tasks_trained=1, split="dev").til})
    best = max(search, key=lambda entry: entry["score"])
    return config.budget(best["learning_rate"]), search


def _make_evaluations(config: LearnConfig, learner: Learner) -> Callable[[Learner, int], list[Row]] | None:
    """Make a function that measures what the stream's own tasks do not show; None if nothing is asked for."""
    names = [name.strip() for name in (config.evaluate or "").split(",") if name.strip()]
    functions = [make_evaluation(learner, names, max_samples=config.max_eval_samples)] if names else []
    if config.held_out is not None:
        functions.append(make_held_out(learner, config.held_out, samples=config.held_out_samples))
    if not functions:
        return None
    return lambda current, tasks_trained: [row for function in functions for row in function(current, tasks_trained)]
