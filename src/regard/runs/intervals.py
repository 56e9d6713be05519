"""Confidence intervals, paired tests, and the correction of p-values for several comparisons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.errors import UserError

Floats = npt.NDArray[np.float64]

FEWEST = 6  # minimum number of differences of the signed-rank test: with 5 its p is never below 0.0625
PARTS = 10
"""Parts of a text whose sums are taken for independent."""
TINY = 1e-13
"""Values that are nearer to 0 than this are 0, up to the rounding of differences of scores."""
ROUNDING = 1e-9
"""Values that differ by less, in points or in parts of the largest, are equal up to the rounding of sums."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean and standard deviation of `n` values, and the interval of the mean; NaN where `n` is too small."""

    n: int
    mean: float
    std: float
    ci_low: float
    ci_high: float

    @property
    def overlaps(self) -> bool | None:
        """Whether the interval contains 0; None if there is none."""
        return self.ci_low <= 0 <= self.ci_high if math.isfinite(self.ci_low) else None


def check_confidence(confidence: float) -> None:
    """Raise UserError unless the confidence is between 0 and 1."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence: expected a number between 0 and 1, got {confidence}")


def t_interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> Interval:
    """Return the mean ± t · s/√n, with Student's t for n − 1 degrees of freedom and the sample's s.

    `std`, `ci_low` and `ci_high` are NaN for one value, `mean` too for none. Equal values have an `std` of 0.
    """
    check_confidence(confidence)
    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    mean = float(sample.mean()) if n else math.nan
    std = float(sample.std(ddof=1)) if n > 1 else math.nan
    if n > 1 and np.ptp(sample) <= max(ROUNDING * np.abs(sample).max(), TINY):
        std = 0.0
    half = t_half_width(n, std, confidence)
    return Interval(n=n, mean=mean, std=std, ci_low=mean - half, ci_high=mean + half)


def difference_interval(differences: Sequence[float] | Floats) -> Interval:
    """Return `t_interval` of paired differences, without an interval if all are equal and not 0.

    Scores of few rows take few values, so that two or three seeds often differ by the same number of rows. Then s is 0,
    and an interval of no width would exclude 0 whatever the number of seeds. What rounding left of equal scores is 0.
    """
    interval = t_interval(differences)
    if interval.std != 0:
        return interval
    mean, bound = (0.0, 0.0) if abs(interval.mean) <= ROUNDING else (interval.mean, math.nan)
    return replace(interval, mean=mean, ci_low=bound, ci_high=bound)


def t_half_width(n: int, std: float, confidence: float = 0.95) -> float:
    """Return t · s/√n, half of the interval of a mean of `n` values with standard deviation s; NaN for n < 2."""
    return math.nan if n < 2 else t_quantile(confidence, n - 1) * std / math.sqrt(n)


def ratio_half_width(sums: Sequence[float] | Floats, counts: Sequence[float] | Floats) -> float:
    """Return half of the 95 % interval of Σ sums / Σ counts over units such as texts; NaN for fewer than two.

    The deviation of a unit is what its sum departs from its count's share. A unit with a count of 0 is none.

    Source: Cochran 1977, Sampling Techniques, section 6.4 (the variance of a ratio by linearization).
    """
    return t_half_width(*_ratio_deviation(sums, counts))


def _ratio_deviation(sums: Sequence[float] | Floats, counts: Sequence[float] | Floats) -> tuple[int, float]:
    """Return the number of units, and the deviation whose √n-th part is the standard error of their ratio."""
    values, weights = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    values, weights = values[weights != 0], weights[weights != 0]
    n, total = len(values), float(weights.sum())
    if n < 2:
        return n, math.nan
    deviations = values - values.sum() / total * weights
    return n, math.sqrt(float(deviations @ deviations) / (n - 1)) * n / total


def parts_half_width(sums: Sequence[float] | Floats, counts: Sequence[float] | Floats, parts: int = PARTS) -> float:
    """Return half of the 95 % interval of Σ sums / Σ counts over the windows of a text, in their order.

    Its units are `parts` of consecutive windows, or the windows where there are fewer: neighbouring windows are of one
    subject, so that an interval over single ones is too narrow (docs/results/window-intervals.csv: what each covers).

    Source: batch means, Schmeiser 1982, Operations Research 30, 3, 556.
    """
    return ratio_half_width(*_sum_parts(sums, counts, parts))


def _sum_parts(sums: Sequence[float] | Floats, counts: Sequence[float] | Floats, parts: int) -> tuple[Floats, Floats]:
    """Return the sums and counts of parts of consecutive windows."""
    part = np.arange(len(counts)) * min(parts, len(counts)) // max(len(counts), 1)
    return np.bincount(part, sums).astype(np.float64), np.bincount(part, counts).astype(np.float64)


def strata_half_width(values: Sequence[float] | Floats, sizes: Sequence[int]) -> float:
    """Return half of the 95 % interval of the mean of windows of several texts, `sizes` of each, in their order.

    How the texts differ is no error of the mean, for they are these. A text of one window tells no error: then the
    windows are taken as of one text.

    Source: Cochran 1977, Sampling Techniques, section 5.4 (stratified sampling, with the degrees of freedom of
    Satterthwaite 1946), over the parts of `parts_half_width` in each text.
    """
    texts = np.split(np.asarray(values, dtype=np.float64), np.cumsum(sizes)[:-1])
    if len(texts) < 2 or min(map(len, texts)) < 2:
        return parts_half_width(values, [1] * len(values))
    of_texts = [_ratio_deviation(*_sum_parts(text, np.ones(len(text)), PARTS)) for text in texts]
    variances = [
        (len(text) / len(values) * deviation) ** 2 / n for text, (n, deviation) in zip(texts, of_texts, strict=True)
    ]
    return _joint_half_width(variances, [n - 1 for n, _ in of_texts])


def _joint_half_width(variances: Sequence[float], freedom: Sequence[int]) -> float:
    """Return half of the interval of 95 % of a sum of independent means of these variances.

    Its degrees of freedom are Satterthwaite's (1946, Biometrics Bulletin 2, 110), rounded down.
    """
    total = sum(variances)
    if total == 0:
        return 0.0
    joint = total**2 / sum(variance**2 / free for variance, free in zip(variances, freedom, strict=True))
    return t_quantile(0.95, max(1, math.floor(joint + 1e-9))) * math.sqrt(total)


class SeedDifference(NamedTuple):
    """The difference of two means over seeds, half of its 95 % interval (NaN without one), and the paired seeds."""

    value: float
    half_width: float
    pairs: int

    @property
    def low(self) -> float:
        return self.value - self.half_width

    @property
    def high(self) -> float:
        return self.value + self.half_width

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.half_width)

    @property
    def overlaps(self) -> bool:
        """Whether the interval contains 0."""
        return self.low <= 0 <= self.high


def seed_difference(values: Mapping[Any, float], reference: Mapping[Any, float]) -> SeedDifference:
    """Return how much more the values of some seeds are than those of others.

    With two seeds or more in common, at least half of those of each, the difference is that of these pairs (Student's
    t), without the other seeds; else it is that of the means, with Welch's interval, for which both need two seeds.
    Equal differences other than 0 have no interval: see `difference_interval`.

    Source: Welch 1947, Biometrika 34, 28, with degrees of freedom that are rounded down.
    """
    common = sorted(values.keys() & reference.keys())
    if len(common) > 1 and 2 * len(common) >= max(len(values), len(reference)):
        paired = difference_interval([values[seed] - reference[seed] for seed in common])
        return SeedDifference(paired.mean, paired.ci_high - paired.mean, paired.n)
    ours, theirs = (t_interval(list(by_seed.values())) for by_seed in (values, reference))
    value, half_width = ours.mean - theirs.mean, math.nan
    if min(ours.n, theirs.n) > 1:
        variances = [(one.std / math.sqrt(one.n)) ** 2 for one in (ours, theirs)]
        half_width = _joint_half_width(variances, [ours.n - 1, theirs.n - 1])
        if half_width == 0:
            value, half_width = (0.0, 0.0) if abs(value) <= ROUNDING else (value, math.nan)
    return SeedDifference(value, half_width, 0)


def t_test(differences: Sequence[float] | Floats) -> float | None:
    """Return the two-sided p of the paired t-test; None for fewer than two differences, or if all are equal."""
    sample = t_interval(differences)
    if sample.n < 2 or sample.std == 0:
        return None
    return t_tails(sample.mean / (sample.std / math.sqrt(sample.n)), sample.n - 1)


def t_tails(t: float, freedom: int) -> float:
    """Return the probability that Student's |t| is at least |`t`| (Abramowitz and Stegun, 26.5.27 with 26.7.1)."""
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t: 12.7062 for 0.95 and one degree of freedom."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if _beta(middle, freedom / 2, 0.5) > 1 - confidence else (middle, high)
    return math.sqrt(freedom * (1 - high) / high)


