"""What an interval says to a bound."""

import math

import pytest

from experiments.common.verdicts import FEWEST, at_least, at_most, near
from regard.runs.intervals import Interval


def interval(low: float, high: float, n: int = FEWEST) -> Interval:
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
        assert decide(interval(5.0, 6.0, n=FEWEST - 1), 0.0) is None
        assert decide(interval(math.nan, math.nan, n=1), 0.0) is None
        assert decide(None, 0.0) is None


def test_a_margin_may_be_said() -> None:
    assert near(interval(-2.0, 2.0), 2.0) is True
    assert near(interval(-2.0, 2.0), 1.0) is None
    assert near(interval(1.5, 2.0), 1.0) is False
