"""How well a network does a task: rows that it classifies right, or answers that it writes, graded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from regard.continual.answer_metrics import score_answer
from regard.continual.batches import ExampleRef
from regard.continual.learner import Learner
from regard.continual.text_learner import TextLearner, pad_batch
from regard.data.stream import Split, TextTask
from regard.errors import UserError
from regard.runs import distributed as processes

NO_TASK = -1
"""The number of the task of rows that are of none in the stream."""


@dataclass(frozen=True)
class Score:
    """Per cent of `n` rows classified right: among the task's own classes (TIL), and among all classes so far (CIL).

    Of a task from text to text `til` is the mean grade of the answers, and there is no `cil`.
    """

    til: float
    cil: float | None
    n: int


def score_task(learner: Learner, task: int, *, tasks_trained: int, split: Split = "test") -> Score:
    """Score a split of a task after `tasks_trained` tasks; see `score_text` for text-to-text tasks.

    Every process classifies its shard by the highest logit, and gets the total.
    """
    if isinstance(learner, TextLearner):
        return score_text(learner, cast(TextTask, learner.stream.tasks[task]), split=split)
    encoded = learner.encoded[task, split]
    local_rows = processes.local_shard(encoded.attention_mask.sum(1).argsort(stable=True)).tolist()
    task_classes, seen_classes = learner.task_classes[task], learner.seen_classes(max(tasks_trained, 1) - 1)
    num_correct = torch.zeros(2, device=learner.device)
    with learner.evaluation_mode() as network, torch.no_grad():
        for rows in learner.iterate_batches([ExampleRef(task, row) for row in local_rows], split):
            logits = network(rows).float()
            for index, classes in enumerate((task_classes, seen_classes)):
                predictions = logits.masked_fill(~classes.to(logits.device), -torch.inf).argmax(-1)
                num_correct[index] += (predictions == rows["labels"]).sum()
    if processes.world_size() > 1:
        dist.all_reduce(num_correct)
    til, cil = (100 * num_correct / len(encoded)).tolist()
    return Score(til, cil, len(encoded))


def score_text(learner: Learner, task: TextTask, *, split: Split = "test") -> Score:
    """Return the mean grade, 0 to 100, of the answers to a split of a task, which need not be one of the stream.

    Every process answers its shard and gets the total. Raises UserError where the run is one of classification.
    """
    if not isinstance(learner, TextLearner):
        raise UserError(
            f"task: expected a run over tasks from text to text, {learner.stream.name} is of classification"
        )
    references = task.split(split).targets
    total = sum(
        score_answer(task.metric, answer, references[row])
        for row, answer in _generate_by_row(learner, task, split, sharded=True)
    )
    if processes.world_size() > 1:
        summed = torch.tensor(total, dtype=torch.float64, device=learner.device)
        dist.all_reduce(summed)
        total = summed.item()
    return Score(100 * total / len(references), None, len(references))


def generate_answers(learner: TextLearner, task: TextTask, split: Split = "test") -> list[str]:
    """Return what the network answers to each row of a split of a task, which need not be one of the stream."""
    return [answer for _, answer in sorted(_generate_by_row(learner, task, split, sharded=False))]


def _generate_by_row(learner: TextLearner, task: TextTask, split: Split, *, sharded: bool) -> Iterator[tuple[int, str]]:
    """Return rows of a split, all or this process's share, each with its answer; the shortest prompts first."""
    task_index = next((index for index, other in enumerate(learner.stream.tasks) if other is task), NO_TASK)
    encoded = (
        learner.encode_pairs(task.split(split)) if task_index == NO_TASK else learner.encoded_split(task_index, split)
    )
    order = encoded.attention_mask.sum(1).argsort(stable=True)
    with learner.evaluation_mode(), torch.no_grad():
        for rows in (processes.local_shard(order) if sharded else order).split(learner.budget.eval_batch_size):
            prompts, answers = ([read(row) for row in rows.tolist()] for read in (encoded.prompt, encoded.answer))
            batch = pad_batch(prompts, answers, learner.pad_token_id)
            batch |= {"tasks": torch.full_like(rows, task_index), "rows": rows}
            inputs = {name: value.to(learner.device) for name, value in batch.items()}
            token_ids = learner.network.generate(inputs, learner.budget.target_length)
            yield from zip(rows.tolist(), learner.decode_answers(token_ids), strict=True)