def _beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b) (Abramowitz and Stegun, 26.5.8, by Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) / a / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction 1 + d₁/(1 + d₂/(1 + …)) of the incomplete beta function."""
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
    """Return the exact two-sided p of the signed-rank test of paired differences (Wilcoxon 1945).

    Differences of 0 do not count, and equal sizes share their mean rank. None for fewer than `FEWEST` differences.
    """
    nonzero = np.asarray(differences, dtype=np.float64)
    nonzero = nonzero[np.abs(nonzero) > ROUNDING]
    if len(nonzero) < FEWEST:
        return None
    sizes = np.abs(nonzero)
    below = [int((sizes < size - ROUNDING).sum()) for size in sizes]
    equal = [int((np.abs(sizes - size) <= ROUNDING).sum()) for size in sizes]
    ranks = [2 * less + same + 1 for less, same in zip(below, equal, strict=True)]  # twice the mean ranks
    chances = np.zeros(sum(ranks) + 1)
    chances[0] = 1.0
    for rank in ranks:
        chances[rank:] = chances[rank:] + chances[: len(chances) - rank]
        chances /= 2
    positive = sum(rank for rank, value in zip(ranks, nonzero, strict=True) if value > 0)
    return min(1.0, 2 * float(min(chances[: positive + 1].sum(), chances[positive:].sum())))


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for several tests (Holm 1979): p₍ᵢ₎ · (m − i + 1), at most 1, rising; None stays."""
    order = sorted((p, index) for index, p in enumerate(chances) if p is not None)
    corrected: list[float | None] = [None] * len(chances)
    largest = 0.0
    for done, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - done)))
        corrected[index] = largest
    return corrected


