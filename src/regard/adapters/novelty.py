"""Whether vectors are of a kind that is kept, or of a new one: a test of two samples, and what many of them say.

The test is that of energy statistics (Székely and Rizzo, Testing for equal distributions in high dimension, InterStat
2004; Energy statistics, Journal of Statistical Planning and Inference 143, 2013): how much farther apart vectors of
different samples are than those of the same one. It needs distances alone, and so no more vectors than features, which
rules out what asks for a covariance; it has no width to be chosen, as kernels have; and it is zero for equal
distributions only. How large it is by chance is found by dealing the same vectors out anew, which makes its false
alarms as many as is said, whatever the distribution and however few the vectors are.

Of many kinds the vectors are new if they are of none. That is refused only where each test by itself refuses it, so
that the level of one test is that of all of them, with nothing to correct for their number (the intersection-union
test: Berger, Technometrics 24, 1982). What many kinds cost is power: the more there are, the likelier one is not told
from what is new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError

DRAWS = 999
"""How often vectors are dealt out anew."""
_CLOSE = 1e-9


class Novelty(NamedTuple):
    """How unlike two samples are.

    `statistic`: the share of the mean distance between them that is not explained by the distances within them (the
    energy coefficient, unbiased in what is divided: about 0 for equal distributions, or a little below, 1 for points
    that are apart); `p`: how often chance alone makes it as large.
    """

    statistic: float
    p: float


def novelty(vectors: Tensor, kept: Tensor, *, draws: int = DRAWS, seed: int = 0) -> Novelty:
    """How unlike vectors (row, width) are those that were kept (row, width); it depends on no order of rows.

    Each feature is taken in units of its deviation over both samples. p counts the samples as they are as one of the
    draws, so that it is at least 1 / (draws + 1) (Phipson and Smyth, arXiv 1603.05766). Raises UserError.
    """
    _check(vectors, kept)
    both, first = _in_order(torch.cat([one.detach().cpu().double() for one in (vectors, kept)]), len(vectors))
    spread = both.std(0, correction=0)
    both = both / torch.where(spread > 0, spread, 1.0)
    apart = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist")
    random = torch.Generator().manual_seed(seed)
    dealt = torch.rand(draws, len(both), generator=random).argsort(1) < len(vectors)
    energy, between = _energies(apart, torch.cat([first[None], dealt]).double())
    as_large = int((energy[1:] >= energy[0] - _CLOSE * apart.mean()).sum())
    statistic = float(energy[0] / (2 * between[0])) if float(between[0]) else 0.0
    return Novelty(statistic, (1 + as_large) / (draws + 1))


def is_known_task(found: Sequence[Novelty], *, alarm: float, reuse: float = 0.0) -> int | None:
    """Which of the kinds that vectors were compared with they are of, by its place; None: they are new.

    Kinds with a p above `alarm` come into question, and the likeliest is taken: `alarm` is how often vectors of a kind
    that is kept are held for new ones. Where there is none, but `reuse` is over 0, it is the one that is least unlike,
    if 1 − statistic is at least `reuse`.
    """
    places = range(len(found))
    alike = [place for place in places if found[place].p > alarm]
    if alike:
        return max(alike, key=lambda place: (found[place].p, -found[place].statistic))
    nearest = min(places, key=lambda place: found[place].statistic, default=None)
    return nearest if nearest is not None and reuse and 1 - found[nearest].statistic >= reuse else None


def check_separable(rows: int, kept: int, alarm: float) -> bool:
    """Whether so many vectors can be found unlike so many kept ones at all: there are enough ways to deal them out."""
    return 1 / math.comb(rows + kept, kept) <= alarm


def _check(vectors: Tensor, kept: Tensor) -> None:
    for name, one in (("vectors", vectors), ("kept", kept)):
        if one.dim() != 2 or len(one) < 2:
            raise UserError(f"{name}: expected at least 2 rows of features, got shape {tuple(one.shape)}")
        if not bool(one.isfinite().all()):
            raise UserError(f"{name}: expected finite numbers, got others")
    if vectors.shape[1] != kept.shape[1]:
        raise UserError(f"vectors: expected {kept.shape[1]} features as those kept have, got {vectors.shape[1]}")


def _in_order(both: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The rows sorted by their features, and which of them are of the first so many."""
    order = torch.tensor(sorted(range(len(both)), key=both.tolist().__getitem__))
    return both[order], order < many


def _energies(apart: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """2 E|x − y| − E|x − x'| − E|y − y'| for each way to deal rows out, and E|x − y|; `first` (draw, row) is 0 or 1.

    x and x' are two of the rows that are dealt out first, y and y' two others; `apart` (row, row) are their distances.
    """
    many = float(first[0].sum())
    others = len(apart) - many
    within = ((first @ apart) * first).sum(1)
    across = first @ apart.sum(1) - within
    rest = apart.sum() - within - 2 * across
    between = across / (many * others)
    return 2 * between - within / (many * (many - 1)) - rest / (others * (others - 1)), between
