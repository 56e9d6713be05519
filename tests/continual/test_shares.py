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


def test_seven_of_a_hundred_steps_warm_up() -> None:
    assert count_warmup_steps(TrainingBudget(warmup_ratio=0.07), 100) == 7
