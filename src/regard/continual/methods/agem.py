"""Averaged gradient episodic memory: no step that would make the memory's loss grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from regard.continual import memory
from regard.continual.learner import Learner
from regard.continual.training_phase import TrainingPhase
from regard.training.placement import isolated_rng, seed_step


@dataclass(frozen=True, kw_only=True)
class AGemConfig(memory.MemoryConfig):
    """Settings of A-GEM: those of a memory, which is balanced as in the paper."""

    storage_policy: memory.StoragePolicy = "balanced"


class AGem(memory.MemoryMethod):
    """A-GEM (arXiv 1812.00420, equation 11): a gradient that points against the memory's is projected.

    The memory's gradient r is that of the mean loss of a batch drawn from it, new at each step, with respect to what
    the step trains; g becomes g − (g·r / r·r) r where g·r < 0. It is taken in training mode, with dropout. Adam's step
    is made of what is left, and is not itself orthogonal to r.
    """

    Config = AGemConfig
    supports_text = True

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        if not self.state.examples:
            return (learner.fine_tuning_phase(),)
        return (learner.fine_tuning_phase(transform_gradients=partial(self._transform_gradients, learner)),)

    def _transform_gradients(self, learner: Learner, network: nn.Module, step: int) -> None:
        """Project the network's gradient of a step in place."""
        parameters = [parameter for parameter in network.parameters() if parameter.grad is not None]
        reference = self._reference(learner, network, parameters, step)
        project_gradient([parameter.grad for parameter in parameters if parameter.grad is not None], reference)

    def _reference(
        self, learner: Learner, network: nn.Module, parameters: Sequence[nn.Parameter], step: int
    ) -> list[Tensor]:
        """Return the gradient of the mean loss of the memory's batch of a step: the same in every process."""
        seed, count = learner.seed_for("replay", learner.task), memory.replay_batch_size(learner, self.config)
        items = memory.sample_memory(self.state.examples, count, seed=seed, step=step)
        reference = [torch.zeros_like(parameter) for parameter in parameters]
        autocast = learner.budget.precision == "bfloat16"
        with isolated_rng(learner.device):
            seed_step(learner.device, seed, step, 0)
            for rows in learner.iterate_batches(items, size=learner.budget.micro_batch_size or len(items)):
                with torch.autocast(learner.device.type, torch.bfloat16, enabled=autocast):
                    loss = learner.cross_entropy(network(rows), rows) / len(items)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for total, gradient in zip(reference, gradients, strict=True):
                    if gradient is not None:
                        total += gradient
        return reference


@torch.no_grad()
def project_gradient(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Take out of a gradient, in place, its part along a reference that it points against (arXiv 1812.00420, eq. 11).

    Both are one vector in the same pieces.
    """
    dot = sum(float((part * reference_part).sum()) for part, reference_part in zip(gradient, reference, strict=True))
    square = sum(float(part.square().sum()) for part in reference)
    if dot < 0 and square > 0:
        for part, reference_part in zip(gradient, reference, strict=True):
            part -= (dot / square) * reference_part
