"""What keeps the shared attention as it was for earlier tasks: targets, the distance from them, and stand-ins for rows.

The input embeddings are frozen, so a task's rows are to the attention what their query vectors are, and nothing else.
Vectors can be kept, or drawn from a density over them, in place of texts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import UserError


def mean_weights(weights: Tensor) -> Tensor:
    """ā (block,): the mean weights (row, block) of a task's rows, each counting the same (arXiv 2401.08295, eq. 8)."""
    return weights.detach().double().mean(0).to(weights.dtype)


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """KL([ā, 0…0] ‖ a), the mean over rows (arXiv 2401.08295, equation 9).

    `target` (block,) is shorter than `scores` (row, block), the softmax of which is a, by the blocks that came since.
    Computed in float32 at least. Raises UserError for a target of more blocks than there are, and without a row.
    """
    if len(target) > scores.shape[1]:
        raise UserError(
            f"target: expected weights of at most the {scores.shape[1]} blocks that there are, got {len(target)}; "
            "`without` takes a block that was removed out of what is kept"
        )
    if not len(scores):
        raise UserError("vectors: expected at least one for each earlier task, got none")
    exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
    shares = nn.functional.pad(target.to(exact), (0, exact.shape[1] - len(target)))
    told = shares.clamp_min(torch.finfo(shares.dtype).tiny).log()
    return (shares * (told - exact.log_softmax(-1))).sum(-1).mean()


def without(target: Tensor, block: int) -> Tensor:
    """ā (block,) when a block, by its number, was removed: the others share what it had, in proportion.

    As it was where the block came after the task. Raises UserError where nothing is left.
    """
    if block >= len(target):
        return target
    kept = torch.cat([target[:block], target[block + 1 :]])
    if not float(kept.sum()):
        raise UserError(
            f"target: expected weight on blocks other than {block}, which was removed; keep no target of its task"
        )
    return kept / kept.sum()


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
        """The density that fits vectors (row, width) by their first two moments.

        Raises UserError for fewer than two rows: of one it would be the row.
        """
        if len(vectors) < 2:
            raise UserError(f"density: expected at least two rows of a task, got {len(vectors)}")
        exact = vectors.detach().double()
        mean = exact.mean(0)
        apart = exact - mean
        _, values, rows = torch.linalg.svd(apart, full_matrices=False)
        kept, freedom = min(directions, len(vectors) - 1), len(vectors) - 1
        scaled = rows[:kept] * (values[:kept, None] / freedom**0.5)
        left = apart.square().sum(0) / freedom - scaled.square().sum(0)
        return cls(*(one.to(vectors.dtype).contiguous() for one in (mean, scaled, left.clamp_min(0).sqrt())))

    def draw(self, rows: int, seed: int) -> Tensor:
        """So many vectors (row, width)."""
        random = torch.Generator().manual_seed(seed)
        first = torch.randn(rows, len(self.directions), generator=random).to(self.mean)
        second = torch.randn(rows, len(self.mean), generator=random).to(self.mean)
        return self.mean + first @ self.directions + second * self.spread
