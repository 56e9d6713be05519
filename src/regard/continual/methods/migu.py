"""MIGU: of an adapter only those features are learnt that answer the batch at hand most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.continual import method
from regard.continual.adapter_network import LoraConfig, PoolNetwork, capture_layer_inputs
from regard.continual.batches import Batches
from regard.continual.learner import Learner
from regard.continual.methods.lora import SequentialLora
from regard.continual.training_phase import TrainingPhase
from regard.training.placement import Rows


@dataclass(frozen=True, kw_only=True)
class MiguConfig(LoraConfig):
    """Settings of MIGU: those of low-rank adapters, and `threshold`, the share of features left unchanged."""

    threshold: method.Fraction = 0.7


class Migu(SequentialLora):
    """Magnitude-based gradient updating (arXiv 2406.17245), of sequential LoRA.

    The magnitudes of a matrix W (A, and B, of each layer) are the means over a batch's tokens of |W x|. At each step
    the gradient of the rows of W whose magnitude is below the quantile `threshold` is set to zero; Adam may move these
    rows yet, by earlier gradients, as in the authors' code. What is left of that of its LoRA ranks the rows of B by W x
    + B A x, and here it is by B A x alone. The first task is learnt without: B begins at zero, and so do its
    magnitudes.
    """

    Config = MiguConfig

    def __init__(self, config: method.MethodConfig | None = None) -> None:
        super().__init__(config)
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        transform = (lambda _, __: self._transform_gradients(learner)) if task else None
        return (learner.fine_tuning_phase(transform_gradients=transform),)

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        """Return the task's rows; with each batch magnitudes are added up anew."""
        task_batches = super().batches(learner, task, phase)

        def rows(step: int) -> Rows:
            self.sums.clear()
            return task_batches.rows(step)

        return Batches(task_batches.steps, task_batches.size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        if not learner.task:
            return super().loss(learner, network, rows)
        pool = learner.network_as(PoolNetwork).pool

        @torch.no_grad()
        def add(name: str, states: Tensor) -> None:
            adapters = pool.layers[name].adapters
            with torch.autocast(states.device.type, enabled=False):
                down, up = sum_magnitudes(states.to(adapters.A[0].dtype), adapters.A[0], adapters.B[0])
            if name in self.sums:
                down, up = self.sums[name][0] + down, self.sums[name][1] + up
            self.sums[name] = (down, up)

        with capture_layer_inputs(learner.network_as(PoolNetwork), rows, add):
            return super().loss(learner, network, rows)

    def _transform_gradients(self, learner: Learner) -> None:
        for name, layer in learner.network_as(PoolNetwork).pool.layers.items():
            for parameter, sums in zip((layer.adapters.A[0], layer.adapters.B[0]), self.sums[name], strict=True):
                if dist.is_initialized():
                    dist.all_reduce(sums)
                assert parameter.grad is not None
                parameter.grad *= mask_largest(sums, self.config.threshold)[:, None]


def sum_magnitudes(states: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ |A x| (rank,) and Σ |B A x| (outputs,) over tokens x, of states (token, inputs)."""
    hidden = states @ down.T
    return hidden.abs().sum(0), (hidden @ up.T).abs().sum(0)


def mask_largest(sums: Tensor, threshold: float) -> Tensor:
    """(feature,): whether a magnitude is at least the quantile; dividing all by one number changes nothing."""
    return sums >= torch.quantile(sums, threshold)
