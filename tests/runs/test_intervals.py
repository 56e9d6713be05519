"""Intervals and tests against what is worked out by hand, against every case counted, and against SciPy."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.runs.intervals import (
    difference_interval,
    fall_interval,
    holm,
    least_correlation,
    paired_correlation,
    parts_half_width,
    ratio_half_width,
    seed_difference,
    signed_rank_test,
    strata_half_width,
    t_half_width,
    t_interval,
    t_quantile,
    t_tails,
    t_test,
    wilson,
)

VALUES = st.lists(st.integers(-300, 300).map(lambda value: value / 3), min_size=2, max_size=9)


@pytest.fixture
def scipy_stats() -> Any:
    return pytest.importorskip("scipy.stats", reason="the package scipy is not installed")


# -- Student's t -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom, told", [(1, 12.7062), (2, 4.3027), (4, 2.7764), (30, 2.0423), (10**6, 1.95997)])
def test_quantiles_are_those_of_the_tables(freedom: int, told: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(told, abs=5e-5)


def test_one_degree_of_freedom_is_cauchy_and_two_have_a_closed_form() -> None:
    for t in (0.1, 1.0, 3.0, 1e4, -3.0):
        assert t_tails(t, 1) == pytest.approx(2 * math.atan(1 / abs(t)) / math.pi, rel=1e-12)
        assert t_tails(t, 2) == pytest.approx(2 / ((2 + t * t) * (1 + abs(t) / math.sqrt(2 + t * t))), rel=1e-12)
    assert t_tails(0, 3) == 1


def test_tails_and_quantiles_are_those_of_scipy(scipy_stats: Any) -> None:
    for freedom, t in itertools.product((1, 2, 3, 4, 7, 29, 100, 1000), (0.01, 0.5, 1, 2.5, 8, 40)):
        assert t_tails(t, freedom) == pytest.approx(2 * scipy_stats.t.sf(t, freedom), rel=1e-10)
    for freedom, confidence in itertools.product((1, 2, 4, 9, 50, 999), (0.5, 0.9, 0.95, 0.999)):
        told = scipy_stats.t.ppf((1 + confidence) / 2, freedom)
        assert t_quantile(confidence, freedom) == pytest.approx(told, rel=1e-10)


def test_an_interval_by_hand() -> None:
    found = t_interval([1, 2, 3])
    half = 4.30265273 / math.sqrt(3)
    assert (found.n, found.mean, found.std) == (3, 2, 1)
    assert (found.ci_low, found.ci_high) == pytest.approx((2 - half, 2 + half))
    assert found.overlaps is True
    assert t_interval([1, 2, 3], confidence=0.5).overlaps is False


def test_the_interval_over_parts_of_a_text() -> None:
    """Windows that resemble their neighbours: the interval is wider by what their sums vary, and holds the mean."""
    generator = np.random.default_rng(0)
    held = []
    for _ in range(300):
        values = np.repeat(generator.normal(0, 1, 50), 8) + generator.normal(0, 1, 400)
        held.append(
            [abs(values.mean()) <= width(values, np.ones(400)) for width in (ratio_half_width, parts_half_width)]
        )
    over_windows, over_parts = np.mean(held, axis=0)
    assert over_windows < 0.8
    assert 0.91 < over_parts < 0.98
    sums, counts = [1.0, 2.0, 4.0, 3.0, 9.0], [1, 2, 2, 1, 3]
    assert parts_half_width(sums, counts) == ratio_half_width(sums, counts)
    assert parts_half_width([*sums, *sums] * 2, [*counts, *counts] * 2) == pytest.approx(
        ratio_half_width([3.0, 7.0, 10.0, 6.0, 12.0] * 2, [3, 3, 4, 4, 4] * 2)
    )
    assert math.isnan(parts_half_width([], []))


def test_the_difference_between_texts_is_no_error_of_their_mean() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 200)
    apart = noise + np.repeat([0.3, -0.05], 100)
    errors = [parts_half_width(noise[start : start + 100], [1] * 100) / t_quantile(0.95, 9) for start in (0, 100)]
    variances = [error**2 / 4 for error in errors]
    freedom = math.floor(sum(variances) ** 2 / sum(variance**2 / 9 for variance in variances))
    expected = t_quantile(0.95, freedom) * math.sqrt(sum(variances))
    assert strata_half_width(noise, [100, 100]) == pytest.approx(expected)
    assert strata_half_width(apart, [100, 100]) == pytest.approx(strata_half_width(noise, [100, 100]))
    assert strata_half_width(apart, [200]) == parts_half_width(apart, [1] * 200)
    assert strata_half_width(apart, [199, 1]) == parts_half_width(apart, [1] * 200)
    assert strata_half_width(apart, [200]) > 5 * strata_half_width(apart, [100, 100])


def test_an_interval_over_few_windows_of_several_texts_covers_the_mean_about_as_often_as_it_says() -> None:
    generator, covered, widths = np.random.default_rng(1), 0, []
    for _ in range(400):
        half = strata_half_width(noise := generator.normal(0, 1, 20), [2] * 10)
        covered += abs(noise.mean()) <= half
        widths.append(half)
    assert 0.9 <= covered / 400 <= 0.99
    assert np.median(widths) < 1  # √20 = 4.5 errors of .22


def test_the_interval_of_a_ratio() -> None:
    """Equal counts give the interval of the mean of ratios; else the jackknife is near, for it is of another order."""
    generator = np.random.default_rng(0)
    sums, counts = generator.normal(3, 1, 40), np.full(40, 5)
    expected = t_interval(sums / counts)
    assert ratio_half_width(sums, counts) == pytest.approx(expected.ci_high - expected.mean)
    counts = generator.integers(1, 9, 400)
    sums = 3 * counts + generator.normal(0, 2, 400)
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    deviation = math.sqrt(399 / 400 * np.square(left_out - left_out.mean()).sum())
    assert ratio_half_width(sums, counts) == pytest.approx(t_half_width(400, deviation * 20), rel=0.01)
    assert ratio_half_width([*sums[:9], 0, 0], [*counts[:9], 0, 0]) == ratio_half_width(sums[:9], counts[:9])
    assert math.isnan(ratio_half_width([1.0, 0.0], [2, 0]))


def test_small_values_have_an_interval_of_their_own_size() -> None:
    """Those of statistics far below 1, as of those near it; equal values have none, up to rounding."""
    small, large = t_interval([1e-10, 3e-10]), t_interval([1.0, 3.0])
    assert small.ci_low == pytest.approx(1e-10 * large.ci_low)
    assert small.std == pytest.approx(1e-10 * large.std)
    assert t_interval([0.1 + 0.2, 0.3]).std == 0
    assert t_interval([0.3 - 0.1 - 0.2, 0.0]).std == 0


def test_few_values_give_what_they_can() -> None:
    one, none, same = t_interval([3.0]), t_interval([]), t_interval([0.1 + 0.2, 0.3])
    assert (one.n, one.mean, one.overlaps) == (1, 3, None)
    assert all(math.isnan(each) for each in (one.std, one.ci_low, one.ci_high, none.mean, none.ci_low))
    assert (same.std, same.ci_high - same.ci_low) == (0, 0)


def test_a_spread_is_needed_to_test_a_mean() -> None:
    assert t_test([2.0]) is None
    assert t_test([0.1 + 0.2, 0.3, 0.3]) is None
    assert t_test([-1.0, 1.0]) == 1
    assert t_test([1.0, 2.0, 3.0]) == pytest.approx(t_tails(2 * math.sqrt(3), 2))


def test_the_t_test_is_that_of_scipy(scipy_stats: Any) -> None:
    chance = np.random.default_rng(1)
    for n in (2, 5, 12):
        values = chance.normal(0.5, 1, n)
        assert t_test(values) == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue, rel=1e-10)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_an_interval_excludes_0_when_the_test_says_that_it_is_unlikely(values: list[float]) -> None:
    chance = t_test(values)
    if chance is not None and abs(chance - 0.05) > 1e-6:
        assert t_interval(values).overlaps == (chance > 0.05)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, 95, math.nan])
def test_a_confidence_is_between_0_and_1(confidence: float) -> None:
    with pytest.raises(UserError, match="confidence: expected a number between 0 and 1"):
        t_interval([1, 2], confidence)


# -- signed ranks ----------------------------------------------------------------------------------------


def counted(values: list[float]) -> float:
    """The p of the signed-rank test, every choice of signs counted."""
    there = [value for value in values if value]
    sizes = sorted(map(abs, there))
    ranks = [np.mean([place + 1 for place, size in enumerate(sizes) if size == abs(value)]) for value in there]
    seen = sum(rank for rank, value in zip(ranks, there, strict=True) if value > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=len(ranks))]
    below, above = (np.mean([each <= seen for each in sums]), np.mean([each >= seen for each in sums]))
    return min(1.0, 2 * float(min(below, above)))


def test_six_differences_to_one_side() -> None:
    assert signed_rank_test([1, 2, 3, 4, 5, 6]) == 2 / 64
    assert signed_rank_test([-1, -2, -3, -4, -5, -6]) == 2 / 64
    assert signed_rank_test([-1, 2, 3, 4, 5, 6]) == 4 / 64
    assert signed_rank_test([2, 2, 2, 2, 2, 2]) == 2 / 64


def test_as_much_to_either_side_is_a_chance_of_one_and_no_more() -> None:
    """Of the ranks 1 to 7, whose sum is 28, those of both sides sum to 14, which counts for both tails."""
    assert signed_rank_test([1, 6, 7, -2, -3, -4, -5]) == 1


def test_fewer_than_six_differences_are_no_test() -> None:
    assert signed_rank_test([1, 2, 3, 4, 5]) is None
    assert signed_rank_test([1, 2, 3, 4, 5, 0]) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=6, max_size=9))
def test_ranks_that_are_shared_are_counted_as_they_are(values: list[int]) -> None:
    if sum(value != 0 for value in values) >= 6:
        assert signed_rank_test(values) == pytest.approx(counted([float(value) for value in values]))


def test_rounding_makes_no_rank() -> None:
    noisy = [0.1 + 0.2, -0.3, 1.0, 2.0, 3.0, 4.0, 1e-13]
    assert signed_rank_test(noisy) == pytest.approx(counted([0.3, -0.3, 1, 2, 3, 4]))


def test_the_signed_rank_test_is_that_of_scipy(scipy_stats: Any) -> None:
    chance = np.random.default_rng(2)
    for n in (6, 10, 25):
        values = chance.normal(0.4, 1, n)
        told = scipy_stats.wilcoxon(values, method="exact").pvalue
        assert signed_rank_test(values) == pytest.approx(told, rel=1e-10)


# -- several tests ---------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([]) == []


def test_a_test_that_is_none_is_not_counted() -> None:
    assert holm([None, 0.02, None, 0.03]) == [None, 0.04, None, 0.04]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_correction_is_between_none_and_that_of_bonferroni(chances: list[float]) -> None:
    corrected = [value for value in holm(chances) if value is not None]
    assert all(p <= c <= min(1, p * len(chances)) + 1e-12 for p, c in zip(chances, corrected, strict=True))
    order = np.argsort(chances, kind="stable")
    assert list(np.array(corrected)[order]) == sorted(corrected)


# -- shares ----------------------------------------------------------------------------------------------


def test_the_interval_of_a_share_is_that_of_scipy(scipy_stats: Any) -> None:
    for right, n in ((0, 10), (10, 10), (90, 100), (1, 3), (5000, 9999)):
        told = scipy_stats.binomtest(right, n).proportion_ci(method="wilson")
        assert wilson(right / n, n) == pytest.approx((told.low, told.high), abs=1e-12)
    assert wilson(0.5, 0) == (0, 1)


def test_the_interval_of_a_fall_by_hand() -> None:
    """From 100 to 90 of 100 rows. Wilson's are 0.963006–1 and 0.825634–0.944772; a share of 1 has no correlation."""
    low, high = fall_interval(1.0, 0.9, 100)
    assert low == pytest.approx(0.1 - math.hypot(1 - 0.963006, 0.944772 - 0.9), abs=2e-6)
    assert high == pytest.approx(0.1 + (0.9 - 0.825634), abs=2e-6)


