"""CTR: plug-ins in a frozen encoder, which share what similar tasks know and keep what each has of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.batches import Batches
from regard.continual.learner import IGNORED
from regard.continual.method import Method
from regard.continual.methods.ctr_layers import compensate, slope_at
from regard.continual.methods.ctr_network import CtrNetwork
from regard.continual.stage import MethodLearningRate, TrainingBudget, TrainingPhase, probing_rate, rate_from_setting
from regard.errors import check_int
from regard.models.heads import LinearHead

if TYPE_CHECKING:
    from regard.continual.learner import Learner
    from regard.training.placement import Rows


@dataclass(frozen=True, kw_only=True)
class Settings(method.Settings):
    """Sizes of the plug-ins, and how they are trained.

    `neurons`: of a task specific module. `capsule`: dimensions of one; `middle`: of the layer before it; `transfers`:
    how many transfer capsules; `filters`: of each width of convolution. `slope`: the largest s of the masks σ(s·e).
    `sparsity`: weight of the share of free neurons that a task takes (HAT's c). `rate`: the learning rate, in place
    of the budget's, which is meant for encoders; 0: that of the budget for probing, whose encoder is frozen as well.
    """

    neurons: int = 2000
    capsule: int = 3
    middle: int = 100
    transfers: int = 3
    filters: int = 100
    slope: float = 140.0
    sparsity: float = 0.75
    rate: float = 1e-3

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("neurons", "capsule", "middle", "transfers", "filters"):
            check_int(name, getattr(self, name), least=1)
        method.check_number("slope", self.slope, least=1)
        method.check_number("sparsity", self.sparsity, least=0)
        method.check_number("rate", self.rate, least=0)


class Ctr(Method):
    """Capsules and transfer routing in a frozen encoder (arXiv 2112.02706), with the masks of HAT (arXiv 1801.01423).

    Behind the attention and the feed-forward part of each layer stands a plug-in (`ctr_layers.Plugin`). Its knowledge
    sharing module routes capsules of all tasks so far to the task at hand, as far as they are similar. Its task
    specific module has neurons that each task opens or closes, by masks σ(s·e_t) with s growing through each epoch;
    what earlier tasks use of it is held, so that the module computes for them what it computed before. The head's
    vectors of other tasks' classes are left as they are.

    Which task a text is of must be known: classes of different tasks are not told apart.

    Simplified: weights are held by what a forward uses of them, in place of gradients that are set to zero, which decay
    and Adam's moments would undo; what is shared (capsules of earlier tasks, routing, the widening layer) is held by
    nothing, so that it is through these that a task is forgotten; one router decision a task and one
    similarity a transfer capsule; the router is drawn in training and decides for itself at test, and the task's own
    capsule is always let in; capsules are squashed once, without iterations.
    """

    Settings = Settings
    Network = CtrNetwork
    incremental = False

    def __init__(self, settings: method.Settings | None = None) -> None:
        super().__init__(settings)
        self.head_before = (torch.empty(0), torch.empty(0))
        self.used = list[list[Tensor]]()

    def before_task(self, learner: Learner, task: int) -> None:
        """Hold what earlier tasks use, and note the head's vectors."""
        network, head = learner.network_as(CtrNetwork), _head(learner)
        kept = self.state.tensors
        self.used = [[kept[name].to(learner.device) for name in _names(number)] for number in range(len(kept) // 2)]
        network.begin(task, self.used)
        self.head_before = (head.vectors.detach().clone(), head.bias.detach().clone())

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate:
        """What is set; where that is 0, that of probing."""
        return rate_from_setting(self.settings.rate) if self.settings.rate else probing_rate(budget)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        """The plug-ins and the head."""
        correct = partial(self._correct, learner, task, self._per_epoch(learner, task))
        rate = self.own_learning_rate(learner.budget).value
        return (learner.fine_tuning(name="plug-ins", learning_rate=rate, transform_gradients=correct),)

    def _per_epoch(self, learner: Learner, task: int) -> int:
        return -(-len(learner.items(task)) // learner.budget.batch_size)

    def _correct(self, learner: Learner, task: int, per_epoch: int, network: nn.Module, step: int) -> None:
        """Free the gradient of the task's embeddings from how steep its masks are at the step."""
        slope = slope_at(step, per_epoch, self.settings.slope)
        for plugin in learner.network_as(CtrNetwork).each:
            for embeddings in plugin.specific.tasks:
                compensate(cast(nn.ParameterList, embeddings)[task], slope, self.settings.slope)

    def batches(self, learner: Learner, task: int, stage: TrainingPhase) -> Batches:
        """The task's batches, with the `slope` (row,) of the step, and Gumbel `noise` (row, plug-in, task, 2)."""
        plain, per_epoch = super().batches(learner, task, stage), self._per_epoch(learner, task)
        shape = (plain.size, len(learner.network_as(CtrNetwork).each), task + 1, 2)
        seed = learner.seed_for("noise", task, stage.name)

        def rows(step: int) -> Rows:
            slope = slope_at(step, per_epoch, self.settings.slope)
            noise = np.random.default_rng([seed, step]).gumbel(size=shape).astype(np.float32)
            return {**plain.rows(step), "slope": torch.full((plain.size,), slope), "noise": torch.from_numpy(noise)}

        return Batches(plain.steps, plain.size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        """The sum of the cross-entropies, and for each row the share of free neurons that the task takes."""
        found = super().loss(learner, network, rows)
        if "slope" not in rows or not self.settings.sparsity:
            return found
        counted = (rows["labels"] != IGNORED).sum()
        return found + counted * self.settings.sparsity * self._taken(learner, float(rows["slope"][0]))

    def _taken(self, learner: Learner, slope: float) -> Tensor:
        """Σ m (1 − u) / Σ (1 − u) over all neurons, u being how far earlier tasks use one (HAT's regulariser)."""
        masks = [plugin.specific.masks(learner.task, slope) for plugin in learner.network_as(CtrNetwork).each]
        now = torch.cat([one for both in masks for one in both])
        used = [one for both in self.used for one in both]
        free = 1 - torch.cat(used) if used else torch.ones_like(now)
        return (now * free).sum() / free.sum().clamp_min(1)

    @torch.no_grad()
    def after_task(self, learner: Learner, task: int) -> None:
        """Keep how far the tasks so far use each neuron; let go of what was held."""
        network, head = learner.network_as(CtrNetwork), _head(learner)
        network.settle()
        for number, masks in enumerate(network.masks(task)):
            for name, mask in zip(_names(number), masks, strict=True):
                now = mask.cpu()
                self.state.tensors[name] = torch.maximum(self.state.tensors.get(name, now), now)
        others = ~learner.own[task].to(head.vectors.device)
        for value, before in zip((head.vectors, head.bias), self.head_before, strict=True):
            value[others] = before[others]


def _head(learner: Learner) -> LinearHead:
    return cast(LinearHead, learner.network.classifier.head)


def _names(plugin: int) -> tuple[str, str]:
    """What the masks of a plug-in are kept as."""
    return f"{plugin}.first", f"{plugin}.second"
