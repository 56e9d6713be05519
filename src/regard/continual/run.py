"""One method over one stream: task after task, scored after each, resumed where it stopped."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from regard import training
from regard.continual import state
from regard.continual.batches import Batches
from regard.continual.costs import (
    TaskCost,
    count_examples,
    flops_a_correction,
    flops_a_token,
    memory_cost,
    seconds_of,
    trim_padding,
)
from regard.continual.gate import gate_rows, score_rows
from regard.continual.learner import Learner, check_lengths, encode_stream
from regard.continual.method import Method
from regard.continual.run_state import ProgressEvent, Row, RunState
from regard.continual.scoring import Score, score_task
from regard.continual.text_learner import begin_texts
from regard.continual.training_phase import TrainingBudget, TrainingPhase, warmup_steps
from regard.data.stream import Stream
from regard.data.tokenizers import common_tokens
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import HeadName
from regard.models.limits import maximum_length
from regard.models.pretrained import Loaded
from regard.runs import distributed as processes
from regard.runs.provenance import peak_memory, reset_peak
from regard.training import TrainingConfig

Rows = dict[str, Tensor]
Diagnose = Callable[[Learner, int], list[Row]]
"""Looks at the network on a task (its number), and gives rows of `statistic`, `layer`, `value`, `standard_error`."""
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
    """A run before its first task: the stream encoded, and a network over a copy of the model.

    `head`: the one to learn with, in place of the method's; with that of the labels' words a row is contrasted with all
    classes that were seen so far. For tasks from text to text the model is a language model, and the method one that
    learns such. Raises UserError.
    """
    if stream.text:
        if head is not None:
            raise UserError(f"head: expected none where answers are written (tasks from text to text), got {head!r}")
        return begin_texts(stream, method, loaded, budget, seed=seed, lora=lora)
    encoded = encode_stream(stream, loaded.tokenizer, budget.length)
    check_lengths(encoded, maximum_length(loaded.model, loaded.tokenizer))
    wanted = head or method.head
    classifier = Classifier.from_loaded(
        loaded,
        stream.classes,
        head=wanted,
        common=_common(method, loaded.tokenizer, encoded[0, "train"].input_ids) if wanted == "sink" else (),
        lora=lora,
        label_words=LABEL_WORDS if wanted == "labels" else 0,
        seed=seed,
    )
    network = method.Network(classifier, tasks=len(stream), config=method.config, seed=seed)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    learner = Learner(stream, network, budget, loaded.tokenizer, seed, start, encoded, loaded.model.device)
    learner.loss_classes = method.loss_classes or ("seen" if wanted == "labels" else "task")
    return learner


def run_stream(
    learner: Learner,
    method: Method,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    diagnose: Diagnose | None = None,
    gated: int = 0,
    on_progress: Callable[[ProgressEvent], None] | None = None,
    on_task: Callable[[Learner, int], None] | None = None,
    on_kept: Callable[[int], None] | None = None,
) -> RunState:
    """The whole stream learnt.

    `folder` keeps the state after the last finished task, and with `checkpoint_every` a checkpoint every so many steps
    of the task at hand; with `resume` a run that was broken off goes on there, on one CPU process to the same numbers.
    `gated`: on how many dev rows of each task it is looked at what the method's gate does, where it has one.
    `on_task(learner, learnt)` is called after each task, in every process, before its state is written; after a run was
    resumed only for the tasks that were left, for one of them perhaps again; `on_kept(learnt)` when it is written. The
    network of a run that was resumed when all was learnt has its weights, and nothing else that hooks have shown it.
    Raises UserError.
    """
    ran, place = RunState(learner, method), None if folder is None else Path(folder)
    about = _about(learner, method)
    if place is not None and not resume:
        _clear(place)
    learnt = _resumed(ran, place, about) if resume and place is not None else 0
    learner.network.to(learner.device)
    for task in range(learnt, len(learner.stream)):
        learner.task = task
        reset_peak(learner.device)
        taken = seconds_of(method.before_task, learner, task)
        _before(ran, diagnose)
        cost = _train(ran, place, resume, checkpoint_every, on_progress)
        taken += seconds_of(method.after_task, learner, task)
        _check_bound(method)
        cost |= {"hook_seconds": taken + cost["hook_seconds"], "peak_memory_mib": peak_memory(learner.device)}
        ran.rows["cost"].append({**cost, **memory_cost(learner, method)})
        _after(ran, diagnose)
        _add_gate(ran, gated)
        ran.peak_memory = max(ran.peak_memory, peak_memory(learner.device))
        if on_task is not None:
            on_task(learner, task + 1)
        if place is not None:
            _keep(ran, place, about)
        if on_kept is not None:
            on_kept(task + 1)
    learner.network.eval()
    return ran


def _first() -> bool:
    """Whether this is the process that writes."""
    return os.environ.get("RANK", "0") == "0" if not dist.is_initialized() else dist.get_rank() == 0


def _clear(place: Path) -> None:
    """Remove what an earlier run has left, and nothing else that may be there."""
    if _first():
        for left in (*place.glob("after-*"), *place.glob("task-*")):
            shutil.rmtree(left, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def _common(method: Method, tokenizer: Any, ids: Tensor) -> list[int]:
    """The tokens that count as common for scaling sinks: by list, or because many texts of the first task have one."""
    if method.config.common_tokens == "list":
        return sorted(common_tokens(tokenizer))
    texts = torch.zeros(int(ids.max()) + 1, dtype=torch.long)
    for row in ids:
        texts[row.unique()] += 1
    return cast("list[int]", (texts >= method.config.min_document_frequency * len(ids)).nonzero().flatten().tolist())


def _about(learner: Learner, method: Method) -> dict[str, Any]:
    """What a run's numbers depend on."""
    stream, config = learner.stream, learner.network.classifier.config
    unused = ("micro_batch_size",) if stream.text else ("micro_batch_size", "target_length")
    return {
        "method": type(method).__name__,
        "settings": method.config.to_dict(),
        "budget": {name: value for name, value in dataclasses.asdict(learner.budget).items() if name not in unused},
        "seed": learner.seed,
        "stream": {
            "name": stream.name,
            "order": list(stream.order),
            "tasks": [dict(one.sha256) for one in stream.tasks],
        },
        "model": {
            "base": config.lineage.get("base"),
            "sha256": config.lineage.get("sha256"),
            "lora": config.lora,
            "head": config.head,
        },
    }