@pytest.mark.parametrize("n", [1, 7, 20])
def test_the_least_correlation_is_that_of_the_worst_pairing(n: int) -> None:
    for before, after in itertools.product(range(n + 1), repeat=2):
        p, q = before / n, after / n
        both = range(max(0, before + after - n), min(before, after) + 1)
        spread = math.sqrt(p * (1 - p) * q * (1 - q))
        told = min((each / n - p * q) / spread for each in both) if spread else 0
        assert least_correlation(p, q) == pytest.approx(told, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 500), st.floats(0, 1), st.floats(0, 1))
def test_a_fall_lies_in_its_interval_and_turns_round(n: int, before: float, after: float) -> None:
    low, high = fall_interval(before, after, n)
    assert low - 1e-9 <= before - after <= high + 1e-9
    back_low, back_high = fall_interval(after, before, n)
    assert (back_low, back_high) == pytest.approx((-high, -low), abs=1e-9)
    wider_low, wider_high = fall_interval(before, after, n, confidence=0.99)
    assert wider_low <= low + 1e-12
    assert wider_high >= high - 1e-12
    (l1, u1), (l2, u2) = wilson(before, n), wilson(after, n)
    unpaired = (
        before - after - math.hypot(before - l1, u2 - after),
        before - after + math.hypot(u1 - before, after - l2),
    )
    assert low <= unpaired[0] + 1e-9
    assert high >= unpaired[1] - 1e-9


