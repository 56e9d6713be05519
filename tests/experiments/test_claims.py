"""The rules that judge claims."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.common.claims import (
    AGAINST,
    AS_PUBLISHED,
    IN_PART,
    MARGIN,
    MIN_RUNS,
    UNDECIDED,
    Claim,
    above,
    at_least,
    at_most,
    below,
    format_difference,
    format_interval,
    judge_claims,
    near,
    verdict,
)
from experiments.common.comparison import paired
from experiments.common.parts import join_words
from regard.runs.intervals import Interval


def interval(low: float, high: float, n: int = MIN_RUNS) -> Interval:
    return Interval(n=n, mean=(low + high) / 2, std=1.0, ci_low=low, ci_high=high)


@pytest.mark.parametrize(
    "low, high, least, most",
    [
        (2.0, 3.0, True, False),
        (2.1, 3.0, True, False),
        (1.0, 2.0, None, True),
        (1.0, 1.9, False, True),
        (1.0, 3.0, None, None),
        (2.0, 2.0, True, True),
    ],
)
def test_a_bound_is_kept_where_the_whole_interval_keeps_it(
    low: float, high: float, least: bool | None, most: bool | None
) -> None:
    assert at_least(interval(low, high), 2.0) is least
    if low != 2.0 or high == 2.0:
        assert at_most(interval(low, high), 2.0) is most


def test_too_few_runs_leave_a_bound_open() -> None:
    for decide in (at_least, at_most):
        assert decide(interval(5.0, 6.0, n=MIN_RUNS - 1), 0.0) is None
        assert decide(interval(math.nan, math.nan, n=1), 0.0) is None
        assert decide(None, 0.0) is None


def test_a_margin_may_be_said() -> None:
    assert near(interval(-2.0, 2.0), 2.0) is True
    assert near(interval(-2.0, 2.0), 1.0) is None
    assert near(interval(1.5, 2.0), 1.0) is False


def around(mean: float, half: float, n: int = 5) -> Interval:
    return Interval(n=n, mean=mean, std=1.0, ci_low=mean - half, ci_high=mean + half)


def test_a_difference_counts_if_its_interval_excludes_zero() -> None:
    assert above(around(1.0, 0.9)) is True
    assert above(around(-1.0, 0.9)) is False
    assert above(around(1.0, 1.0)) is None
    assert above(around(1.0, 0.9, n=2)) is None
    assert above(around(1.0, math.nan, n=1)) is None
    assert above(None) is None
    assert [below(around(mean, 0.9)) for mean in (1.0, -1.0, 0.5)] == [False, True, None]


def test_runs_that_all_differ_by_the_same_decide_nothing() -> None:
    """Scores of few rows take few values: an interval of no width would exclude 0 whatever the number of runs."""
    apart = paired({0: 52.5, 1: 42.5, 2: 62.5}, {0: 50.0, 1: 40.0, 2: 60.0})
    assert apart is not None
    assert apart.mean == pytest.approx(2.5)
    assert [above(apart), below(apart), near(apart), at_least(apart, 1), at_most(apart, 1)] == [None] * 5
    assert near(paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})) is True
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_near_is_an_interval_within_the_margin() -> None:
    assert near(around(0.0, MARGIN)) is True
    assert near(around(0.5, 0.51)) is None
    assert near(around(2.0, 1.0)) is None
    assert near(around(2.0, 0.99)) is False
    assert near(around(-2.0, 0.99)) is False
    assert near(around(0.0, 0.1, n=2)) is None


@pytest.mark.parametrize(
    "low, high, part",
    [
        (-0.2, -0.1, True),
        (-0.1, 0.04, True),
        (0.01, 0.05, True),
        (-0.1, 0.2, None),
        (0.04, 0.2, None),
        (0.1, 0.2, False),
    ],
)
def test_a_loss_is_no_higher_if_the_whole_interval_is_below_the_margin(
    low: float, high: float, part: bool | None
) -> None:
    assert at_most(interval(low, high), 0.05) is part


def test_parts_make_a_verdict() -> None:
    assert verdict([True, True]) == AS_PUBLISHED
    assert verdict([True, False]) == verdict([None, True]) == IN_PART
    assert verdict([None, False]) == AGAINST
    assert verdict([None, None]) == UNDECIDED


def test_numbers_in_text() -> None:
    assert format_interval(around(1.25, 0.5), 2) == "1.25 ± 0.50"
    assert format_interval(around(1.25, 0.5), 1, signed=True) == "+1.2 ± 0.5"
    assert format_interval(around(-0.01, 0.5), 1) == "0.0 ± 0.5"
    assert format_interval(around(1.0, math.nan, n=1), 1) == "1.0"
    assert format_interval(None, 1) == "–"
    assert format_difference(around(1.0, 0.5)).endswith("\\*")
    assert not format_difference(around(1.0, 1.5)).endswith("\\*")
    assert paired({1: 2.0}, {2: 1.0}) is None
    assert join_words(["a", "b", "c"]) == "a, b and c"


def test_a_figure_is_drawn_and_not_undecided() -> None:
    claim: Claim[Any] = Claim("Curves", "Losses of each task.", figure="curves")
    verdicts = judge_claims([claim], SimpleNamespace(judged_streams=("one",), has_row=lambda stream, row: False))
    assert [(verdict.word, "docs/figures/curves.svg" in verdict.evidence) for verdict in verdicts] == [("drawn", True)]
