"""How many test rows of a task are classified right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from regard.continual.batches import Item
from regard.continual.learner import Learner
from regard.data.stream import Split


@dataclass(frozen=True)
class Score:
    """Rows classified right: among the task's own classes (TIL), and among all classes seen so far (CIL)."""

    til: float
    cil: float
    n: int


def score(learner: Learner, task: int, *, learnt: int, split: Split = "test") -> Score:
    """The accuracies, in per cent, on a split of a task, when `learnt` tasks have been learnt.

    TIL: the highest logit among the task's own classes. CIL: among those of the first `learnt` tasks. Every process
    classifies its share and is told the whole.
    """
    part = learner.encoded[task, split]
    order = part.attention_mask.sum(1).argsort(stable=True).tolist()
    mine = [Item(task, row) for row in order[_rank() :: _processes()]]
    own, seen = learner.own[task], learner.seen_classes(max(learnt, 1) - 1)
    right = torch.zeros(2, device=learner.device)
    with learner.evaluating() as network, torch.no_grad():
        for rows in learner.each(mine, split):
            logits = network(rows).float()
            for number, among in enumerate((own, seen)):
                told = logits.masked_fill(~among.to(logits.device), -torch.inf).argmax(-1)
                right[number] += (told == rows["labels"]).sum()
    if _processes() > 1:
        dist.all_reduce(right)
    til, cil = (100 * right / len(part)).tolist()
    return Score(til, cil, len(part))


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
