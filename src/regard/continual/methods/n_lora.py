"""N-LoRA: each task's adapter is kept sparse, so that adapters seldom change the same weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regard.adapters.lora_pool import LoraAdapterPool
from regard.continual import method
from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.methods.incremental_lora import IncrementalLora
from regard.errors import UserError
from regard.training.placement import Rows

PenalizedProduct = Literal["update", "released"]


@dataclass(frozen=True, kw_only=True)
class NLoraConfig(LoraConfig):
    """Settings of N-LoRA: those of low-rank adapters, and of the penalty.

    Args:
        sparsity_weight: λ. The default of `update` gives at first about the gradient norm of the authors' penalty, in
            MiniLM at rank 8.
        penalized_product: "update" for B A, the adapter's update, or "released" for A B, as in the authors' code: a
            matrix of rank × rank, which needs layers with as many outputs as inputs. The authors' λ belongs to it: 0.4
            for short sequences with T5-large, up to 1.8 for long ones.
    """

    sparsity_weight: method.NonNegative = 1e-2
    penalized_product: PenalizedProduct = "update"


class NLora(IncrementalLora):
    """Non-collision LoRA (arXiv 2410.10179): incremental LoRA and λ Σ_layers ‖B_t A_t‖₁ beside the loss.

    Two adapters collide at a weight that both change. The fewer weights each changes, the fewer collide, and updates
    that never collide are orthogonal. Earlier adapters are frozen and added. α / rank is left out of the norm.
    """

    Config = NLoraConfig

    def before_task(self, learner: Learner, task: int) -> None:
        """Add the task's adapter. Raises UserError where the product cannot be formed."""
        super().before_task(learner, task)
        non_square = [
            name
            for name, layer in learner.network_as(PoolNetwork).pool.layers.items()
            if layer.adapters.inputs != layer.adapters.outputs
        ]
        if non_square and self.config.penalized_product == "released":
            raise UserError(
                "penalized_product: expected update, since "
                f"{non_square[0]} gives another number of features than it reads"
            )

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        """Return the sum of the cross-entropies, and the penalty for each that counts: once, in the mean of a batch."""
        loss = learner.cross_entropy(network(rows), rows)
        if not self.config.sparsity_weight:
            return loss
        with torch.autocast(loss.device.type, enabled=False):
            pool, released = learner.network_as(PoolNetwork).pool, self.config.penalized_product == "released"
            size = l1_norm(pool, learner.task, released=released)
            return loss + (rows["labels"] != IGNORE_INDEX).sum() * (self.config.sparsity_weight * size)


def l1_norm(pool: LoraAdapterPool, adapter: int, *, released: bool = False) -> Tensor:
    """‖B A‖₁ of an adapter, the sum over layers; of A B with `released`."""
    pairs = [(blocks.A[adapter], blocks.B[adapter]) for blocks in pool.adapters]
    return torch.stack([(down @ up if released else up @ down).abs().sum() for down, up in pairs]).sum()
