"""One run of a comparison: a method over a stream, with diagnostics."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.commands.learn.config import LearnConfig
from regard.commands.learn.encoder_diagnostics import make_diagnostics, measure_interference
from regard.commands.learn.heads import HEAD, chosen_head
from regard.commands.learn.lengths import FITTED_TASKS, LENGTHS, describe_lengths
from regard.commands.learn.references import LORA, describe_references
from regard.commands.learn.warnings import (
    find_unlearnt,
    write_fit_warnings,
    write_gate_warnings,
    write_score_warnings,
    write_training_warnings,
)
from regard.continual.earlier_tasks import EarlierTasks, keep_method_state
from regard.continual.harness import make_evaluation
from regard.continual.held_out import make_held_out
from regard.continual.learner import Learner, Row
from regard.continual.method import Method
from regard.continual.models import INDEX, TaskDeltas
from regard.continual.pseudo.quality import collect_rows
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import LEARNT, TRAINING, ProgressEvent
from regard.continual.scoring import score_task
from regard.continual.text_lengths import measure_truncation
from regard.continual.training_phase import TrainingBudget
from regard.data.splits import check_disjoint, describe_protocol_differences
from regard.data.stream import Stream
from regard.errors import UserError
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


@dataclass(frozen=True)
class Run:
    """One method with one seed, over its stream."""

    config: LearnConfig
    stream: Stream
    fitted_tasks: int = 0  # to the texts of so many of the first tasks the length was fitted; 0 for a length as given
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


def check_keys(runs: Iterable[Run]) -> None:
    """Raise UserError if two runs have one key, in any case: the second would be taken for the first, which is done."""
    by_key: dict[str, Run] = {}
    for run in runs:
        other = by_key.setdefault(run.key.lower(), run)
        if other is not run:
            got = f"{other.config.label!r} and {run.config.label!r}, whose runs have the folder {run.key}"
            raise UserError(f"method: expected names that differ in letters or digits, got {got}; rename one")


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
    lengths = {name: getattr(budget, name) for name in LENGTHS if stream.text or name != "truncation_side"}
    lengths |= {"fitted": run.fitted_tasks > 0, "truncation": measure_truncation(learner)}
    lengths |= {FITTED_TASKS: run.fitted_tasks} if 0 < run.fitted_tasks < len(stream) else {}
    if tell_main is not None:
        _tell_beginning(run, lengths, tell_main)
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
            *write_fit_warnings(rows[TRAINING], not_learnt, adapts_few=_adapts_few_layers(method)),
            *write_training_warnings(rows["matrix"], gate, {task.name: len(task.test) for task in stream.tasks}),
        ],
    }


def _adapts_few_layers(method: Method) -> bool:
    """Return whether a method trains low-rank adapters of queries and values alone."""
    config: Any = method.config
    return getattr(config, "target_modules", "") == "auto" and getattr(config, "adapter_type", "lora") == "lora"


def _tell_beginning(run: Run, lengths: Row, tell: Callable[[ProgressEvent], None]) -> None:
    """Tell of what there is to know before the first task."""
    first_name = run.stream.tasks[0].name
    if numbers := describe_protocol_differences(run.stream):
        tell(ProgressEvent(1, first_name, PROTOCOLS, 0, 0, numbers))
    for note in (describe_lengths([lengths]), describe_references([{"method": run.config.method, LORA: run.lora}])):
        if note:
            tell(ProgressEvent(1, first_name, NOTE, 0, 0, {}, note))


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
    check_method(run, loaded)  # before the search, whose runs have one task
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
    names, most = config.evaluated, config.max_eval_samples
    functions = [make_evaluation(learner, names, max_samples=most)] if names else []
    if config.held_out is not None:
        functions.append(make_held_out(learner, config.held_out, samples=config.held_out_samples))
    if not functions:
        return None
    return lambda current, tasks_trained: [row for function in functions for row in function(current, tasks_trained)]