def _resumed(ran: RunState, place: Path, about: Mapping[str, Any]) -> int:
    """After how many tasks the run goes on, as it was then."""
    learnt = state.latest(place, len(ran.learner.stream))
    if not learnt:
        return 0
    ran.method.state, found = state.restore_state(place, learnt, ran.learner.network, about)
    ran.rows = {name: found.get(name, []) for name in ran.rows}
    return learnt


def _keep(ran: RunState, place: Path, about: Mapping[str, Any]) -> None:
    """Write the state after the task at hand, whose checkpoints are no longer needed."""
    with processes.raise_on_all_ranks():
        if _first():
            learnt = ran.learner.task + 1
            state.save(place, learnt, ran.learner.network, ran.method.state, {**ran.rows, "about": about})
            shutil.rmtree(_stages(place, ran.learner.task), ignore_errors=True)


def _stages(place: Path, task: int) -> Path:
    return place / f"task-{task + 1:04d}"


# -- training -------------------------------------------------------------------------------------------


def _train(
    ran: RunState,
    place: Path | None,
    resume: bool,
    every: int | None,
    on_progress: Callable[[ProgressEvent], None] | None,
) -> Row:
    """Every stage of the task at hand; what it cost."""
    learner, method, spent = ran.learner, ran.method, TaskCost()
    for number, stage in enumerate(method.phases(learner, learner.task)):
        began = time.perf_counter()
        batches = method.batches(learner, learner.task, stage)
        spent.hooks += time.perf_counter() - began
        if not batches.steps:
            continue
        with _only(learner, stage):
            a_token = flops_a_token(learner, method, batches)
            a_step = flops_a_correction(learner, method, batches, stage)
            trained = training.train(
                learner.network,
                _plan(learner, stage, batches, every),
                batch=spent.counting(batches),
                loss=lambda network, rows: method.loss(learner, network, trim_padding(rows)),
                count=count_examples,
                folder=None if place is None or every is None else _stages(place, learner.task) / f"stage-{number}",
                resume=resume and every is not None,
                on_progress=_telling(learner, stage, on_progress),
                correct=stage.transform_gradients,
                times=stage.lr_multipliers,
                device="cpu" if learner.device.type == "cpu" else None,
            )
        spent.add(trained, batches, a_token=a_token, a_step=a_step)
    return {**_place(learner, learner.task), **spent.row()}


def _plan(learner: Learner, stage: TrainingPhase, batches: Batches, every: int | None) -> TrainingConfig:
    """How a stage is trained: a new AdamW and a schedule of its own (arXiv 2410.05648: a linear one)."""
    budget = learner.budget
    return TrainingConfig(
        max_steps=batches.steps,
        batch_size=batches.size,
        micro_batch_size=budget.micro_batch_size,
        learning_rate=stage.learning_rate,
        lr_scheduler_type=budget.lr_scheduler_type,  # type: ignore[arg-type]  # checked by the plan
        warmup_steps=warmup_steps(budget, batches.steps),
        final_lr_ratio=0.0,
        weight_decay=budget.weight_decay,
        decay="matrices",
        betas=(0.9, 0.999),
        adam_epsilon=1e-6,
        max_grad_norm=budget.max_grad_norm,
        precision=budget.precision,  # type: ignore[arg-type]  # checked by the plan
        seed=learner.seed_for("stage", learner.task, stage.name) % 2**31,
        save_steps=every,
        save_total_limit=1,
        logging_steps=batches.steps,
    )


