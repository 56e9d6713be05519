"""Shares of a count are those of the decimals that were given."""

import pytest

from regard.continual.shares import ceil_share, floor_share
from regard.continual.training_phase import TrainingBudget, count_warmup_steps


@pytest.mark.parametrize("percent", [1, 7, 14, 28, 29, 55, 57, 58, 99])
def test_a_share_of_a_hundred_is_its_percentage(percent: int) -> None:
    """0.07 · 100 is above 7 as a product of floats, 0.29 · 100 below 29."""
    assert ceil_share(percent / 100, 100) == floor_share(percent / 100, 100) == percent
    assert (ceil_share(percent / 100, 101), floor_share(percent / 100, 101)) == (percent + 1, percent)


@pytest.mark.parametrize("share, count", [(0.0, 0), (1e-3, 1), (1.0, 10)])
def test_bounds_of_a_share(share: float, count: int) -> None:
    assert (ceil_share(share, 10), floor_share(share, 10)) == (count, int(share * 10))


@pytest.mark.parametrize("top, bottom", [(1, 3), (5, 6), (29, 100), (2, 7), (999_999, 1_000_000)])
def test_a_fraction_that_python_computed_is_that_fraction(top: int, bottom: int) -> None:
    """1/3 is below a third as a float, and 5/6 above: as decimals of 16 digits they were 99 of 300 and 501 of 600."""
    for count in (bottom, 100 * bottom):
        expected = count * top // bottom
        assert ceil_share(top / bottom, count) == floor_share(top / bottom, count) == expected


def test_a_share_of_many_decimals_is_these() -> None:
    """Of a trillion, in which each decimal counts; none is near a short fraction."""
    assert floor_share(0.123456789012, 10**12) == ceil_share(0.123456789012, 10**12) == 123456789012
    assert (floor_share(1e-9, 10**9), ceil_share(1e-9, 10**9 + 1)) == (1, 2)


def test_seven_of_a_hundred_steps_warm_up() -> None:
    assert count_warmup_steps(TrainingBudget(warmup_ratio=0.07), 100) == 7
