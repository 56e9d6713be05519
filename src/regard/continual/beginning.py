"""Where a new block begins: at nothing, or at what an earlier block knows that helps most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regard.continual.pooled import PoolNetwork

if TYPE_CHECKING:
    from regard.continual.learner import Learner


def losses(learner: Learner, task: int, blocks: list[int], rows: int) -> dict[int, float]:
    """The mean loss of at most so many training rows of a task under each of some blocks alone; nothing is trained."""
    network = learner.network
    assert isinstance(network, PoolNetwork)
    items, found = learner.sampled(task, "train", rows), dict[int, float]()
    for block in blocks:
        total, count = 0.0, 0
        with learner.evaluating() as shown, torch.no_grad(), network.forcing(block):
            for batch in learner.each(items):
                total += float(learner.cross_entropy(shown(batch), batch))
                count += len(batch["labels"])
        found[block] = total / count
    return found


@torch.no_grad()
def begin_with_best(learner: Learner, task: int, block: int, rows: int) -> int | None:
    """Let a new block begin as a copy of the earlier one under which the task's rows lose least.

    The number of that block; None where the new one, which adds nothing yet, is better than all of them. Blocks learn
    from tasks alike in this way, which the weights alone do not see to once the gate is open.
    """
    network = learner.network
    assert isinstance(network, PoolNetwork)
    found = losses(learner, task, [*range(block), block], rows)
    best = min(found, key=lambda one: (found[one], -one))
    if best == block:
        return None
    pairs = zip(network.pool.parameters_of(block), network.pool.parameters_of(best), strict=True)
    for new, old in pairs:
        new.copy_(old)
    return best