class _only:
    """While it lasts only what a stage trains requires gradients."""

    def __init__(self, learner: Learner, stage: TrainingPhase) -> None:
        network = learner.network
        trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        if stage.trains == "head" and not any(network.is_head_parameter(name) for name in trained):
            raise UserError(
                f"head: expected one that can be trained, stage {stage.name} trains the head alone, and "
                f"{network.classifier.config.head} has no weights"
            )
        self.frozen = [
            parameter
            for name, parameter in network.named_parameters()
            if parameter.requires_grad and stage.trains == "head" and not network.is_head_parameter(name)
        ]

    def __enter__(self) -> None:
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def __exit__(self, *error: object) -> None:
        for parameter in self.frozen:
            parameter.requires_grad_(True)


def _telling(
    learner: Learner, stage: TrainingPhase, on_progress: Callable[[ProgressEvent], None] | None
) -> Callable[[int, int, Mapping[str, float]], None] | None:
    if on_progress is None:
        return None
    name = learner.stream.tasks[learner.task].name

    def tell(step: int, steps: int, numbers: Mapping[str, float]) -> None:
        on_progress(ProgressEvent(learner.task + 1, name, stage.name, step, steps, numbers))

    return tell


# -- what is found --------------------------------------------------------------------------------------


def _place(learner: Learner, task: int) -> Row:
    return {"task_index": task + 1, "task": learner.stream.tasks[task].name}


def _before(ran: RunState, diagnose: Diagnose | None) -> None:
    """What is seen before the task at hand is learnt: its score without, and the diagnostics."""
    learner, task = ran.learner, ran.learner.task
    if ran.method.evaluation_scope == "seen":
        _add_score(ran, task, score_task(learner, task, learnt=task), learnt=task, cil=False)
    _add_diagnostics(ran, diagnose, learnt=task)


def _after(ran: RunState, diagnose: Diagnose | None) -> None:
    """The scores and diagnostics after the task at hand."""
    learner, task, method = ran.learner, ran.learner.task, ran.method
    learnt = task + 1
    if method.evaluation_scope == "end" and learnt < len(learner.stream):
        return
    kept = [row for row in ran.rows["matrix"] if row["after_task"] == task and method.evaluation_scope == "own"]
    ran.rows["matrix"] += [{**row, "after_task": learnt} for row in kept]
    for other in (task,) if method.evaluation_scope == "own" else range(learnt):
        _add_score(ran, other, score_task(learner, other, learnt=learnt), learnt=learnt, cil=method.incremental)
    _add_diagnostics(ran, diagnose, learnt=learnt)


def _add_score(ran: RunState, task: int, found: Score, *, learnt: int, cil: bool) -> None:
    values = {"til": found.til, **({"cil": found.cil} if cil and found.cil is not None else {})}
    ran.rows["matrix"] += [
        {"after_task": learnt, **_place(ran.learner, task), "scenario": setting, "score": value, "n": found.n}
        for setting, value in values.items()
    ]


def _add_diagnostics(ran: RunState, diagnose: Diagnose | None, *, learnt: int) -> None:
    if diagnose is not None:
        task = ran.learner.task
        ran.rows["diagnostics"] += [
            {"after_task": learnt, **_place(ran.learner, task), **row} for row in diagnose(ran.learner, task)
        ]


def _add_gate(ran: RunState, rows: int) -> None:
    """What the gate does after the task at hand; how right rows are without it, of the task, at the end of all."""
    if not rows:
        return
    learner, learnt = ran.learner, ran.learner.task + 1
    last = learnt == len(learner.stream)
    found = gate_rows(learner, ran.method, learnt, rows=rows, scored=last)
    if found and not last:
        told = {"after_task": learnt, **_place(learner, learner.task)}
        each = score_rows(learner, learner.task, learnt)
        found += [{**told, "statistic": name, "adapter": block, "value": value} for name, block, value in each]
    ran.rows["gate"] += found


def _check_bound(method: Method) -> None:
    """A method that keeps more than it says has a mistake."""
    assert len(method.state.examples) <= method.memory_size, (
        f"{len(method.state.examples)} examples kept, {method.memory_size} declared"
    )
