"""One method over one stream: task after task, scored after each, resumed where it stopped."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from regard import training
from regard.continual.costs import FirstStep, TaskCost, count_examples, measure_flops, measure_memory, trim_padding
from regard.continual.earlier_tasks import EarlierTasks
from regard.continual.gate import measure_gate
from regard.continual.learner import Learner, Row, check_lengths, encode_stream
from regard.continual.learnt_answers import compare_with_learnt
from regard.continual.method import Method, check_iterable
from regard.continual.run_state import LEARNT, TRAINING, ProgressEvent, RunState, restore_state, save
from regard.continual.scoring import score_task, score_training_rows
from regard.continual.shares import ceil_share
from regard.continual.text_learner import make_text_learner
from regard.continual.training_phase import Batches, TrainingBudget, TrainingPhase, count_warmup_steps, train_only
from regard.data.encoding import Encoded
from regard.data.stream import Stream
from regard.data.tokenizers import common_tokens
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import HeadName
from regard.models.limits import maximum_length
from regard.models.pretrained import Loaded
from regard.runs import distributed as processes
from regard.runs.provenance import peak_memory, reset_peak
from regard.runs.rank import is_main_process, num_processes
from regard.runs.snapshots import Snapshots
from regard.training import TrainingConfig

Diagnose = Callable[[Learner, int], list[Row]]
"""Looks at the network on a task (its number), and gives rows of `statistic`, `layer`, `value`, `standard_error`."""
KEEPING, SCORING = "keeping what later tasks need", "scoring"
"""Parts of a task behind its steps, as progress is told of them; `sapt` may train a generator in the first."""
LABEL_WORDS = 500
"""Words of the vocabulary that the head of the labels' words holds texts against, beside its labels."""


def make_learner(
    stream: Stream,
    method: Method,
    loaded: Loaded,
    budget: TrainingBudget,
    *,
    seed: int,
    lora: Mapping[str, Any] | None = None,
    head: HeadName | None = None,
) -> Learner:
    """Return a run before its first task, over a copy of the model; `head` replaces the method's. Raises UserError."""
    if stream.text:
        if head is not None:
            raise UserError(f"head: expected none where answers are written (tasks from text to text), got {head!r}")
        text_learner = make_text_learner(stream, method, loaded, budget, seed=seed, lora=lora)
        method.check_run(text_learner)
        return text_learner
    encoded = encode_stream(stream, loaded.tokenizer, budget.length)
    check_lengths(encoded, maximum_length(loaded.model, loaded.tokenizer))
    head_name = head or method.head
    first_texts = encoded[0, "train"]
    classifier = Classifier.from_loaded(
        loaded,
        stream.classes,
        head=head_name,
        common=_find_common_tokens(method, loaded.tokenizer, first_texts) if head_name == "sink" else (),
        lora=lora,
        label_words=LABEL_WORDS if head_name == "labels" else 0,
        seed=seed,
    )
    network = method.Network(classifier, tasks=len(stream), config=method.config, seed=seed)
    learner = Learner(stream, network, budget, loaded.tokenizer, seed, encoded, loaded.model.device)
    learner.loss_classes = method.loss_classes or ("seen" if head_name == "labels" else "task")
    method.check_run(learner)
    return learner


