"""Where a new block begins: at nothing, or at what an earlier block knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regard.continual.adapter_network import AdapterNetwork

if TYPE_CHECKING:
    from regard.continual.learner import Learner


def losses(learner: Learner, task: int, blocks: list[int], rows: int) -> dict[int, float]:
    """The mean loss of at most so many training rows of a task under each of some blocks alone; nothing is trained."""
    network = learner.network
    assert isinstance(network, AdapterNetwork)
    items, found = learner.sample_examples(task, "train", rows), dict[int, float]()
    for block in blocks:
        total, count = 0.0, 0
        with learner.loss_mode() as shown, torch.no_grad(), network.use_only(block):
            for batch in learner.iterate_batches(items):
                total += float(learner.cross_entropy(shown(batch), batch))
                count += len(batch["labels"])
        found[block] = total / count
    return found


def best_init(learner: Learner, task: int, block: int, rows: int) -> int | None:
    """The block before a new one under which at most so many of the task's rows lose least.

    None where the new one, which adds nothing yet, is better than all of them.
    """
    found = losses(learner, task, [*range(block), block], rows)
    best = min(found, key=lambda one: (found[one], -one))
    return None if best == block else best
