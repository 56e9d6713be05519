"""Where a new adapter begins: at nothing, or at what an earlier adapter knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regard.continual.adapter_network import AdapterNetwork

if TYPE_CHECKING:
    from regard.continual.learner import Learner


def losses_by_adapter(learner: Learner, task: int, adapters: list[int], rows: int) -> dict[int, float]:
    """Return the mean loss of at most so many training rows of a task under each of some adapters alone.

    Nothing is trained.
    """
    network = learner.network
    assert isinstance(network, AdapterNetwork)
    items, losses = learner.sample_examples(task, "train", rows), dict[int, float]()
    for adapter in adapters:
        total, count = 0.0, 0
        with learner.loss_mode() as network_in_eval, torch.no_grad(), network.use_only(adapter):
            for batch in learner.iterate_batches(items):
                total += float(learner.cross_entropy(network_in_eval(batch), batch))
                count += len(batch["labels"])
        losses[adapter] = total / count
    return losses


def choose_initial_adapter(learner: Learner, task: int, adapter: int, rows: int) -> int | None:
    """Return the adapter before a new one under which at most so many of the task's rows lose least.

    None where the new one, which adds nothing yet, is better than all of them.
    """
    losses = losses_by_adapter(learner, task, [*range(adapter), adapter], rows)
    best = min(losses, key=lambda index: (losses[index], -index))
    return None if best == adapter else best
