"""Query vectors that stand for a task beside those of its rows: how alike they are, and what they give away."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def frechet(one: Tensor, other: Tensor) -> float:
    """|μ − μ'|² + tr(C + C' − 2 (C C')^½) of two sets of vectors (row, width), each of two and more (1706.08500).

    With C = XᵀX of centred rows over √(n − 1), the trace of the root of C C' is the sum of the singular values of X
    X'ᵀ, so that no root of a matrix is taken, and few rows of great width do no harm.
    """
    first, second = one.double(), other.double()
    means = (first.mean(0) - second.mean(0)).square().sum()
    centred = [(part - part.mean(0)) / (len(part) - 1) ** 0.5 for part in (first, second)]
    shared = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    return float((means + sum(part.square().sum() for part in centred) - 2 * shared).clamp_min(0))


def frechet_of_halves(vectors: Tensor, rows: int, seed: int) -> float | None:
    """The distance of so many of some vectors from the others: what chance alone makes it; None for too few."""
    if rows < 2 or len(vectors) - rows < 2:
        return None
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed)).to(vectors.device)
    return frechet(vectors[order[:rows]], vectors[order[rows:]])


class Private(NamedTuple):
    """How near vectors are to training rows, beside rows that were not trained on.

    `nearest`: the median distance of what stands for a task to the nearest training row, over that of held-out rows;
    None where the latter is 0. `closer`: how likely one of them is nearer to a training row than a held-out row is, one
    half where they are as far, 1 for copies. `membership`: how likely a training row is nearer to one of them than a
    held-out row is: what someone who has them can tell, one half for nothing.
    """

    nearest: float | None
    closer: float
    membership: float


def privacy(stand_ins: Tensor, trained: Tensor, held_out: Tensor) -> Private:
    """What vectors that stand for a task (row, width) give away of its training rows; Euclidean distances."""
    ours, theirs = nearest(stand_ins, trained), nearest(held_out, trained)
    median = float(theirs.median())
    return Private(
        nearest=float(ours.median()) / median if median else None,
        closer=likelier_less(ours, theirs),
        membership=likelier_less(nearest(trained, stand_ins), nearest(held_out, stand_ins)),
    )


def nearest(vectors: Tensor, others: Tensor) -> Tensor:
    """(row,): the distance of each vector to the nearest of the others; 0 for one of them."""
    chunks = vectors.double().split(256)
    exact = {"compute_mode": "donot_use_mm_for_euclid_dist"}
    return torch.cat([torch.cdist(one, others.double(), **exact).amin(1) for one in chunks])  # type: ignore[arg-type]


def likelier_less(one: Tensor, other: Tensor) -> float:
    """The probability that one of the first values is less than one of the others, a tie counting one half."""
    order = other.sort().values
    above = len(other) - torch.searchsorted(order, one, right=True)
    same = torch.searchsorted(order, one, right=True) - torch.searchsorted(order, one)
    return float((above + same / 2).double().mean() / len(other))
