"""Query vectors that stand for a task beside those of its rows: how alike they are, and what they give away."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def frechet_distance(vectors: Tensor, reference: Tensor) -> float:
    """Return |μ − μ'|² + tr(C + C' − 2 (C C')^½) of two sets of vectors (row, width), each of at least two.

    With C = XᵀX of centered rows over √(n − 1), the trace of the root of C C' is the sum of the singular values of X
    X'ᵀ, so that no root of a matrix is taken, and few rows of great width do no harm (arXiv 1706.08500).
    """
    first, second = vectors.double(), reference.double()
    means = (first.mean(0) - second.mean(0)).square().sum()
    centered = [(sample - sample.mean(0)) / (len(sample) - 1) ** 0.5 for sample in (first, second)]
    shared = torch.linalg.svdvals(centered[0] @ centered[1].T).sum()
    return float((means + sum(sample.square().sum() for sample in centered) - 2 * shared).clamp_min(0))


def split_frechet_distance(vectors: Tensor, rows: int, seed: int) -> float | None:
    """Return the distance of so many of some vectors from the others: what chance alone makes it; None for too few."""
    if rows < 2 or len(vectors) - rows < 2:
        return None
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed)).to(vectors.device)
    return frechet_distance(vectors[order[:rows]], vectors[order[rows:]])


class PrivacyMeasures(NamedTuple):
    """How near vectors that stand for a task are to training rows, beside held-out rows.

    `nearest`: the median distance to the nearest training row, over that of held-out rows; None where the latter is 0.
    `closer`: how likely one is nearer to a training row than a held-out row is, 1 for copies. `membership`: how likely
    a training row is nearer to one of them than a held-out row is. One half tells nothing.
    """

    nearest: float | None
    closer: float
    membership: float


def measure_privacy(stand_ins: Tensor, train_vectors: Tensor, held_out: Tensor) -> PrivacyMeasures:
    """Return what vectors that stand for a task (row, width) give away of its training rows; Euclidean distances."""
    stand_in_distances = nearest_distances(stand_ins, train_vectors)
    held_out_distances = nearest_distances(held_out, train_vectors)
    median = float(held_out_distances.median())
    return PrivacyMeasures(
        nearest=float(stand_in_distances.median()) / median if median else None,
        closer=probability_less(stand_in_distances, held_out_distances),
        membership=probability_less(
            nearest_distances(train_vectors, stand_ins), nearest_distances(held_out, stand_ins)
        ),
    )


def nearest_distances(vectors: Tensor, others: Tensor) -> Tensor:
    """Return (row,): the distance of each vector to the nearest of the others; 0 for one of them."""
    chunks = vectors.double().split(256)
    options = {"compute_mode": "donot_use_mm_for_euclid_dist"}
    return torch.cat([torch.cdist(chunk, others.double(), **options).amin(1) for chunk in chunks])  # type: ignore[arg-type]


def probability_less(values: Tensor, reference: Tensor) -> float:
    """Return the probability that one of the first values is less than one of the others, a tie counting one half."""
    order = reference.sort().values
    above = len(reference) - torch.searchsorted(order, values, right=True)
    ties = torch.searchsorted(order, values, right=True) - torch.searchsorted(order, values)
    return float((above + ties / 2).double().mean() / len(reference))
