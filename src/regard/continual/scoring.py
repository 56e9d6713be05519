"""How many test rows of a task are classified right, or how well they are answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from regard.continual.batches import ExampleRef
from regard.continual.generation import score_generation
from regard.continual.learner import Learner
from regard.continual.text_learner import TextLearner
from regard.data.stream import Split, TextTask
from regard.errors import UserError


@dataclass(frozen=True)
class Score:
    """Rows classified right: among the task's own classes (TIL), and among all classes seen so far (CIL).

    Of a task from text to text `til` is the mean grade of the answers, and there is no `cil`: a network is never told
    which task a prompt is of but by the prompt.
    """

    til: float
    cil: float | None
    n: int


def score_task(learner: Learner, task: int, *, tasks_trained: int, split: Split = "test") -> Score:
    """Score a split of a task after `tasks_trained` tasks, in per cent.

    TIL: the highest logit among the task's classes. CIL: among those of the tasks trained so far. Every process
    classifies its shard and gets the total. See `score_text` for text-to-text tasks.
    """
    if isinstance(learner, TextLearner):
        return score_text(learner, cast(TextTask, learner.stream.tasks[task]), split=split)
    encoded = learner.encoded[task, split]
    order = encoded.attention_mask.sum(1).argsort(stable=True).tolist()
    local_examples = [ExampleRef(task, row) for row in order[_rank() :: _world_size()]]
    task_classes, seen_classes = learner.task_classes[task], learner.seen_classes(max(tasks_trained, 1) - 1)
    num_correct = torch.zeros(2, device=learner.device)
    with learner.evaluation_mode() as network, torch.no_grad():
        for rows in learner.iterate_batches(local_examples, split):
            logits = network(rows).float()
            for index, classes in enumerate((task_classes, seen_classes)):
                predictions = logits.masked_fill(~classes.to(logits.device), -torch.inf).argmax(-1)
                num_correct[index] += (predictions == rows["labels"]).sum()
    if _world_size() > 1:
        dist.all_reduce(num_correct)
    til, cil = (100 * num_correct / len(encoded)).tolist()
    return Score(til, cil, len(encoded))


def score_text(learner: Learner, task: TextTask, *, split: Split = "test") -> Score:
    """Return the mean grade of the answers to a split of a task from text to text, 0 to 100, by the task's metric.

    The task need not be one of the stream: so it is said how a network does on tasks that it has never seen. Raises
    UserError where the run is one over tasks of classification.
    """
    if not isinstance(learner, TextLearner):
        raise UserError(
            f"task: expected a run over tasks from text to text, {learner.stream.name} is of classification"
        )
    mean, num_rows = score_generation(learner, task, split)
    return Score(mean, None, num_rows)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
