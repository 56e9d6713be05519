"""Novelty of a sample: a two-sample test against the samples of known tasks.

The test compares distances between samples with distances within them (energy statistics: Székely and Rizzo, Journal of
Statistical Planning and Inference 143, 2013), so fewer vectors than features are enough. Its p-value comes from
permutations, so the rate of false alarms is exact for every distribution and sample size. A sample is new if it differs
from every known task; no correction for their number is needed (intersection-union test: Berger, Technometrics
24, 1982).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError

DRAWS = 999
"""Number of permutations."""
_CLOSE = 1e-9


class Novelty(NamedTuple):
    """Result of a two-sample test: the energy coefficient and the p-value of the permutation test.

    The coefficient is the fraction of the mean distance between samples that distances within them do not explain. Its
    numerator is unbiased: about 0 or a little less for equal distributions, 1 for two points.
    """

    statistic: float
    p: float


def novelty(vectors: Tensor, reference: Tensor, *, draws: int = DRAWS, seed: int = 0) -> Novelty:
    """Test whether two samples (row, width) have the same distribution, whatever the order of rows.

    Each feature is divided by its standard deviation over both samples. The observed split counts as one more of the
    `draws` permutations, so that p is at least 1 / (draws + 1) (Phipson and Smyth, arXiv 1603.05766).

    Raises:
        UserError: A sample has fewer than two rows or numbers that are not finite, or the widths differ.
    """
    _check(vectors, reference)
    rows = torch.cat([sample.detach().cpu().double() for sample in (vectors, reference)])
    order = torch.tensor(sorted(range(len(rows)), key=rows.tolist().__getitem__))
    rows, in_first = rows[order], order < len(vectors)
    spread = rows.std(0, correction=0)
    rows = rows / torch.where(spread > 0, spread, 1.0)
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    permutations = torch.rand(draws, len(rows), generator=torch.Generator().manual_seed(seed)).argsort(1) < len(vectors)
    energies, between = _energies(distances, torch.cat([in_first[None], permutations]).double())
    num_as_large = int((energies[1:] >= energies[0] - _CLOSE * distances.mean()).sum())
    statistic = float(energies[0] / (2 * between[0])) if float(between[0]) else 0.0
    return Novelty(statistic, (1 + num_as_large) / (draws + 1))


def find_known_task(comparisons: Sequence[Novelty], *, alarm: float, reuse: float = 0.0) -> int | None:
    """Return the index of the known task that a sample belongs to, None if it is new, from its test against each.

    Of the tasks with p above `alarm`, it is the one with the highest p. If there is none, it is the one with the
    smallest statistic, if 1 − statistic is at least `reuse` (0: never).
    """
    indices = range(len(comparisons))
    similar = [index for index in indices if comparisons[index].p > alarm]
    if similar:
        return max(similar, key=lambda index: (comparisons[index].p, -comparisons[index].statistic))
    nearest = min(indices, key=lambda index: comparisons[index].statistic, default=None)
    return nearest if nearest is not None and reuse and 1 - comparisons[nearest].statistic >= reuse else None


def check_separable(rows: int, reference: int, alarm: float) -> bool:
    """Return whether samples of these sizes have enough permutations for a p-value of `alarm`."""
    return 1 / math.comb(rows + reference, reference) <= alarm


def _check(vectors: Tensor, reference: Tensor) -> None:
    for name, sample in (("vectors", vectors), ("reference", reference)):
        if sample.dim() != 2 or len(sample) < 2:
            raise UserError(f"{name}: expected at least 2 rows of features, got shape {tuple(sample.shape)}")
        if not bool(sample.isfinite().all()):
            raise UserError(f"{name}: expected finite numbers, got others")
    if vectors.shape[1] != reference.shape[1]:
        raise UserError(f"vectors: expected {reference.shape[1]} features as in reference, got {vectors.shape[1]}")


def _energies(distances: Tensor, in_first: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2 E|x − y| − E|x − x'| − E|y − y'| and E|x − y| for each split: x is where `in_first` (draw, row) is 1."""
    num_first = float(in_first[0].sum())
    num_rest = len(distances) - num_first
    within = ((in_first @ distances) * in_first).sum(1)
    across = in_first @ distances.sum(1) - within
    within_rest = distances.sum() - within - 2 * across
    between = across / (num_first * num_rest)
    return 2 * between - within / (num_first * (num_first - 1)) - within_rest / (num_rest * (num_rest - 1)), between
