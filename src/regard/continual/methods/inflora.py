"""InfLoRA: each task's adapter reads only what earlier tasks' inputs do not have, and so leaves these as they were."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.continual import method
from regard.continual.adapter_network import LoraConfig, PoolNetwork, capture_layer_inputs
from regard.continual.learner import Learner
from regard.continual.methods.lora import IncrementalLora
from regard.continual.network import as_float32
from regard.continual.training_phase import ExampleRef

ThresholdFormula = Literal["released", "paper"]
TAKEN, FREE = "taken/", "free/"
_NOTHING = 1e-12
"""The share of a layer's inputs below which a direction has none of them."""


@dataclass(frozen=True, kw_only=True)
class InfLoraConfig(LoraConfig):
    """Settings of InfLoRA: those of low-rank adapters, and of the stored subspace.

    Args:
        threshold: ε, the share of a task's inputs H that later adapters leave alone; it grows to 1 over the tasks.
        threshold_formula: "released" for shares of the squared singular values of H Hᵀ, as in the code, or "paper" for
            those of H, of which the same ε holds many more directions.
    """

    threshold: method.Fraction = 0.995
    threshold_formula: ThresholdFormula = "released"


class InputSubspace(NamedTuple):
    """Orthonormal directions (inputs, direction) that earlier tasks' inputs take up, or those left `free` if fewer."""

    basis: Tensor
    free: bool

    def complement_projection(self) -> Tensor:
        """(inputs, inputs): the projection on what no earlier task takes up."""
        projection = self.basis @ self.basis.T
        return projection if self.free else torch.eye(len(projection)).to(projection) - projection


class InfLora(IncrementalLora):
    """Interference-free LoRA (arXiv 2404.00228): a task's A is designed before it is trained, B alone is trained.

    The rows of A are the first singular vectors of the part of what a layer reads of the task's rows, H, that lies
    outside the memory of earlier tasks' inputs. So A x = 0 for an x within the memory. Rows have the norm that drawn
    ones have, 1/√3; where nothing more is left they are zero.

    After a task the directions of its H outside the memory are added, largest first, until the memory has the share ε +
    (1 − ε) t/T of H. DualGPM (Liang and Li, CVPR 2023) stores these, or those that are left once these are fewer.
    """

    Config = InfLoraConfig
    plans_ahead = True

    def before_task(self, learner: Learner, task: int) -> None:
        super().before_task(learner, task)
        self.state.to(learner.device)
        moments = self._moments(learner, task)
        for name, layer in learner.network_as(PoolNetwork).pool.layers.items():
            down = layer.adapters.A[task]
            down.requires_grad_(False)
            with torch.no_grad():
                down.copy_(design_down(moments[name], self.subspace(name), len(down)))

    def after_task(self, learner: Learner, task: int) -> None:
        fraction = self.config.threshold + (1 - self.config.threshold) * task / len(learner.stream)
        for name, moment in self._moments(learner, task).items():
            memory = grow_subspace(self.subspace(name), moment, fraction)
            self.state.tensors.pop(TAKEN + name, None)
            self.state.tensors[(FREE if memory.free else TAKEN) + name] = memory.basis

    def _moments(self, learner: Learner, task: int) -> dict[str, Tensor]:
        moments = compute_second_moments(learner, learner.items(task))
        return {name: apply_formula(moment, self.config.threshold_formula) for name, moment in moments.items()}

    def subspace(self, name: str) -> InputSubspace | None:
        """Return what earlier tasks take up of what a layer reads; None before there is one."""
        tensors = self.state.tensors
        if FREE + name in tensors:
            return InputSubspace(tensors[FREE + name], True)
        return InputSubspace(tensors[TAKEN + name], False) if TAKEN + name in tensors else None


@torch.no_grad()
def compute_second_moments(learner: Learner, items: Sequence[ExampleRef]) -> dict[str, Tensor]:
    """Return Σ x xᵀ (inputs, inputs), in float64, of what each layer reads of some rows, with nothing dropped out."""
    moments: dict[str, Tensor] = {}

    def add(name: str, states: Tensor) -> None:
        with torch.autocast(states.device.type, enabled=False):
            wide = as_float32(states)
            moment = (wide.T @ wide).double()
        moments[name] = moments[name] + moment if name in moments else moment

    with learner.evaluation_mode() as network:
        for rows in learner.iterate_batches(items):
            with capture_layer_inputs(learner.network_as(PoolNetwork), rows, add):
                network(rows)
    return moments


def apply_formula(moment: Tensor, measure: ThresholdFormula) -> Tensor:
    """Return what shares are taken of (inputs, inputs): Σ x xᵀ, or its square, in which large directions weigh more."""
    return moment @ moment if measure == "released" else moment


def decompose_outside(moment: Tensor, memory: InputSubspace | None) -> tuple[Tensor, Tensor]:
    """Return squares, largest first, and directions (inputs, direction) of Σ x xᵀ, or its square, outside a memory."""
    outside_moment = moment
    if memory is not None:
        projection = memory.complement_projection()
        outside_moment = projection @ moment @ projection
    squares, vectors = torch.linalg.eigh((outside_moment + outside_moment.T) / 2)
    squares, vectors = squares.flip(0), vectors.flip(1)
    significant = squares > _NOTHING * moment.trace()
    squares, vectors = squares[significant], vectors[:, significant]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) if len(squares) else vectors[:1]
    return squares, vectors * largest.sign()


def design_down(moment: Tensor, memory: InputSubspace | None, rank: int) -> Tensor:
    """A (rank, inputs) of an adapter that reads the largest part of a task's inputs outside the memory."""
    _, vectors = decompose_outside(moment, memory)
    rows = vectors[:, :rank].T / math.sqrt(3)
    return torch.cat([rows, moment.new_zeros(rank - len(rows), len(moment))])


def grow_subspace(memory: InputSubspace | None, moment: Tensor, fraction: float) -> InputSubspace:
    """Add the fewest directions with which the subspace holds a fraction of the squares of a task's inputs."""
    width = len(moment)
    basis = moment.new_zeros(width, 0) if memory is None else memory.basis
    squares, vectors = decompose_outside(moment, memory)
    total = moment.trace()
    held = 1 - squares.sum() / total + torch.cat([squares.new_zeros(1), squares.cumsum(0) / total])
    added = vectors[:, : min(int((held < fraction).sum()), len(squares))]
    if memory is not None and memory.free:
        return InputSubspace(_remove_directions(basis, added), True)
    basis = torch.cat([basis, added], 1)
    if basis.shape[1] <= width / 2:
        return InputSubspace(basis, False)
    complete, _ = torch.linalg.qr(basis, mode="complete")
    return InputSubspace(complete[:, basis.shape[1] :].contiguous(), True)


def _remove_directions(basis: Tensor, vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of what a basis spans but for some orthonormal vectors, all within it."""
    if not vectors.shape[1]:
        return basis
    left, _, _ = torch.linalg.svd(basis - vectors @ (vectors.T @ basis), full_matrices=False)
    return left[:, : basis.shape[1] - vectors.shape[1]].contiguous()
