"""What a few numbers allow to be said: intervals, paired tests, and their correction for several comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from regard.errors import UserError

Floats = npt.NDArray[np.float64]

FEWEST = 6
"""Differences that the signed-rank test is made of at the least: with 5 its p is never below 0.0625."""
ROUNDING = 1e-9
"""Values that are nearer to each other than this are the same: what is between them is of floating-point sums."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean of `n` values with their standard deviation and the mean's interval; NaN is what `n` cannot give."""

    n: int
    mean: float
    std: float
    ci_low: float
    ci_high: float

    @property
    def overlaps(self) -> bool | None:
        """Whether the interval holds 0; None where there is no interval."""
        return self.ci_low <= 0 <= self.ci_high if math.isfinite(self.ci_low) else None


def check_confidence(confidence: float) -> None:
    """Nothing, or a UserError: the confidence is no number between 0 and 1."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence: expected a number between 0 and 1, got {confidence}")


def t_interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> Interval:
    """The mean ± t · s/√n, with Student's t for n − 1 degrees of freedom and the sample's standard deviation s.

    `std`, `ci_low` and `ci_high` are NaN for one value, and `mean` too for none. Values that are all the same have an
    `std` of 0, and an interval that is a point.
    """
    check_confidence(confidence)
    given = np.asarray(values, dtype=np.float64)
    n = len(given)
    mean = float(given.mean()) if n else math.nan
    if n < 2:
        return Interval(n=n, mean=mean, std=math.nan, ci_low=math.nan, ci_high=math.nan)
    sd = 0.0 if np.ptp(given) <= ROUNDING else float(given.std(ddof=1))
    half = t_half_width(n, sd, confidence)
    return Interval(n=n, mean=mean, std=sd, ci_low=mean - half, ci_high=mean + half)


def t_half_width(n: int, std: float, confidence: float = 0.95) -> float:
    """Return t · s/√n, half of the interval of a mean of `n` values with standard deviation s; NaN for one value."""
    return math.nan if n < 2 else t_quantile(confidence, n - 1) * std / math.sqrt(n)


def welch_half_width(n: int, std_error: float, other_n: int, other_std_error: float, confidence: float = 0.95) -> float:
    """Return half of the interval of a difference of two means of different samples (Welch 1947, Biometrika 34, 28).

    The degrees of freedom are rounded down.

    Args:
        n: How many values the first mean is of.
        std_error: Its standard error, s/√n.
        other_n: How many values the second mean is of.
        other_std_error: Its standard error.
        confidence: How likely the interval holds the true difference.

    Returns:
        Half of the width; NaN where one mean is of a single value.
    """
    if min(n, other_n) < 2:
        return math.nan
    first, second = std_error**2, other_std_error**2
    variance = first + second
    if variance == 0:
        return 0.0
    freedom = variance**2 / (first**2 / (n - 1) + second**2 / (other_n - 1))
    return t_quantile(confidence, max(1, math.floor(freedom + 1e-9))) * math.sqrt(variance)


def t_test(differences: Sequence[float] | Floats) -> float | None:
    """The two-sided p of the paired t-test: how likely a mean at least as far from 0 is if the true one is 0.

    None for fewer than two differences, and where all are the same: there is no spread to hold the mean against.
    """
    found = t_interval(differences)
    if found.n < 2 or found.std == 0:
        return None
    return t_tails(found.mean / (found.std / math.sqrt(found.n)), found.n - 1)


def t_tails(t: float, freedom: int) -> float:
    """How likely Student's t is at least as far from 0 as `t`: I_x(ν/2, 1/2), x = ν/(ν + t²).

    Abramowitz and Stegun, 26.5.27 with 26.7.1.
    """
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The t that Student's t is not further from 0 than, with this probability: 12.7062 for 0.95 and one degree."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if _beta(middle, freedom / 2, 0.5) > 1 - confidence else (middle, high)
    return math.sqrt(freedom * (1 - high) / high)


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b) (Abramowitz and Stegun, 26.5.8, evaluated by Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) / a / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction 1 + d₁/(1 + d₂/(1 + …)) of the incomplete beta function."""
    value, up, down = 1.0, 1.0, 0.0
    for step in range(1, 1000):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        down = 1 / (1 + term * down)
        up = 1 + term / up
        value *= up * down
        if abs(up * down - 1) < 1e-15:
            break
    return value


