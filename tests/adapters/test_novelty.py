"""The test of novelty against its definition, and how often it errs: on vectors made as query vectors are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.adapters.novelty import DRAWS, Novelty, check_separable, find_known_task, novelty
from regard.errors import UserError

WIDTH, WORDS, LENGTH = 384, 200, 12
Kind = Callable[[int, int], Tensor]


def kind(number: int, width: int = WIDTH) -> Kind:
    """Rows of a kind of its own: the highest value of each feature among words, drawn as often as the kind has them."""
    table = torch.randn(WORDS, width, generator=torch.Generator().manual_seed(0))
    often = torch.rand(WORDS, generator=torch.Generator().manual_seed(1000 + number)) ** 6

    def rows(many: int, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        words = torch.multinomial(often, many * LENGTH, replacement=True, generator=random)
        return table[words.view(many, LENGTH)].amax(1)

    return rows


def energy_written_out(x: list[list[float]], y: list[list[float]]) -> tuple[float, float]:
    """2 E|x − y| − E|x − x'| − E|y − y'| and E|x − y|, pair by pair, of features in units of their deviation."""
    units = [torch.tensor(column, dtype=torch.float64).std(correction=0).item() or 1.0 for column in zip(*x, *y)]  # noqa: B905

    def mean(pairs: list[tuple[list[float], list[float]]]) -> float:
        return sum(
            math.sqrt(sum(((a - b) / u) ** 2 for a, b, u in zip(one, other, units, strict=True)))
            for one, other in pairs
        ) / len(pairs)

    between = mean(list(itertools.product(x, y)))
    within = [mean(list(itertools.combinations(rows, 2))) for rows in (x, y)]
    return 2 * between - sum(within), between


def test_the_statistic_is_its_definition() -> None:
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(5, 4, generator=random), 1 + 2 * torch.randn(7, 4, generator=random)
    x[:, 2] = y[:, 2] = 0.25  # a feature that says nothing
    energy, between = energy_written_out(x.double().tolist(), y.double().tolist())
    found = novelty(x, y)
    assert found.statistic == pytest.approx(energy / (2 * between), rel=1e-12)
    assert found.statistic > 0.05


def test_p_is_the_share_of_all_ways_to_deal_rows_out() -> None:
    random = torch.Generator().manual_seed(5)
    x, y = torch.randn(4, 3, generator=random), 0.8 + torch.randn(4, 3, generator=random)
    both = [*x.double().tolist(), *y.double().tolist()]
    here, as_large = energy_written_out(both[:4], both[4:])[0], 0
    ways = list(itertools.combinations(range(8), 4))
    for chosen in ways:
        parts = [both[number] for number in chosen], [both[number] for number in range(8) if number not in chosen]
        as_large += energy_written_out(*parts)[0] >= here - 1e-9
    assert 0.01 < as_large / len(ways) < 0.9
    assert novelty(x, y, draws=20000).p == pytest.approx(as_large / len(ways), abs=0.01)


def test_the_order_of_rows_and_the_units_of_features_do_not_matter() -> None:
    x, y = kind(1)(30, 1), kind(1)(20, 2)
    found = novelty(x, y, seed=4)
    random = torch.Generator().manual_seed(0)
    mixed = x[torch.randperm(30, generator=random)], y[torch.randperm(20, generator=random)]
    assert novelty(*mixed, seed=4) == found
    units = torch.rand(WIDTH, generator=random) * 8 + 0.25
    other = novelty(x.double() * units + 3, y.double() * units + 3, seed=4)
    assert other.statistic == pytest.approx(found.statistic, abs=1e-9)
    assert other.p == pytest.approx(found.p, abs=0.005)
    assert 0.02 < found.p < 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("many, kept, width", [(100, 20, 384), (40, 40, 384), (8, 8, 16), (20, 30, 1024)])
def test_false_alarms_are_as_many_as_is_said(many: int, kept: int, width: int) -> None:
    """Of 200 portions of the kind that is kept, 10 are expected at .05 and 40 at .2: bounds of three deviations."""
    rows = kind(7, width)
    found = [novelty(rows(many, 2 * one), rows(kept, 2 * one + 1), draws=99, seed=one).p for one in range(200)]
    assert 1 <= sum(p <= 0.05 for p in found) <= 19
    assert 23 <= sum(p <= 0.2 for p in found) <= 57


@pytest.mark.sample(1)
@pytest.mark.parametrize("many, kept", [(100, 20), (50, 50), (30, 20)])
def test_what_is_of_another_kind_is_found_to_be(many: int, kept: int) -> None:
    found = [novelty(kind(one)(many, 1), kind(one + 1)(kept, 2), seed=one) for one in range(20)]
    assert all(one.p <= 0.01 for one in found)
    assert min(one.statistic for one in found) > 0.01


@pytest.mark.exhaustive
def test_of_many_kinds_each_is_recognised_and_a_new_one_is_not() -> None:
    kept = [kind(one)(40, one) for one in range(12)]

    def which(rows: Tensor) -> int | None:
        return find_known_task([novelty(rows, one, seed=place) for place, one in enumerate(kept)], alarm=0.001)

    assert [which(kind(one)(60, 100 + one)) for one in range(12)] == list(range(12))
    assert [which(kind(one)(60, 100 + one)) for one in range(12, 16)] == [None] * 4


def test_rows_that_are_a_part_of_those_kept_are_no_news() -> None:
    rows = kind(3)(60, 1)
    assert novelty(rows, rows[:20]).p > 0.5


def test_rows_that_are_all_the_same_say_nothing() -> None:
    assert novelty(torch.ones(5, 3), torch.ones(4, 3)) == Novelty(0.0, 1.0)
    apart = novelty(torch.ones(9, 3), torch.zeros(9, 3))
    assert apart.statistic == pytest.approx(1, abs=1e-12)
    assert apart.p == pytest.approx(1 / (DRAWS + 1), abs=1e-9)


def test_a_seed_is_a_draw_and_nothing_else() -> None:
    x, y = kind(1)(30, 1), kind(1)(20, 2)
    found = [novelty(x, y, seed=seed) for seed in (1, 1, 2, 3)]
    assert found[0] == found[1]
    assert len({one.p for one in found}) > 1
    assert len({one.statistic for one in found}) == 1
    assert max(one.p for one in found) - min(one.p for one in found) < 0.1


def test_the_likeliest_kind_is_taken_and_the_least_unlike_where_it_may_be() -> None:
    new, odd, like, liker = Novelty(0.2, 0.001), Novelty(0.05, 0.01), Novelty(0.01, 0.3), Novelty(0.02, 0.6)
    assert find_known_task([], alarm=0.01) is None
    assert find_known_task([new, like, liker, odd], alarm=0.01) == 2
    assert find_known_task([Novelty(0.02, 0.3), like], alarm=0.01) == 1
    assert find_known_task([new, odd], alarm=0.01) is None
    assert find_known_task([new, odd], alarm=0.009) == 1
    assert find_known_task([new, odd], alarm=0.01, reuse=0.95) == 1
    assert find_known_task([new, odd], alarm=0.01, reuse=0.96) is None
    assert find_known_task([], alarm=0.01, reuse=0.5) is None


def test_few_rows_cannot_tell() -> None:
    assert [check_separable(2, 2, alarm) for alarm in (0.16, 0.17)] == [False, True]
    assert check_separable(5, 5, 0.01)


@pytest.mark.parametrize(
    "vectors, kept, told",
    [
        (torch.zeros(1, 3), torch.zeros(4, 3), r"vectors: expected at least 2 rows of features, got shape \(1, 3\)"),
        (torch.zeros(4, 3), torch.zeros(3), r"reference: expected at least 2 rows of features, got shape \(3,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 2), "vectors: expected 2 features as in reference, got 3"),
        (torch.zeros(4, 3), torch.full((4, 3), torch.inf), "reference: expected finite numbers, got others"),
    ],
)
def test_what_cannot_be_compared_is_refused(vectors: Tensor, kept: Tensor, told: str) -> None:
    with pytest.raises(UserError, match=told):
        novelty(vectors, kept)