def run_stream(
    learner: Learner,
    method: Method,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    earlier: EarlierTasks | None = None,
    checkpoint_every: int | None = None,
    diagnose: Diagnose | None = None,
    evaluate: Diagnose | None = None,
    gated: int = 0,
    on_progress: Callable[[ProgressEvent], None] | None = None,
    on_task: Callable[[Learner, int], None] | None = None,
    on_kept: Callable[[int, Mapping[str, list[Row]]], None] | None = None,
) -> RunState:
    """Train a method on a stream, task after task.

    `folder` has the state after the last trained task; with `resume` the run goes on from it, on one CPU process to the
    same numbers. `earlier` are tasks of a finished run, which the stream begins with: they are not trained again.
    Within a task there is a checkpoint every `checkpoint_every` steps, by default none. `evaluate` is called before
    the first and after each task, with the number of trained tasks, and gives rows of `statistic`, `value`,
    `standard_error`, `n`. On `gated` dev rows of each task the gate is measured. `on_task` is called after each task
    in every process before its state is written (perhaps again in a resumed run), `on_kept` when it is written,
    with all rows so far.
    """
    start, run = time.perf_counter(), RunState(learner, method)
    checkpoint_dir, fingerprint = None if folder is None else Path(folder), _fingerprint(learner, method)
    checkpoints = _Checkpoints(checkpoint_dir, resume, checkpoint_every)
    tasks_trained = _begin(run, checkpoint_dir, resume, earlier, fingerprint)
    method.check_run(learner)
    learner.network.to(learner.device)
    for task in range(tasks_trained, len(learner.stream)):
        learner.task, cost = task, TaskCost(learner.budget.micro_batch_size)
        learner.reset_unseen_classes()
        reset_peak(learner.device)
        if not task:
            cost.time("diagnostics_seconds", _add_general, run, evaluate, 0)
        if method.evaluation_scope == "seen":
            cost.time("scoring_seconds", _add_scores, run, [task], task, False)
        cost.time("hook_seconds", method.before_task, learner, task)
        cost.time("diagnostics_seconds", _add_diagnostics, run, diagnose, task)
        with learner.restoring_other_classes() if method.restores_other_classes else nullcontext():
            _train(run, cost, checkpoints, on_progress)
        _tell(on_progress, learner, KEEPING)
        cost.time("hook_seconds", method.after_task, learner, task)
        _check_memory(method)
        task_peak = peak_memory(learner.device)
        _tell(on_progress, learner, SCORING)
        _evaluate_after(run, cost, diagnose)
        cost.time("diagnostics_seconds", _add_general, run, evaluate, task + 1)
        if gated:
            run.rows["gate"] += cost.time("diagnostics_seconds", _measure_gate, run, gated)
        row = {**learner.task_columns(task), **cost.row(), "peak_memory_mib": task_peak}
        run.rows["cost"].append({**row, **measure_memory(learner, method)})
        saving = time.perf_counter()
        run.peak_memory = max(run.peak_memory, peak_memory(learner.device))
        if on_task is not None:
            on_task(learner, task + 1)
        if checkpoint_dir is not None:
            with processes.raise_on_all_ranks():
                if is_main_process():
                    seconds = run.seconds_before + time.perf_counter() - start
                    costs = {"seconds": seconds, "peak_memory": run.peak_memory}
                    rows = {**run.rows, "identity": fingerprint, **costs}
                    save(checkpoint_dir, task + 1, learner.network, method.state, rows)
                    shutil.rmtree(_phases_dir(checkpoint_dir, task), ignore_errors=True)
        run.rows["cost"][-1]["saving_seconds"] = time.perf_counter() - saving
        if on_kept is not None:
            on_kept(task + 1, run.rows)
    learner.network.eval()
    return run


def _begin(
    run: RunState, checkpoint_dir: Path | None, resume: bool, earlier: EarlierTasks | None, fingerprint: dict[str, Any]
) -> int:
    """Return how many tasks are trained: those of the run to resume, or of the finished one that it goes on with."""
    restored = None
    if checkpoint_dir is not None and resume:
        restored = restore_state(checkpoint_dir, run.learner.network, fingerprint)
    elif checkpoint_dir is not None:
        _remove_checkpoints(checkpoint_dir)
    if restored is None and earlier is not None:
        restored = earlier.restore(run.learner)
    if restored is None:
        return 0
    tasks_trained, run.method.state, rows = restored
    run.seconds_before, run.peak_memory = float(rows.get("seconds", 0.0)), float(rows.get("peak_memory", 0.0))
    run.rows = {name: rows.get(name, []) for name in run.rows}
    return tasks_trained


def _check_memory(method: Method) -> None:
    if len(method.state.examples) > method.memory_size:
        expected = f"at most memory_size ({method.memory_size}) rows in state.examples of {type(method).__name__}"
        raise UserError(f"method: expected {expected}, got {len(method.state.examples)}; its memory_size says so")


def _tell(on_progress: Callable[[ProgressEvent], None] | None, learner: Learner, phase: str) -> None:
    """Tell of a part of a task that has no steps."""
    if on_progress is not None:
        on_progress(ProgressEvent(learner.task + 1, learner.stream.tasks[learner.task].name, phase, 0, 0, {}))