@pytest.mark.parametrize("cells", [(0.7, 0.2, 0.1, 0.0), (0.8, 0.1, 0.0, 0.1), (0.72, 0.18, 0.08, 0.02)])
def test_the_interval_holds_the_true_fall_however_rows_are_paired(cells: tuple[float, ...]) -> None:
    """Rows drawn 2,000 times: right both times, before only, after only, never."""
    n = 150
    drawn = np.random.default_rng(3).multinomial(n, cells, size=2000)
    before, after = (drawn[:, 0] + drawn[:, 1]) / n, (drawn[:, 0] + drawn[:, 2]) / n
    true = cells[1] - cells[2]
    found = [fall_interval(p, q, n) for p, q in zip(before, after, strict=True)]
    assert np.mean([low <= true <= high for low, high in found]) >= 0.94


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
@example(3, 1, 1, 1)  # eh − fg = 2 is less than n/2 = 3
def test_the_correlation_of_counted_rows(e: int, f: int, g: int, h: int) -> None:
    """The table as Newcombe writes it: e right twice, f before only, g after only, h never."""
    n = e + f + g + h
    if n == 0:
        return
    found = paired_correlation((e + f) / n, n, f, g)
    sums = (e + f) * (g + h) * (e + g) * (f + h)
    numerator = e * h - f * g
    corrected = max(numerator - n / 2, 0) if e * h > f * g else numerator
    assert found == pytest.approx(corrected / math.sqrt(sums) if sums else 0.0, abs=1e-12)
    assert paired_correlation((e + g) / n, n, g, f) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("cells", [(0.7, 0.2, 0.1, 0.0), (0.8, 0.1, 0.0, 0.1), (0.85, 0.03, 0.02, 0.1)])
