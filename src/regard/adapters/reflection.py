"""Reflection: keeping the routing of earlier tasks with target weights, their divergence, and stored query vectors.

Input embeddings are frozen, so the shared attention reads nothing of a row but its query vector. Vectors, or samples
of a density over them, can stand in for texts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import UserError


def mean_weights(weights: Tensor) -> Tensor:
    """Return ā (adapter,), the mean of weights (row, adapter) over the rows of a task (arXiv 2401.08295, eq. 8)."""
    return weights.detach().double().mean(0).to(weights.dtype)


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """Return the mean over rows of KL([ā, 0…0] ‖ softmax(scores)), ā being an earlier task's weights (2401.08295)."""
    if not len(scores):
        raise UserError("vectors: expected at least one for each earlier task, got none")
    return row_divergences(pad_target(target, scores.shape[1]), scores).mean()


def row_divergences(targets: Tensor, scores: Tensor) -> Tensor:
    """Return KL(target ‖ softmax(scores)) of each row (row,); targets are (row, adapter) or (adapter,)."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    targets = targets.to(wide)
    log_targets = targets.clamp_min(torch.finfo(targets.dtype).tiny).log()
    return (targets * (log_targets - wide.log_softmax(-1))).sum(-1)


def pad_target(target: Tensor, adapters: int) -> Tensor:
    """Return ā with zeros for the adapters that came after its task, (adapters,)."""
    if len(target) > adapters:
        raise UserError(
            f"target: expected weights of at most the {adapters} adapters that there are, got {len(target)}; "
            "`without` takes an adapter that was removed out of what is kept"
        )
    return nn.functional.pad(target, (0, adapters - len(target)))


def without(target: Tensor, block: int) -> Tensor:
    """Return ā (adapter,) without the adapter at an index, normalized; unchanged if the adapter came after the task."""
    if block >= len(target):
        return target
    remaining = torch.cat([target[:block], target[block + 1 :]])
    if not float(remaining.sum()):
        raise UserError(
            f"target: expected weight on adapters other than {block}, which was removed; keep no target of its task"
        )
    return remaining / remaining.sum()


class Density(NamedTuple):
    """A normal density over query vectors, whose samples are mean + directionsᵀ z + spread · z'.

    `directions` (direction, width) are the principal ones times their standard deviations, `spread` (width,) is the
    residual deviation of each feature.
    """

    mean: Tensor
    directions: Tensor
    spread: Tensor

    @classmethod
    def of(cls, vectors: Tensor, directions: int) -> Density:
        """Fit a density to the first two moments of at least two vectors (row, width)."""
        if len(vectors) < 2:
            raise UserError(f"density: expected at least two rows of a task, got {len(vectors)}")
        rows = vectors.detach().double()
        mean = rows.mean(0)
        centered = rows - mean
        _, values, components = torch.linalg.svd(centered, full_matrices=False)
        count, degrees = min(directions, len(vectors) - 1), len(vectors) - 1
        scaled = components[:count] * (values[:count, None] / degrees**0.5)
        residual = centered.square().sum(0) / degrees - scaled.square().sum(0)
        return cls(*(tensor.to(vectors.dtype).contiguous() for tensor in (mean, scaled, residual.clamp_min(0).sqrt())))

    def draw(self, rows: int, seed: int) -> Tensor:
        """Sample vectors (row, width)."""
        generator = torch.Generator().manual_seed(seed)
        coefficients = torch.randn(rows, len(self.directions), generator=generator).to(self.mean)
        noise = torch.randn(rows, len(self.mean), generator=generator).to(self.mean)
        return self.mean + coefficients @ self.directions + noise * self.spread


def sample_rows(vectors: Tensor, max_rows: int, random: torch.Generator) -> Tensor:
    """Return a copy of at most so many of the vectors, in their order."""
    indices = torch.randperm(len(vectors), generator=random)[:max_rows].sort().values
    return vectors[indices.to(vectors.device)].clone()
