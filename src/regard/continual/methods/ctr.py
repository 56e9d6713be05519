"""CTR: plug-ins in a frozen encoder, which share what similar tasks know and keep what each has of its own."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.methods.ctr_network import CtrNetwork, compensate, slope_at
from regard.continual.training_phase import (
    Batches,
    MethodLearningRate,
    TrainingBudget,
    TrainingPhase,
    probing_rate,
    setting_rate,
)
from regard.training.placement import Rows


@dataclass(frozen=True, kw_only=True)
class CtrConfig(method.MethodConfig):
    """Settings of CTR.

    Args:
        adapter_size: Neurons of a task-specific module.
        capsule_size: Dimensions of a capsule; `capsule_hidden_size`: of the layer before it.
        num_filters: Filters of each convolution width.
        max_slope: Largest s of the masks σ(s·e).
        sparsity_weight: Weight of the share of free neurons that a task takes (c of HAT).
        learning_rate: Used in place of the budget's, which is meant for encoders; 0 for the budget's probing rate.
    """

    adapter_size: method.PositiveInt = 2000
    capsule_size: method.PositiveInt = 3
    capsule_hidden_size: method.PositiveInt = 100
    num_transfer_capsules: method.PositiveInt = 3
    num_filters: method.PositiveInt = 100
    max_slope: Annotated[float, method.Range(1)] = 140.0
    sparsity_weight: method.NonNegative = 0.75
    learning_rate: method.NonNegative = 1e-3


class Ctr(method.Method):
    """Capsules and transfer routing in a frozen encoder (arXiv 2112.02706), with the masks of HAT (arXiv 1801.01423).

    Behind the attention and the feed-forward part of each layer stands a `ctr_network.Plugin`. It routes capsules of
    similar tasks to the task at hand, and has neurons that each task opens or closes, by masks σ(s·e_t) with s growing
    through each epoch; what earlier tasks use of these is held. The task of a text must be known.

    Simplified: weights are held by what a forward uses of them, not by gradients set to zero, which decay and Adam's
    moments would undo; what is shared (capsules of earlier tasks, routing, the widening layer) is not held; one router
    decision a task and one similarity a transfer capsule; the router is drawn in training and decides for itself at
    test, and the task's own capsule is always let in; capsules are squashed once.
    """

    allows_label_head = False
    Config = CtrConfig
    Network = CtrNetwork
    incremental = False
    restores_other_classes = True

    def before_task(self, learner: Learner, task: int) -> None:
        tensors = self.state.tensors
        names = [_mask_names(index) for index in range(len(tensors) // 2)]
        self.used = [[tensors[name].to(learner.device) for name in pair] for pair in names]
        learner.network_as(CtrNetwork).begin_task(task, self.used)

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate:
        return setting_rate(self.config.learning_rate) if self.config.learning_rate else probing_rate(budget)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        correct = partial(self._transform_gradients, learner, task, self._per_epoch(learner, task))
        rate = self.own_learning_rate(learner.budget).value
        return (learner.fine_tuning_phase(name="plug-ins", learning_rate=rate, transform_gradients=correct),)

    def _per_epoch(self, learner: Learner, task: int) -> int:
        return -(-len(learner.items(task)) // learner.budget.batch_size)

    def _transform_gradients(self, learner: Learner, task: int, per_epoch: int, network: nn.Module, step: int) -> None:
        """Free the gradient of the task's embeddings from how steep its masks are at the step."""
        slope = slope_at(step, per_epoch, self.config.max_slope)
        for plugin in learner.network_as(CtrNetwork).typed_plugins:
            for embeddings in plugin.specific.tasks:
                compensate(cast(nn.ParameterList, embeddings)[task], slope, self.config.max_slope)

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        """Return the task's batches, with the step's `slope` (row,) and Gumbel `noise` (row, plug-in, task, 2)."""
        task_batches, per_epoch = super().batches(learner, task, phase), self._per_epoch(learner, task)
        shape = (task_batches.size, len(learner.network_as(CtrNetwork).typed_plugins), task + 1, 2)
        seed = learner.seed_for("noise", task, phase.name)

        def rows(step: int) -> Rows:
            slope = slope_at(step, per_epoch, self.config.max_slope)
            noise = np.random.default_rng([seed, step]).gumbel(size=shape).astype(np.float32)
            columns = {"slope": torch.full((task_batches.size,), slope), "noise": torch.from_numpy(noise)}
            return task_batches.rows(step) | columns

        return Batches(task_batches.steps, task_batches.size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        loss = super().loss(learner, network, rows)
        if "slope" not in rows or not self.config.sparsity_weight:
            return loss
        num_rows = (rows["labels"] != IGNORE_INDEX).sum()
        return loss + num_rows * self.config.sparsity_weight * self._capacity_used(learner, float(rows["slope"][0]))

    def _capacity_used(self, learner: Learner, slope: float) -> Tensor:
        """Return Σ m (1 − u) / Σ (1 − u) over all neurons, of which earlier tasks use u (HAT's regularizer)."""
        masks = [plugin.specific.masks(learner.task, slope) for plugin in learner.network_as(CtrNetwork).typed_plugins]
        masks_now = torch.cat([mask for pair in masks for mask in pair])
        used = [mask for pair in self.used for mask in pair]
        free = 1 - torch.cat(used) if used else torch.ones_like(masks_now)
        return (masks_now * free).sum() / free.sum().clamp_min(1)

    @torch.no_grad()
    def after_task(self, learner: Learner, task: int) -> None:
        network = learner.network_as(CtrNetwork)
        network.release()
        for index, masks in enumerate(network.masks(task)):
            for name, mask in zip(_mask_names(index), masks, strict=True):
                now = mask.cpu()
                self.state.tensors[name] = torch.maximum(self.state.tensors.get(name, now), now)


def _mask_names(plugin: int) -> tuple[str, str]:
    return f"{plugin}.first", f"{plugin}.second"
