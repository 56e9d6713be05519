"""LoRA adapters without anything against forgetting, with replay, and with penalties (O-LoRA, N-LoRA)."""

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
from regard.continual.method import Method
from regard.continual.methods import replay
from regard.errors import UserError


class LoraMethod(Method):
    """A method that trains the low-rank adapter of the task at hand."""

    Config = LoraConfig
    Network = PoolNetwork
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        learner.network_as(PoolNetwork).start_adapter(task)


class IncrementalLora(LoraMethod):
    """One adapter a task, all added with weight 1, earlier ones frozen: a baseline of O-LoRA and SAPT."""


class SharedAdapterNetwork(PoolNetwork):
    """A frozen model with one adapter, whatever the number of tasks."""

    def count_adapters(self, tasks: int) -> int:
        return 1

    def start_adapter(self, adapter: int) -> None:
        super().start_adapter(0)


class SequentialLora(LoraMethod):
    """One LoRA adapter (arXiv 2106.09685) trained on every task in turn: SeqLoRA of SAPT (arXiv 2401.08295)."""

    Network = SharedAdapterNetwork


@dataclass(frozen=True, kw_only=True)
class ReplayLoraConfig(replay.ReplayConfig, LoraConfig):
    """Settings of experience replay with a low-rank adapter."""


class ReplayLora(replay.Replay, LoraMethod):
    """Experience replay (arXiv 1902.10486) where one LoRA adapter is trained: a baseline of SAPT (arXiv 2401.08295)."""

    Config = ReplayLoraConfig
    Network = SharedAdapterNetwork


@dataclass(frozen=True, kw_only=True)
class OLoraConfig(LoraConfig):
    """Settings of O-LoRA: those of low-rank adapters, and of the penalties.

    Args:
        orthogonality_weight: λ₁, of the overlap with earlier adapters.
        norm_weight: λ₂, of the norms of the new adapter.
        squared_overlap: Penalize squared overlaps, as in the paper's equation, not absolute ones, as in its code.
    """

    orthogonality_weight: method.NonNegative = 0.5
    norm_weight: method.NonNegative = 0.0
    squared_overlap: bool = False


class OLora(IncrementalLora):
    """Orthogonal LoRA (arXiv 2310.14152): incremental LoRA and λ₁ Σ_layers Σ_{i<t} Σ_jk |A_i A_tᵀ|_jk beside the loss.

    With λ₂ the Frobenius norms of the new A and B are added. λ₁ = 0.5 and λ₂ = 0 are the authors' for T5-large and
    short sequences, at a learning rate of 1e-3 and rank 8; in their script for the long one λ₁ is 5 for six of the
    tasks, and λ₂ 0.1 or 0.3 for seven.
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


PenalizedProduct = Literal["update", "released"]


@dataclass(frozen=True, kw_only=True)
class NLoraConfig(LoraConfig):
    """Settings of N-LoRA: those of low-rank adapters, and of the penalty.

    Args:
        sparsity_weight: λ. The default gives at first about the gradient norm of the authors' penalty, in MiniLM at
            rank 8.
        penalized_product: "update" for B A, the adapter's update, or "released" for A B, as in the authors' code, which
            needs layers with as many outputs as inputs. The authors' λ belongs to it: 0.4 for short sequences with
            T5-large, up to 1.8 for long ones.
    """

    sparsity_weight: method.NonNegative = 1e-2
    penalized_product: PenalizedProduct = "update"


class NLora(IncrementalLora):
    """Non-collision LoRA (arXiv 2410.10179): incremental LoRA and λ Σ_layers ‖B_t A_t‖₁ beside the loss.

    The fewer weights each adapter changes, the fewer collide, and updates that never collide are orthogonal. α / rank
    is left out of the norm.
    """

    Config = NLoraConfig

    def before_task(self, learner: Learner, task: int) -> None:
        super().before_task(learner, task)
        layers = learner.network_as(PoolNetwork).pool.layers
        non_square = [name for name, layer in layers.items() if layer.adapters.inputs != layer.adapters.outputs]
        if non_square and self.config.penalized_product == "released":
            problem = f"{non_square[0]} gives another number of features than it reads"
            raise UserError(f"penalized_product: expected update, since {problem}")

    def penalties(self, learner: Learner) -> Iterator[Tensor]:
        if self.config.sparsity_weight:
            pool, released = learner.network_as(PoolNetwork).pool, self.config.penalized_product == "released"
            yield self.config.sparsity_weight * l1_norm(pool, learner.task, released=released)


def l1_norm(pool: LoraAdapterPool, adapter: int, *, released: bool = False) -> Tensor:
    """‖B A‖₁ of an adapter, the sum over layers; of A B with `released`."""
    pairs = [(blocks.A[adapter], blocks.B[adapter]) for blocks in pool.adapters]
    return torch.stack([(down @ up if released else up @ down).abs().sum() for down, up in pairs]).sum()