def _remove_checkpoints(checkpoint_dir: Path) -> None:
    if is_main_process():
        for leftover in (*checkpoint_dir.glob("after-*"), *checkpoint_dir.glob("task-*")):
            shutil.rmtree(leftover, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def _find_common_tokens(method: Method, tokenizer: Any, texts: Encoded) -> list[int]:
    """Return the common tokens for scaling sinks: those of a list, or those that many texts of the first task have."""
    if method.config.common_tokens == "list":
        return sorted(common_tokens(tokenizer))
    counts = torch.zeros(int(texts.input_ids.max()) + 1, dtype=torch.long)
    for ids, mask in zip(texts.input_ids, texts.attention_mask, strict=True):
        counts[ids[mask].unique()] += 1
    least = ceil_share(method.config.min_document_frequency, len(texts))
    return cast("list[int]", (counts >= least).nonzero().flatten().tolist())


def _fingerprint(learner: Learner, method: Method) -> dict[str, Any]:
    stream, config = learner.stream, learner.network.classifier.config
    tasks = [dict(task.sha256) for task in stream.tasks]
    lineage = {name: config.lineage.get(name) for name in ("base", "sha256")}
    unused = ["micro_batch_size"] if stream.text else ["micro_batch_size", "target_length"]
    if not stream.text or learner.budget.truncation_side == "right":  # as runs of before it was a field have it
        unused.append("truncation_side")
    return {
        "method": type(method).__name__,
        **({"source": method.source_sha256} if method.source_sha256 else {}),
        "settings": method.config.identity(),
        "budget": {name: value for name, value in dataclasses.asdict(learner.budget).items() if name not in unused},
        "seed": learner.seed,
        "stream": {"name": stream.name, "order": list(stream.order), "tasks": tasks},
        "model": {**lineage, "lora": config.lora, "head": config.head},
    }


def _phases_dir(checkpoint_dir: Path, task: int) -> Path:
    return checkpoint_dir / f"task-{task + 1:04d}"


@dataclasses.dataclass(frozen=True)
class _Checkpoints:
    """Where the state within a phase is kept, whether a phase goes on from it, and after how many steps it is."""

    folder: Path | None
    resume: bool
    every: int | None

    def of_phase(self, task: int, index: int) -> Path | None:
        """Return the folder of a phase of a task; None if nothing is kept within phases."""
        return None if self.folder is None or self.every is None else _phases_dir(self.folder, task) / f"stage-{index}"

    def rows_of_phase(self, task: int, index: int) -> int:
        """Return how many rows the batches have of a phase that goes on; 0 of one that begins."""
        folder = self.of_phase(task, index) if self.resume else None
        found = None if folder is None else Snapshots(folder).find_latest()
        return 0 if found is None else int(found[1]["plan"]["batch_size"])


def _train(
    run: RunState,
    cost: TaskCost,
    checkpoints: _Checkpoints,
    on_progress: Callable[[ProgressEvent], None] | None,
) -> None:
    """Train the phases of a task, those without steps left out."""
    learner, method = run.learner, run.method
    phases = method.phases(learner, learner.task)
    for index, phase in enumerate(check_iterable(method, "phases", phases, "TrainingPhases", TrainingPhase)):
        learner.least_rows = checkpoints.rows_of_phase(learner.task, index)
        batches: Any = cost.time("hook_seconds", method.batches, learner, learner.task, phase)
        if not isinstance(batches, Batches):
            got = f"{type(method).__name__}.batches returned a {type(batches).__name__}"
            raise UserError(f"method: expected Batches, as learner.epoch_batches makes them; {got}")
        if batches.steps:
            with train_only(learner.network, phase):
                _train_phase(run, cost, phase, index, batches, checkpoints, on_progress)


def _train_phase(
    run: RunState,
    cost: TaskCost,
    phase: TrainingPhase,
    index: int,
    batches: Batches,
    checkpoints: _Checkpoints,
    on_progress: Callable[[ProgressEvent], None] | None,
) -> None:
    """Train one phase, and count its floating-point operations in its first step, or in one of their own."""
    learner, method = run.learner, run.method
    task_name = learner.stream.tasks[learner.task].name

    def report(step: int, steps: int, numbers: Mapping[str, float]) -> None:
        assert on_progress is not None, "no report without a listener"
        on_progress(ProgressEvent(learner.task + 1, task_name, phase.name, step, steps, numbers))

    folder = checkpoints.of_phase(learner.task, index)
    resume = checkpoints.resume and folder is not None
    begun = resume and folder is not None and bool(Snapshots(folder).paths())  # there may be an unfinished one alone
    takes_first = num_processes() == 1 and not begun
    flops = None if takes_first else measure_flops(learner, method, batches, phase)
    first = FirstStep(learner, method, phase)
    try:
        result = training.train(
            learner.network,
            _make_training_config(learner, phase, batches, checkpoints.every),
            batch=cost.count_batches(batches),
            loss=first.loss if takes_first else partial(method.loss, learner),
            count=count_examples,
            folder=folder,
            resume=resume,
            on_progress=None if on_progress is None else report,
            correct=first.transform_gradients if takes_first else phase.transform_gradients,
            times=phase.lr_multipliers,
            trim=trim_padding,
            device="cpu" if learner.device.type == "cpu" else None,
        )
    finally:
        flops = first.end() or flops
    assert flops is not None
    token_flops, step_flops = flops
    cost.add(result, batches, token_flops=token_flops, step_flops=step_flops)


def _make_training_config(
    learner: Learner, phase: TrainingPhase, batches: Batches, save_steps: int | None
) -> TrainingConfig:
    """Return how a phase is trained: a new AdamW and a schedule of its own (linear in arXiv 2410.05648).

    A rate that falls would reach 0 one step after the last, so the last step trains as well.
    """
    budget = learner.budget
    warmup_steps = count_warmup_steps(budget, batches.steps)
    names = ("micro_batch_size", "lr_scheduler_type", "weight_decay", "max_grad_norm", "precision")
    return TrainingConfig(
        **{name: getattr(budget, name) for name in names},
        max_steps=batches.steps,
        batch_size=batches.size,
        learning_rate=phase.learning_rate,
        warmup_steps=warmup_steps,
        final_lr_ratio=1 / (batches.steps - warmup_steps + 1),
        decay="matrices",
        betas=(0.9, 0.999),
        adam_epsilon=1e-6,
        seed=learner.seed_for("stage", learner.task, phase.name) % 2**31,
        save_steps=save_steps,
        save_total_limit=1,
        logging_steps=batches.steps,
    )


def _measure_gate(run: RunState, rows: int) -> list[Row]:
    learner, tasks_trained = run.learner, run.learner.task + 1
    scored_tasks = None if tasks_trained == len(learner.stream) else (learner.task,)
    scores = [row for row in run.rows["matrix"] if row["after_task"] == tasks_trained and row["scenario"] == "til"]
    routed = {task: row["score"] for row in scores if learner.network.knowing(task := row["task_index"] - 1) is None}
    options: dict[str, Any] = {"rows": rows, "scored_tasks": scored_tasks, "routed_scores": routed}
    options["known_scores"] = run.known_scores
    return measure_gate(learner, run.method, tasks_trained, **options)


def _evaluate_after(run: RunState, cost: TaskCost, diagnose: Diagnose | None) -> None:
    task, scope = run.learner.task, run.method.evaluation_scope
    if scope == "end" and task + 1 < len(run.learner.stream):
        return
    if scope == "own":
        previous_rows = [row for row in run.rows["matrix"] if row["after_task"] == task]
        run.rows["matrix"] += [{**row, "after_task": task + 1} for row in previous_rows]
    tasks = [task] if scope == "own" else range(task + 1)
    cost.time("scoring_seconds", _add_scores, run, tasks, task + 1, run.method.incremental)
    if scope != "end" and run.method.answers_as_trained and not run.learner.stream.text:
        share = cost.time("scoring_seconds", score_training_rows, run.learner, task)
        run.rows[TRAINING].append({"task": run.learner.stream.tasks[task].name, "score": share})
    cost.time("diagnostics_seconds", _add_diagnostics, run, diagnose, task + 1)


def _add_scores(run: RunState, tasks: Iterable[int], tasks_trained: int, cil: bool) -> None:
    for task in tasks:
        score = score_task(run.learner, task, tasks_trained=tasks_trained)
        values = {"til": score.til, **({"cil": score.cil} if cil and score.cil is not None else {})}
        row = {"after_task": tasks_trained, **run.learner.task_columns(task)}
        run.rows["matrix"] += [
            {
                **{**row, "scenario": scenario, "score": value, "n": score.n},
                **compare_with_learnt(run.rows[LEARNT], task, scenario, tasks_trained, score.right.get(scenario)),
            }
            for scenario, value in values.items()
        ]


def _add_diagnostics(run: RunState, diagnose: Diagnose | None, tasks_trained: int) -> None:
    if diagnose is not None:
        row = {"after_task": tasks_trained, **run.learner.task_columns(run.learner.task)}
        run.rows["diagnostics"] += [{**row, **values} for values in diagnose(run.learner, run.learner.task)]


def _add_general(run: RunState, evaluate: Diagnose | None, tasks_trained: int) -> None:
    if evaluate is not None:
        rows = evaluate(run.learner, tasks_trained)
        run.rows["general"] += [{"after_task": tasks_trained, **row} for row in rows]
