"""How well a network does a task: rows classified right, or answers graded by the metric of their task."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from regard.continual.answer_metrics import RIGHT_OR_WRONG, score_answer
from regard.continual.known_answers import Answering
from regard.continual.learner import Learner
from regard.continual.text_learner import TextLearner, make_batch
from regard.continual.training_phase import ExampleRef
from regard.data.stream import Split, TextTask
from regard.errors import UserError
from regard.runs import distributed as processes

NUM_TRAINING_ROWS = 64
"""Training rows, at most, by which it is told whether a task was learnt."""
NO_TASK = -1
"""The number of the task of rows that are of none in the stream."""


@dataclass(frozen=True)
class Score:
    """Per cent of `n` rows right among the task's own classes (TIL, or answers' mean grade) and all so far (CIL).

    `right`: whether each row is, by scenario, in the order of the split; nothing for grades between right and wrong.
    """

    til: float
    cil: float | None
    n: int
    right: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)


def score_task(
    learner: Learner, task: int, *, tasks_trained: int, split: Split = "test", known_task: bool = True
) -> Score:
    """Score a split of a task after `tasks_trained` tasks, by the highest logits, or as `score_text` does.

    With the task known (TIL) the network answers as one that knows it, see `Network.knowing`, if `known_task`.
    """
    if isinstance(learner, TextLearner):
        return score_text(learner, cast(TextTask, learner.stream.tasks[task]), split=split)
    encoded = learner.encoded[task, split]
    local_rows = processes.local_shard(encoded.attention_mask.sum(1).argsort(stable=True)).tolist()
    right: list[Tensor] = []
    if local_rows:
        logits = informed = compute_logits(learner, task, split, local_rows)
        knowing = learner.network.knowing(task) if known_task else None
        if knowing is not None:
            with knowing:
                informed = compute_logits(learner, task, split, local_rows)
        labels = torch.tensor(learner.stream.class_indices(task))[encoded.labels[local_rows]].to(logits.device)
        scopes = (informed, learner.task_classes[task]), (logits, learner.seen_classes(max(tasks_trained, 1) - 1))
        masked = (values.masked_fill(~classes.to(values.device), -torch.inf) for values, classes in scopes)
        right.append(torch.stack([values.argmax(-1) for values in masked]) == labels)
    til, cil = _collect_rows(right, local_rows, len(encoded), learner.device)
    n = len(encoded)
    return Score(100 * sum(til) / n, 100 * sum(cil) / n, n, {"til": til, "cil": cil})


def score_training_rows(learner: Learner, task: int) -> float:
    """Return the per cent of some training rows of a task that are right among its classes, without dropout."""
    items, right = learner.sample_examples(task, "train", NUM_TRAINING_ROWS), 0
    with learner.evaluation_mode() as network, torch.no_grad(), learner.network.knowing(task) or nullcontext():
        for batch in learner.batches_by_length(items):
            logits = network(batch).float()
            classes = learner.task_classes[task].to(logits.device)
            right += int((logits.masked_fill(~classes, -torch.inf).argmax(-1) == batch["labels"]).sum())
    return 100 * right / len(items)


def compute_logits(learner: Learner, task: int, split: Split, rows: Sequence[int]) -> Tensor:
    """Return the logits (row, class) of rows of a split, those that the network knows as they were."""
    with learner.evaluation_mode() as network, torch.no_grad():
        found, new = _recall_answers(learner, task, split, rows), dict[int, Tensor]()
        for batch in learner.batches_by_length([ExampleRef(task, row) for row in rows if row not in found], split):
            new |= dict(zip(batch["rows"].tolist(), network(batch).float(), strict=True))
        _keep_answers(learner, task, split, new)
    return torch.stack([(found if row in found else new)[row] for row in rows])


def _recall_answers(learner: Learner, task: int, split: Split, rows: Sequence[int]) -> dict[int, Tensor]:
    """Return what the network knows that it would answer rows of a split, by row."""
    known = learner.network.known_answers
    if known is None or not known.has(task, split):
        return {}
    by = _find_answering(learner, task, split, rows)
    return {row: answer.to(learner.device) for row, answer in known.recall(task, split, rows, by).items()}


def _find_answering(learner: Learner, task: int, split: Split, rows: Sequence[int]) -> Answering:
    """Return what answers rows of a split, which are read first where the network has not, as in a resumed run."""
    by = learner.network.answering(task, split, rows)
    if by is None:
        for _ in learner.batches_by_length([ExampleRef(task, row) for row in rows], split):
            pass
        by = learner.network.answering(task, split, rows)
    assert by is not None
    return by


def _keep_answers(learner: Learner, task: int, split: Split, answers: Mapping[int, Tensor]) -> None:
    known, rows = learner.network.known_answers, list(answers)
    by = learner.network.answering(task, split, rows) if known is not None and rows else None
    if known is not None and by is not None:
        known.keep(task, split, rows, torch.stack(list(answers.values())), by)


def _collect_rows(
    right: list[Tensor], rows: Sequence[int], num_rows: int, device: torch.device
) -> list[tuple[bool, ...]]:
    """Return whether each row of a split is right, by scenario, from the parts (scenario, row) of all processes."""
    whole = torch.zeros(2, num_rows, dtype=torch.uint8, device=device)
    if right:
        whole[:, torch.tensor(rows, device=device)] = torch.cat(right, dim=1).to(torch.uint8)
    if processes.world_size() > 1:
        dist.all_reduce(whole)
    return [tuple(map(bool, line)) for line in whole.tolist()]


def score_text(learner: Learner, task: TextTask, *, split: Split = "test") -> Score:
    """Return the mean grade, 0 to 100, of the answers to a split of a task, which need not be one of the stream."""
    if not isinstance(learner, TextLearner):
        raise UserError(
            f"task: expected a run over tasks from text to text, {learner.stream.name} is of classification"
        )
    inputs, references = task.split(split).inputs, task.split(split).targets
    grades = torch.zeros(len(references), dtype=torch.float64)
    for row, answer in generate_answers(learner, task, split):
        grades[row] = score_answer(task.metric, answer, references[row], inputs[row])
    if processes.world_size() > 1:
        grades = grades.to(learner.device)
        dist.all_reduce(grades)
    values = grades.tolist()
    right = {"til": tuple(map(bool, values))} if task.metric in RIGHT_OR_WRONG else {}
    return Score(100 * sum(values) / len(values), None, len(values), right)


def generate_answers(learner: TextLearner, task: TextTask, split: Split = "test") -> Iterator[tuple[int, str]]:
    """Generate this process's share of the answers to a split of a task, which need not be one of the stream.

    Yields:
        Each row with its answer.
    """
    task_index = next((index for index, other in enumerate(learner.stream.tasks) if other is task), NO_TASK)
    in_stream = task_index != NO_TASK
    encoded = learner.encoded_split(task_index, split) if in_stream else learner.encode_pairs(task.split(split))
    order = processes.local_shard(encoded.attention_mask.sum(1).argsort(stable=True))
    knows = in_stream and len(order) > 0 and learner.network.known_answers is not None
    width = learner.budget.target_length
    with learner.evaluation_mode(), torch.no_grad():
        if knows:  # what answers a row is known when it is read
            _find_answering(learner, task_index, split, order.tolist())
        found = _recall_answers(learner, task_index, split, order.tolist()) if knows else {}
        new = dict[int, Tensor]()
        unknown = torch.tensor([row not in found for row in order.tolist()], dtype=torch.bool)
        for rows in order[unknown].split(learner.budget.eval_batch_size):
            if not len(rows):  # of a process with no row to answer, of so few
                break
            prompts, answers = ([read(row) for row in rows.tolist()] for read in (encoded.prompt, encoded.answer))
            pad, device = learner.pad_token_id, learner.device
            batch = make_batch(prompts, answers, pad, task=task_index, rows=rows, device=device)
            token_ids = learner.network.generate(learner.network.annotate(batch, split) if knows else batch, width)
            yield from zip(rows.tolist(), learner.decode_answers(token_ids), strict=True)
            if knows:
                end = learner.generator.end_token_ids[0] if learner.generator.end_token_ids else pad
                ended = torch.nn.functional.pad(token_ids, (0, width - token_ids.shape[1]), value=end)
                new |= dict(zip(rows.tolist(), ended, strict=True))
        if knows:
            _keep_answers(learner, task_index, split, new)
        if found:
            yield from zip(found, learner.decode_answers(torch.stack(list(found.values()))), strict=True)