def test_counted_rows_make_the_interval_narrower_and_it_still_holds_the_true_fall(cells: tuple[float, ...]) -> None:
    n = 150
    drawn = np.random.default_rng(3).multinomial(n, cells, size=2000)
    true, inside, widths = cells[1] - cells[2], [], []
    for both, lost, gained, _ in drawn.tolist():
        before, after = (both + lost) / n, (both + gained) / n
        low, high = fall_interval(before, after, n, correlation=paired_correlation(before, n, lost, gained))
        unknown = fall_interval(before, after, n)
        assert low >= unknown[0] - 1e-9
        assert high <= unknown[1] + 1e-9
        inside.append(low <= true <= high)
        widths.append((high - low) / (unknown[1] - unknown[0]))
    assert np.mean(inside) >= 0.94
    assert np.mean(widths) < (0.8 if cells[3] else 1 + 1e-9)


def test_differences_are_paired_by_seed_or_of_independent_means(scipy_stats: Any) -> None:
    """Against scipy, in float64."""
    ours, theirs = {1: 2.0, 2: 3.5, 3: 5.0}, {1: 1.0, 2: 2.9, 3: 3.6}
    paired = scipy_stats.ttest_rel(list(ours.values()), list(theirs.values())).confidence_interval()
    mean, half, pairs = seed_difference(ours, theirs)
    assert (mean - half, mean + half) == pytest.approx(tuple(paired))
    assert pairs == 3
    few = {1: 1.0, 2: 2.9, **dict.fromkeys(range(20, 30), 30.0)}
    assert seed_difference(ours, few).pairs == 0
    outlier = {**theirs, 4: 90.0}
    assert seed_difference(ours, outlier) == (mean, half, 3)  # of the seeds that both have
    others = {7: 1.0, 8: 2.9, 9: 3.6, 10: 0.2}
    mean, half, pairs = seed_difference(ours, others)
    assert mean == pytest.approx(sum(ours.values()) / 3 - sum(others.values()) / 4)
    interval = scipy_stats.ttest_ind(list(ours.values()), list(others.values()), equal_var=False).confidence_interval()
    expected = (interval.high - interval.low) / 2
    assert expected - 1e-9 <= half <= 1.1 * expected  # the degrees of freedom are rounded down
    assert seed_difference({1: 2.0}, {1: 1.0})[0] == 1.0
    assert math.isnan(seed_difference({1: 2.0}, {1: 1.0})[1])
    assert math.isnan(seed_difference({}, {1: 1.0})[0])


