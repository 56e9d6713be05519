"""What keeps the shared attention as it was for earlier tasks: targets, the distance from them, and stand-ins for rows.

The input embeddings are frozen, so a task's rows are to the attention what their query vectors are, and nothing else.
Vectors can be kept, or drawn from a density over them, in place of texts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def target_of(weights: Tensor) -> Tensor:
    """ā (block,): the mean weights (row, block) of a task's rows, each counting the same (arXiv 2401.08295, eq. 8)."""
    return weights.detach().double().mean(0).to(weights.dtype)


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """KL([ā, 0…0] ‖ a), the mean over rows (arXiv 2401.08295, equation 9).

    `target` (block,) is shorter than `scores` (row, block), the softmax of which is a, by the blocks that came since.
    """
    shares = torch.zeros_like(scores[0]).index_copy(0, torch.arange(len(target), device=scores.device), target)
    told = shares.clamp_min(torch.finfo(shares.dtype).tiny).log()
    return (shares * (told - scores.log_softmax(-1))).sum(-1).mean()


class Density(NamedTuple):
    """A normal density over query vectors: `mean` (width,), `directions` (kept, width), `spread` (width,).

    A draw is mean + directionsᵀ z + spread · z': the directions in which the vectors differ most, scaled by how much
    they do, and what is left in each feature by itself.
    """

    mean: Tensor
    directions: Tensor
    spread: Tensor

    @classmethod
    def of(cls, vectors: Tensor, directions: int) -> Density:
        """The density that fits vectors (row, width), of at least two rows, by their first two moments."""
        exact = vectors.detach().double()
        mean = exact.mean(0)
        apart = exact - mean
        _, values, rows = torch.linalg.svd(apart, full_matrices=False)
        kept = min(directions, max(len(vectors) - 1, 0))
        scaled = rows[:kept] * (values[:kept, None] / max(len(vectors) - 1, 1) ** 0.5)
        left = apart.square().sum(0) / max(len(vectors) - 1, 1) - scaled.square().sum(0)
        return cls(*(one.to(vectors.dtype).contiguous() for one in (mean, scaled, left.clamp_min(0).sqrt())))

    def draw(self, rows: int, seed: int) -> Tensor:
        """So many vectors (row, width)."""
        random = torch.Generator().manual_seed(seed)
        first = torch.randn(rows, len(self.directions), generator=random).to(self.mean)
        second = torch.randn(rows, len(self.mean), generator=random).to(self.mean)
        return self.mean + first @ self.directions + second * self.spread
