"""One run of a comparison: a method over a stream, looked at along the way."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.commands.learn.config import LearnConfig
from regard.continual.adapter_network import AdapterNetwork
from regard.continual.diagnostics import diagnose
from regard.continual.gate import find_closed_gates
from regard.continual.gradient_interference import compute_gradients, make_interference_table
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.method import Method
from regard.continual.models import TaskDeltas
from regard.continual.network import INPUTS
from regard.continual.pseudo.quality import collect_rows
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent
from regard.continual.scoring import score_task
from regard.continual.training_phase import MethodLearningRate, TrainingBudget
from regard.data.protocols import describe_protocol_differences
from regard.data.splits import check_disjoint
from regard.data.stream import ClassificationTask, Stream
from regard.data.tokenizers import common_tokens
from regard.models.classifier import extract_encoder
from regard.models.pretrained import Loaded
from regard.runs import distributed as processes
from regard.runs.provenance import peak_memory
from regard.runs.rank import is_main_process
from regard.training.states import eval_mode

TASK_END = "learnt"
"""The stage that is told of when a task is done, and kept."""
PROTOCOLS = "protocols"
"""The stage that is told of before the first task where the protocols differ: in its numbers is in what."""
SHARED = 0.5
"""A mean weight of the own blocks below which a run says that they are shared."""
MOST_NAMED = 5
"""Tasks that a warning names."""
Row = dict[str, Any]


def run_method(
    course: LearnConfig,
    stream: Stream,
    loaded: Loaded,
    *,
    states: Path,
    models: Path | None,
    resume: bool = False,
    tell: Callable[[ProgressEvent], None] | None = None,
) -> Row:
    """What one run gives: the rows of its tables by name, and what its record says.

    `states` is the folder of the state that it goes on from with `resume`; `models` that of what each task has changed,
    None to keep nothing of it. `tell` is told how far it is, and before (stage `PROTOCOLS`) what the stream's protocols
    differ in, if they do: `text_streams.difference`, from what the stream's record says. Raises UserError.
    """
    began = time.perf_counter()
    method = course.make_method()
    own = method.own_learning_rate(course.budget())
    budget, tried = _budget(course, stream, loaded) if own is None else (course.budget(), [])
    learner = _begun(course, stream, method, loaded, budget)
    if tell is not None and is_main_process() and (numbers := describe_protocol_differences(stream)):
        tell(ProgressEvent(1, stream.tasks[0].name, PROTOCOLS, 0, 0, numbers))
    deltas = None if models is None else TaskDeltas(models)
    with processes.raise_on_all_ranks():
        if deltas is not None and is_main_process():
            deltas.begin(learner, method, course.method)
    pairs: list[Row] = _interference(learner, course, learnt=0)

    def done(learner: Learner, learnt: int) -> None:
        with processes.raise_on_all_ranks():
            if deltas is not None and is_main_process():
                deltas.write(learner, learnt)

    def kept(learnt: int) -> None:
        if tell is not None and is_main_process():
            tell(ProgressEvent(learnt, stream.tasks[learnt - 1].name, TASK_END, 0, 0, {}))

    ran = run_stream(
        learner,
        method,
        folder=states,
        resume=resume,
        checkpoint_every=course.save_steps,
        diagnose=_looking(course, loaded) if course.diagnostic_samples else None,
        gated=course.diagnostic_samples,
        on_progress=tell,
        on_task=done,
        on_kept=kept,
    )
    pairs += _interference(learner, course, learnt=len(stream))
    classifier = learner.network.classifier
    return {
        **ran.rows,
        "interference": pairs,
        "pseudo": collect_rows(learner, method, len(stream)) if course.diagnostic_samples else [],
        "seconds": round(time.perf_counter() - began, 3),
        "peak_memory_mib": round(max(ran.peak_memory, peak_memory(learner.device)), 1),
        "tasks": task_hashes(stream),
        "device": str(learner.device),
        "parameters": sum(one.numel() for one in classifier.parameters()),
        "learning_rate": budget.learning_rate if own is None else own.value,
        "search": tried,
        "settings": method.config.to_dict(),
        "truncated": sum(part.truncated for part in learner.encoded.values()),
        "blocks": blocks_of(ran.rows["gate"]),
        "warnings": [*warnings_of(ran.rows["gate"], method), *unlearnt(ran.rows["matrix"], stream, own)],
    }


def check_method(config: LearnConfig, stream: Stream, loaded: Loaded) -> None:
    """Check that a run can begin. Raises UserError."""
    _begun(config, stream, config.make_method(), loaded, config.budget())


def task_hashes(stream: Stream) -> dict[str, dict[str, str]]:
    """The hash of each split of each task."""
    return {task.name: dict(task.sha256) for task in stream.tasks}


def blocks_of(gate: Sequence[Row]) -> dict[str, int]:
    """The block of each task, by its place from 1, where a method has a gate."""
    return {row["task"]: row["adapter"] for row in gate if row["statistic"] == "own_adapter_weight"}


def warnings_of(gate: Sequence[Row], method: Method) -> list[str]:
    """What to say of a run: the tasks whose blocks the gate had shut off when they had just been learnt, and later."""
    found, told = [], set[str]()
    looks: dict[int, list[Row]] = {}
    for row in gate:
        looks.setdefault(int(row["after_task"]), []).append(row)
    for learnt, rows in looks.items():
        for task, weight in find_closed_gates(rows, learnt, newest_only=True).items():
            said = f"gate: the block of {task} got {weight:.2g} of its rows' weight; it was not learnt."
            found.append(f"{said} Open it: {_opening(method.config)}")
            told.add(task)
    for learnt, rows in list(looks.items())[-1:]:
        for task, weight in find_closed_gates(rows, learnt, newest_only=False).items():
            if task not in told:
                said = f"gate: the block of {task} got {weight:.2g} of its rows' weight in the end; it is lost."
                found.append(f"{said} Hold it: {_holding(method.config)}")
        own = [row["value"] for row in rows if row["statistic"] == "own_adapter_weight"]
        if own and (mean := sum(own) / len(own)) < SHARED:
            said = f"gate: tasks give their own blocks {mean:.2g} of their rows' weight on average in the end"
            found.append(f"{said}; either the gate is shut, or their texts are alike and share blocks")
    return found


def unlearnt(matrix: Sequence[Row], stream: Stream, own: MethodLearningRate | None = None) -> list[str]:
    """What to say of tasks that were scored no better, when they had been learnt, than their commonest test label.

    `own`: the rate that the method is trained at, None: the budget's.
    """
    places = {task.name: task for task in stream.tasks if isinstance(task, ClassificationTask)}
    of_each = {
        row["task"]: row["score"]
        for row in matrix
        if row["scenario"] == "til" and row["after_task"] == row["task_index"] and row["task"] in places
    }
    found = [task for task, score in of_each.items() if score <= commonest(places[task].test.labels)]
    if not found:
        return []
    names = ", ".join(found[:MOST_NAMED]) + (f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    more = (
        "more --num-epochs or --learning-rate" if own is None else f"more epochs or another {own.option.rstrip(' =')}"
    )
    return [f"scores: no better than the commonest label when learnt: {names}. Try {more}"]


def commonest(labels: Sequence[int]) -> float:
    """Per cent of the labels that are the most frequent one."""
    return 100 * max(Counter(labels).values()) / len(labels)


def _opening(config: Any) -> str:
    """What opens a gate more than this configuration does."""
    if config.gate != "open":
        return "--set gate=open"
    return f"more than --set router_warmup_steps={config.router_warmup_steps:g}, --set freeze_router=true"


def _holding(config: Any) -> str:
    """What holds the weights of earlier tasks more than this configuration does."""
    if config.reflection == "none":
        return "--set reflection=real"
    if config.gate == "open":
        return "more vectors with --set memory_size=N"
    return f"more than --set reflection_weight={config.reflection_weight:g}, or gate=open"


def _begun(course: LearnConfig, stream: Stream, method: Method, loaded: Loaded, budget: TrainingBudget) -> Learner:
    """A run before its first task, as its course has it."""
    lora = None if course.lora_rank is None else {"rank": course.lora_rank}
    return make_learner(stream, method, loaded, budget, seed=course.seed, lora=lora, head=course.head)


def _budget(course: LearnConfig, stream: Stream, loaded: Loaded) -> tuple[TrainingBudget, list[Row]]:
    """The budget, its learning rate chosen on the dev rows of the first task if there are several to choose from."""
    if len(course.learning_rates) == 1:
        return course.budget(), []
    first = replace(stream, tasks=stream.tasks[:1], order=(0,))
    check_disjoint(first.tasks[0])
    tried = []
    for rate in course.learning_rates:
        method = course.make_method()
        learner = _begun(course, first, method, loaded, course.budget(rate))
        run_stream(learner, method)
        tried.append({"learning_rate": rate, "score": score_task(learner, 0, tasks_trained=1, split="dev").til})
    best = max(tried, key=lambda one: one["score"])
    return course.budget(best["learning_rate"]), tried


def _looking(course: LearnConfig, loaded: Loaded) -> Callable[[Learner, int], list[Row]]:
    """What looks at sinks and over-smoothing on the dev rows of a task, of prompts in the part that reads them."""
    common = common_tokens(loaded.tokenizer)

    def look(learner: Learner, task: int) -> list[Row]:
        items = learner.sample_examples(task, "dev", course.diagnostic_samples)
        found = diagnose(_reader(learner), _shown(learner, learner.iterate_batches(items, "dev")), common=common)
        return [dict(one) for one in json.loads(found.to_json(orient="records", double_precision=15))]

    return look


def _reader(learner: Learner) -> PreTrainedModel:
    """What reads texts: the encoder of a classifier; of a language model its encoder, or all below its head."""
    model = learner.network.classifier.encoder
    return extract_encoder(model) if learner.stream.text else model


def _shown(learner: Learner, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The inputs of each batch, read as the network would, with the low-rank blocks that its rows get; as text alone
    where the network puts soft prompts before it.
    """
    network = learner.network
    for rows in batches:
        given = {name: rows[name] for name in INPUTS if name in rows}
        if not isinstance(network, AdapterNetwork) or network.lengthens_input:
            yield given
            continue
        with eval_mode(network), torch.no_grad():
            weights = network.weights(rows)
        with network.pool.use_weights(weights):
            yield given


def _interference(learner: Learner, course: LearnConfig, *, learnt: int) -> list[Row]:
    """The dot products of the gradients that the tasks' losses have in the encoder."""
    if not course.diagnostic_samples or len(learner.stream) < 2:
        return []
    encoder = learner.network.classifier.encoder
    trained = [one for one in encoder.parameters() if one.requires_grad]
    if not trained:
        return []
    learner.task = max(0, learnt - 1)
    tasks = range(len(learner.stream))
    rows = [
        learner.iterate_batches(learner.sample_examples(task, "dev", course.diagnostic_samples), "dev")
        for task in tasks
    ]
    found = make_interference_table(
        compute_gradients(
            learner.network.to(learner.device),
            rows,
            lambda network, batch: learner.cross_entropy(network(batch), batch),
            lambda batch: int((batch["labels"] != IGNORE_INDEX).sum()),
            parameters=trained,
        )
    )
    names = {task + 1: learner.stream.tasks[task].name for task in tasks}
    named = found.assign(
        task_a=found["task_index_a"].map(names), task_b=found["task_index_b"].map(names), after_task=learnt
    )
    return [dict(one) for one in json.loads(named.to_json(orient="records", double_precision=15))]