def wilson(share: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of a share of `n` rows (Wilson 1927), both in 0–1; all of 0–1 for no row."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    shrunk = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / shrunk
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrunk
    return max(0.0, centre - half), min(1.0, centre + half)


def fall_interval(
    before: float, after: float, n: int, confidence: float = 0.95, *, correlation: float | None = None
) -> tuple[float, float]:
    """Return the interval of `before` − `after`, two shares of the same `n` rows.

    Wilson's intervals of the two are combined as for paired shares:

        low  = d − √((p₁−l₁)² − 2φ(p₁−l₁)(u₂−p₂) + (u₂−p₂)²)
        high = d + √((u₁−p₁)² − 2φ(u₁−p₁)(p₂−l₂) + (p₂−l₂)²)

    φ is the `correlation` of the rows (`paired_correlation`). If it is not known which rows they are, it is the
    smallest that the two shares allow, so the interval is the widest.

    Source: Newcombe 1998, Statistics in Medicine 17, 2635, method 10.
    """
    check_confidence(confidence)
    (low_before, high_before), (low_after, high_after) = (wilson(share, n, confidence) for share in (before, after))
    if correlation is None:
        correlation = least_correlation(before, after)
    down = _combine(before - low_before, high_after - after, correlation)
    up = _combine(high_before - before, after - low_after, correlation)
    return before - after - down, before - after + up


def paired_correlation(before: float, n: int, lost: float, gained: float) -> float:
    """Return φ of Newcombe's method 10 for `n` rows of which `lost` became wrong and `gained` became right.

    With e rows right twice and h wrong twice, φ = (eh − lost·gained) / √(…) of the four sums of the table; above 0 the
    numerator is lower by n/2, but not below 0.
    """
    right = round(before * n)
    twice_right, twice_wrong = right - lost, n - right - gained
    sums = right * (n - right) * (twice_right + gained) * (twice_wrong + lost)
    if sums <= 0:
        return 0.0
    product = twice_right * twice_wrong - lost * gained
    return (max(product - n / 2, 0.0) if product > 0 else product) / math.sqrt(sums)


def least_correlation(before: float, after: float) -> float:
    """Return the smallest correlation of binary values with these shares of ones (Fréchet); 0 if one is constant."""
    varies = before * (1 - before) * after * (1 - after)
    if varies <= 0:
        return 0.0
    return max(-1.0, (max(0.0, before + after - 1) - before * after) / math.sqrt(varies))


def _combine(first: float, second: float, correlation: float) -> float:
    return math.sqrt(first * first - 2 * correlation * first * second + second * second)
