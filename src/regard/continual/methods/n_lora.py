"""N-LoRA: each task's adapter is kept sparse, so that adapters seldom change the same weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.adapters.lora_pool import LoraAdapterPool
from regard.continual import method
from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora_baselines import IncrementalLora
from regard.errors import UserError

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

    def penalties(self, learner: Learner) -> Iterator[Tensor]:
        if self.config.sparsity_weight:
            pool, released = learner.network_as(PoolNetwork).pool, self.config.penalized_product == "released"
            yield self.config.sparsity_weight * l1_norm(pool, learner.task, released=released)


def l1_norm(pool: LoraAdapterPool, adapter: int, *, released: bool = False) -> Tensor:
    """‖B A‖₁ of an adapter, the sum over layers; of A B with `released`."""
    pairs = [(blocks.A[adapter], blocks.B[adapter]) for blocks in pool.adapters]
    return torch.stack([(down @ up if released else up @ down).abs().sum() for down, up in pairs]).sum()