def signed_rank_test(differences: Sequence[float] | Floats) -> float | None:
    """The two-sided p of the signed-rank test of paired differences (Wilcoxon 1945), exact for the ranks at hand.

    Differences of 0 are left out, equal sizes share their mean rank, and every choice of signs is counted. None for
    fewer than `FEWEST` differences that are not 0.
    """
    given = np.asarray(differences, dtype=np.float64)
    given = given[np.abs(given) > ROUNDING]
    if len(given) < FEWEST:
        return None
    ranks = _doubled_ranks(np.abs(given))
    chances = np.zeros(sum(ranks) + 1)
    chances[0] = 1.0
    for rank in ranks:
        chances[rank:] = chances[rank:] + chances[: len(chances) - rank]
        chances /= 2
    seen = sum(rank for rank, value in zip(ranks, given, strict=True) if value > 0)
    return min(1.0, 2 * float(min(chances[: seen + 1].sum(), chances[seen:].sum())))


def _doubled_ranks(sizes: Floats) -> list[int]:
    """Twice the rank of each size, the smallest first; those that are the same share the mean of theirs."""
    below = [int((sizes < size - ROUNDING).sum()) for size in sizes]
    same = [int((np.abs(sizes - size) <= ROUNDING).sum()) for size in sizes]
    return [2 * less + equal + 1 for less, equal in zip(below, same, strict=True)]


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Each p corrected for there being several (Holm 1979): p₍ᵢ₎ · (m − i + 1), at most 1, never below a smaller one's.

    Those that are None stay None and are not counted.
    """
    order = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    corrected: list[float | None] = [None] * len(chances)
    largest = 0.0
    for done, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - done)))
        corrected[place] = largest
    return corrected


def wilson(share: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a share that was seen in `n` rows (Wilson 1927), both in 0–1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    shrunk = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / shrunk
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrunk
    return max(0.0, centre - half), min(1.0, centre + half)


def fall_interval(before: float, after: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of `before` − `after`, two shares of the same `n` rows, when it is not known of which rows.

    Wilson's intervals of the two, put together as for paired shares (Newcombe 1998, Statistics in Medicine 17, 2635,
    method 10):

        low  = d − √((p₁−l₁)² − 2φ(p₁−l₁)(u₂−p₂) + (u₂−p₂)²)
        high = d + √((u₁−p₁)² − 2φ(u₁−p₁)(p₂−l₂) + (p₂−l₂)²)

    φ, the correlation of the rows, is the smallest that the two shares allow: no pairing has a wider interval. It is
    near 0, as if the rows were different ones, where both shares are high.
    """
    check_confidence(confidence)
    (low_before, high_before), (low_after, high_after) = (wilson(each, n, confidence) for each in (before, after))
    correlation = least_correlation(before, after)
    down = _together(before - low_before, high_after - after, correlation)
    up = _together(high_before - before, after - low_after, correlation)
    return before - after - down, before - after + up


def least_correlation(before: float, after: float) -> float:
    """The smallest correlation that two yes-or-no values of one row can have, given how often each is yes.

    Both are yes in at least max(0, p₁ + p₂ − 1) of the rows (Fréchet). 0 where one of them never varies.
    """
    varies = before * (1 - before) * after * (1 - after)
    if varies <= 0:
        return 0.0
    return max(-1.0, (max(0.0, before + after - 1) - before * after) / math.sqrt(varies))


def _together(one: float, other: float, correlation: float) -> float:
    return math.sqrt(one * one - 2 * correlation * one * other + other * other)
