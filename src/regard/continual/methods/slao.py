"""SLAO: one LoRA adapter, into which what each task has learnt is merged."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora import LoraMethod
from regard.continual.network import as_float32

TUNED, MERGED = 0, 1
"""The block that is trained, and the one that answers."""


class SlaoNetwork(PoolNetwork):
    """A model with two adapters: it computes with the `TUNED` one in training, the `MERGED` one in evaluation."""

    def count_adapters(self, tasks: int) -> int:
        return 2

    def start_adapter(self, adapter: int) -> None:
        """Train the adapter that is to be tuned, whatever the task; both are in use."""
        self.pool.set_trainable(TUNED)
        self.count.fill_(2)

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return all of one adapter, (adapter,): of the tuned one in training, of the merged one in evaluation."""
        if self.training:
            return torch.ones(1, device=self.count.device)
        return torch.tensor([0.0, 1.0], device=self.count.device)

    @torch.no_grad()
    def orthonormalize_down(self) -> None:
        for blocks in self.pool.adapters:
            blocks.A[TUNED].copy_(orthonormalize(blocks.A[TUNED]))

    @torch.no_grad()
    def merge(self, share: float) -> None:
        """Let the merged adapter's A be the tuned one's, and its B go that share of the way to the tuned one's."""
        for blocks in self.pool.adapters:
            blocks.A[MERGED].copy_(blocks.A[TUNED])
            blocks.B[MERGED].lerp_(blocks.B[TUNED], share)


class Slao(LoraMethod):
    """SLAO, continual merging into a single LoRA (arXiv 2512.23017).

    Task i begins from the B of task i − 1, and an orthonormal basis of its A, Qᵀ of Aᵀ = Q R. What it is tuned to is
    merged: A takes the place of the merged A, and B_merged ← B_merged + λ(i) (B_i − B_merged) with λ(i) = 1/√i.
    """

    Network = SlaoNetwork

    def before_task(self, learner: Learner, task: int) -> None:
        super().before_task(learner, task)
        if task:
            learner.network_as(SlaoNetwork).orthonormalize_down()

    def after_task(self, learner: Learner, task: int) -> None:
        learner.network_as(SlaoNetwork).merge(1 / math.sqrt(task + 1))


def orthonormalize(matrix: Tensor) -> Tensor:
    """Return orthonormal rows (rank, inputs) that span what those of a matrix do: Qᵀ of its transpose's Q R.

    R's diagonal has no negative number: a row with the other sign would turn around what the adapter adds, whose B
    stays.
    """
    basis, triangle = torch.linalg.qr(as_float32(matrix).T)
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(basis)
    return (basis * signs).T.to(matrix.dtype)