def test_two_pairs_or_more_and_half_of_the_seeds_are_paired() -> None:
    """By hand: of two seeds in common among four the differences are 1 and 0.5, of one among two they are none."""
    ours, theirs = {1: 2.0, 2: 3.5, 3: 9.0, 4: 9.5}, {1: 1.0, 2: 3.0, 5: 0.0, 6: 0.0}
    assert seed_difference(ours, theirs)[::2] == (0.75, 2)
    assert seed_difference(ours, {**theirs, 7: 0.0}).pairs == 0
    found = seed_difference({1: 2.0, 2: 4.0}, {1: 1.0, 3: 9.0})
    assert (found.value, found.pairs, found.has_interval) == (-2.0, 0, True)


def test_equal_differences_have_no_interval() -> None:
    """Two seeds of few test rows often differ by the same number of rows, which excludes no 0."""
    ours, theirs = {1: 75.0, 2: 50.0}, {1: 62.5, 2: 37.5}
    found = seed_difference(ours, theirs)
    assert (found.value, found.pairs, found.has_interval) == (12.5, 2, False)
    assert difference_interval([0.1 + 0.2, 0.3]).overlaps is None
    assert seed_difference({1: 75.0, 2: 75.0}, {3: 50.0, 4: 50.0}).has_interval is False
    assert seed_difference(ours, ours) == (0, 0, 2)
    assert seed_difference({1: 75.0, 2: 75.0}, {3: 75.0, 4: 75.0}) == (0, 0, 0)
    assert difference_interval([1.0, 3.0]) == t_interval([1.0, 3.0])


def test_what_rounding_left_of_equal_scores_is_no_difference() -> None:
    """Thirds of a hundred differ by 7e-15 in both seeds, and were said to differ beyond their interval of no width."""
    left = 100 / 3 - (100 - 200 / 3)
    assert left != 0
    ours, theirs = {1: 100 / 3, 2: 100 / 3}, {1: 100 / 3 - left, 2: 100 / 3 - left}
    assert difference_interval([left, left]).overlaps is True
    assert seed_difference(ours, theirs) == (0, 0, 2)
    assert seed_difference(ours, {seed + 2: value for seed, value in theirs.items()}) == (0, 0, 0)
