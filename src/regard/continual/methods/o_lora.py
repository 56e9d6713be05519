"""O-LoRA: each task's adapter is learnt in a subspace orthogonal to those of earlier adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.adapters.lora_pool import LoraAdapterPool
from regard.continual import method
from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora_baselines import IncrementalLora


@dataclass(frozen=True, kw_only=True)
class OLoraConfig(LoraConfig):
    """Settings of O-LoRA: those of low-rank adapters, and of the penalties.

    Args:
        orthogonality_weight: λ₁, of the overlap with earlier adapters.
        norm_weight: λ₂, of the norms of the new adapter.
        squared_overlap: Penalize the squares of the overlaps, as in the paper's equation, in place of their absolute
            values, as in the code behind its numbers.
    """

    orthogonality_weight: method.NonNegative = 0.5
    norm_weight: method.NonNegative = 0.0
    squared_overlap: bool = False


class OLora(IncrementalLora):
    """Orthogonal LoRA (arXiv 2310.14152): incremental LoRA and λ₁ Σ_layers Σ_{i<t} Σ_jk |A_i A_tᵀ|_jk beside the loss.

    The rows of A span what an adapter reads; where those of the new adapter are orthogonal to all earlier ones, the
    adapters read different parts of a layer's input. Earlier adapters are frozen. With λ₂ the Frobenius norms of the
    new A and B are added. λ₁ = 0.5 and λ₂ = 0 are the authors' for T5-large and short sequences, at a learning rate of
    1e-3 and rank 8; in their script for the long one λ₁ is 5 for six of the tasks, and λ₂ 0.1 or 0.3 for seven.
    """

    Config = OLoraConfig

    def penalties(self, learner: Learner) -> Iterator[Tensor]:
        config, pool = self.config, learner.network_as(PoolNetwork).pool
        if learner.task and config.orthogonality_weight:
            overlap_sum = overlap_penalty(pool, learner.task, squared=config.squared_overlap)
            yield config.orthogonality_weight * overlap_sum
        if config.norm_weight:
            yield config.norm_weight * torch.stack([part.norm() for part in pool.parameters_of(learner.task)]).sum()


def overlap_penalty(pool: LoraAdapterPool, adapter: int, *, squared: bool = False) -> Tensor:
    """Return Σ |A_i A_blockᵀ| over entries, layers and adapters i before this one; or of the squares."""
    overlaps = []
    for layer_adapters in pool.adapters:
        inner = torch.cat([layer_adapters.A[earlier] for earlier in range(adapter)]) @ layer_adapters.A[adapter].T
        overlaps.append(inner.square().sum() if squared else inner.abs().sum())
    return torch.stack(overlaps).sum()
