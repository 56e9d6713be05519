"""Naming statistics."""

from __future__ import annotations

import pytest

from regard.errors import UserError
from regard.statistics import DEFAULT, STATISTICS, select_statistics, statistic_names
from regard.statistics.sinks import SinkRate


def test_default_and_all_and_lists() -> None:
    assert statistic_names("default") == DEFAULT
    of_one_forward = tuple(name for name in STATISTICS if name != "perturbation_spread")
    assert statistic_names("all") == statistic_names(" all ") == of_one_forward
    assert statistic_names("all, perturbation_spread") == (*of_one_forward, "perturbation_spread")
    assert statistic_names("entropy, sink_rate") == ("entropy", "sink_rate")
    assert statistic_names(["entropy", "sink_rate"]) == ("entropy", "sink_rate")
    assert set(DEFAULT) <= set(STATISTICS)


def test_a_name_given_twice_is_one_statistic() -> None:
    assert statistic_names("entropy,sink_rate,entropy") == ("entropy", "sink_rate")


@pytest.mark.parametrize("choose", [statistic_names, select_statistics])
@pytest.mark.parametrize("wanted", ["sink_rates", ["sink_rates"], ["entropy", "sink_rates"], "entropy,sink_rates"])
def test_an_unknown_name_is_answered_with_those_that_there_are(choose: object, wanted: object) -> None:
    with pytest.raises(UserError, match=r"unknown statistic 'sink_rates'; expected default, all, or some of: ") as info:
        choose(wanted)
    assert all(name in str(info.value) for name in STATISTICS)
    assert "\n" not in str(info.value)


def test_all_unknown_names_are_told_at_once() -> None:
    with pytest.raises(UserError, match="'one', 'two'"):
        statistic_names("one,entropy,two")


@pytest.mark.parametrize("choose", [statistic_names, select_statistics])
@pytest.mark.parametrize("wanted", ["", [], ","])
def test_none_is_an_error(choose: object, wanted: object) -> None:
    with pytest.raises(UserError, match="statistic"):
        choose(wanted)


def test_chosen_are_fresh_and_ready_made_ones_as_they_are() -> None:
    mine = SinkRate((0.1,))
    first, second = select_statistics(["entropy", mine]), select_statistics(["entropy", mine])
    assert first[1] is second[1] is mine
    assert first[0] is not second[0]
    assert [s.name for s in select_statistics("default")] == list(DEFAULT)


def test_one_statistic_twice_is_an_error() -> None:
    with pytest.raises(UserError, match=r"none twice, got: .*sink_rate.*sink_rate"):
        select_statistics(["sink_rate", SinkRate((0.1,))])


@pytest.mark.parametrize("epsilons", [(), (0.0,), (1.0,), (0.3, -0.1), (30.0,)])
def test_epsilon_lies_between_0_and_1(epsilons: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="epsilon must lie between 0 and 1"):
        SinkRate(epsilons)


def test_a_sink_needs_at_least_one_query() -> None:
    with pytest.raises(UserError, match="minimum_queries must be at least 1, got 0"):
        SinkRate(minimum_queries=0)
