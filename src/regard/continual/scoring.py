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


def score_task(learner: Learner, task: int, *, learnt: int, split: Split = "test") -> Score:
    """The accuracies, in per cent, on a split of a task, when `learnt` tasks have been learnt.

    TIL: the highest logit among the task's own classes. CIL: among those of the first `learnt` tasks. Every process
    classifies its share and is told the whole. Of tasks from text to text see `score_text`.
    """
    if isinstance(learner, TextLearner):
        return score_text(learner, cast(TextTask, learner.stream.tasks[task]), split=split)
    part = learner.encoded[task, split]
    order = part.attention_mask.sum(1).argsort(stable=True).tolist()
    mine = [ExampleRef(task, row) for row in order[_rank() :: _processes()]]
    own, seen = learner.task_classes[task], learner.seen_classes(max(learnt, 1) - 1)
    right = torch.zeros(2, device=learner.device)
    with learner.evaluation_mode() as network, torch.no_grad():
        for rows in learner.iterate_batches(mine, split):
            logits = network(rows).float()
            for number, among in enumerate((own, seen)):
                told = logits.masked_fill(~among.to(logits.device), -torch.inf).argmax(-1)
                right[number] += (told == rows["labels"]).sum()
    if _processes() > 1:
        dist.all_reduce(right)
    til, cil = (100 * right / len(part)).tolist()
    return Score(til, cil, len(part))


def score_text(learner: Learner, task: TextTask, *, split: Split = "test") -> Score:
    """The mean grade of the answers to a split of a task from text to text, 0 to 100, by the task's metric.

    The task need not be one of the stream: so it is said how a network does on tasks that it has never seen. Raises
    UserError where the run is one over tasks of classification.
    """
    if not isinstance(learner, TextLearner):
        raise UserError(
            f"task: expected a run over tasks from text to text, {learner.stream.name} is of classification"
        )
    mean, many = score_generation(learner, task, split)
    return Score(mean, None, many)


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
