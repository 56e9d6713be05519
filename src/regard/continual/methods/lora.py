"""Methods over LoRA adapters: baselines, penalties (O-LoRA, N-LoRA), merging (SLAO), masked gradients (MIGU)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.adapters.lora_pool import LoraAdapterPool
from regard.continual import method
from regard.continual.adapter_network import AllLinearConfig, LoraConfig, PoolNetwork, capture_layer_inputs
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import replay
from regard.continual.network import as_float32
from regard.continual.training_phase import Batches, TrainingPhase
from regard.errors import UserError
from regard.training.placement import Rows


class LoraMethod(Method):
    """A method that trains the low-rank adapter of the task at hand."""

    Config = LoraConfig
    Network = PoolNetwork
    supports_text = True
    trains_adapters = True

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
class ReplayLoraConfig(replay.ReplayConfig, AllLinearConfig):
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
    short sequences; in their script for the long one λ₁ is 5 for six of the tasks, and λ₂ 0.1 or 0.3 for seven.
    """

    Config = OLoraConfig

    def penalties(self, learner: Learner) -> Iterator[Tensor]:
        config, pool = self.config, learner.network_as(PoolNetwork).pool
        if learner.task and config.orthogonality_weight:
            yield config.orthogonality_weight * overlap_penalty(pool, learner.task, squared=config.squared_overlap)
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
        sparsity_weight: λ, by default with about the gradient norm of the authors' penalty, in MiniLM at rank 8.
        penalized_product: "update" for B A, the adapter's update, or "released" for A B, as in the authors' code, which
            needs layers with as many outputs as inputs, with λ from 0.4 to 1.8 for T5-large.
    """

    sparsity_weight: method.NonNegative = 1e-2
    penalized_product: PenalizedProduct = "update"


class NLora(IncrementalLora):
    """Non-collision LoRA (arXiv 2410.10179): incremental LoRA and λ Σ_layers ‖B_t A_t‖₁ beside the loss.

    The fewer weights each adapter changes, the fewer collide, and updates that never collide are orthogonal. α / rank
    is left out of the norm.
    """

    Config = NLoraConfig

    def check_run(self, learner: Learner) -> None:
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


TUNED, MERGED = 0, 1
"""The block that is trained, and the one that answers."""


class SlaoNetwork(PoolNetwork):
    """A model with two adapters: it computes with the `TUNED` one in training, the `MERGED` one in evaluation."""

    def count_adapters(self, tasks: int) -> int:
        return 2

    def start_adapter(self, adapter: int) -> None:
        self.pool.set_trainable(TUNED)
        self.count.fill_(2)

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        if self.training:
            return torch.ones(1, device=self.count.device)
        return torch.tensor([0.0, 1.0], device=self.count.device)

    def kept_tensors(self) -> list[Tensor]:
        """Return the B of the adapter that is trained, from which the next task begins; its A is the merged one."""
        return [blocks.B[TUNED] for blocks in self.pool.adapters]

    @torch.no_grad()
    def orthonormalize_down(self) -> None:
        for blocks in self.pool.adapters:
            blocks.A[TUNED].copy_(orthonormalize(blocks.A[TUNED]))

    @torch.no_grad()
    def merge(self, share: float) -> None:
        for blocks in self.pool.adapters:
            blocks.A[MERGED].copy_(blocks.A[TUNED])
            blocks.B[MERGED].lerp_(blocks.B[TUNED], share)


class Slao(LoraMethod):
    """SLAO, continual merging into a single LoRA (arXiv 2512.23017).

    Task i begins from the B of task i − 1, and an orthonormal basis of its A, Qᵀ of Aᵀ = Q R. What it is tuned to is
    merged: A takes the place of the merged A, and B_merged ← B_merged + λ(i) (B_i − B_merged) with λ(i) = 1/√i.
    """

    Network = SlaoNetwork
    answers_as_trained = False

    def before_task(self, learner: Learner, task: int) -> None:
        super().before_task(learner, task)
        if task:
            learner.network_as(SlaoNetwork).orthonormalize_down()

    def after_task(self, learner: Learner, task: int) -> None:
        learner.network_as(SlaoNetwork).merge(1 / math.sqrt(task + 1))


def orthonormalize(matrix: Tensor) -> Tensor:
    """Return orthonormal rows (rank, inputs) that span what those of a matrix do: Qᵀ of its transpose's Q R.

    R's diagonal has no negative number: a row with the other sign would turn around what B, which stays, adds.
    """
    basis, triangle = torch.linalg.qr(as_float32(matrix).T)
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(basis)
    return (basis * signs).T.to(matrix.dtype)


@dataclass(frozen=True, kw_only=True)
class MiguConfig(LoraConfig):
    """Settings of MIGU: those of low-rank adapters, and `threshold`, the share of features left unchanged."""

    threshold: method.Fraction = 0.7


class Migu(SequentialLora):
    """Magnitude-based gradient updating (arXiv 2406.17245), of sequential LoRA.

    The magnitudes of a matrix W (A, and B, of each layer) are the means over a batch's tokens of |W x|. At each step
    the gradient of the rows of W whose magnitude is below the quantile `threshold` is set to zero; Adam may move these
    rows yet, by earlier gradients, as in the authors' code. That ranks the rows of B by W x + B A x, here it is by
    B A x alone. The first task is learnt without, since B begins at zero.
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
