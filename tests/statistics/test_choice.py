"""Naming statistics."""

from __future__ import annotations

from typing import Any

import pytest

from regard.commands.measure.config import MeasureConfig
from regard.errors import UserError
from regard.statistics import (
    ALL,
    DEFAULT,
    STATISTICS,
    PerLayer,
    select_statistics,
    statistic_factories,
    statistic_names,
)
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


def test_groups_stand_in_lists_beside_statistics_of_ones_own() -> None:
    """A statistic beside a group takes the place of the one of its name."""
    mine = SinkRate((0.1,))
    assert [s.name for s in select_statistics(["default"])] == list(DEFAULT)
    for wanted in ([mine, "default"], ["default", mine]):
        chosen = select_statistics(wanted)
        assert sorted(s.name for s in chosen) == sorted(DEFAULT)
        assert mine in chosen
    names = [s.name for s in select_statistics(["default", "all", " default ", "row_sum"])]
    assert sorted(names) == sorted(ALL)
    with pytest.raises(UserError, match="none twice"):
        select_statistics(["default", mine, "sink_rate"])


def test_measure_takes_groups_beside_statistics_of_ones_own() -> None:
    mine = SinkRate((0.1,))
    assert MeasureConfig(statistics=("default", mine)).statistics == (*DEFAULT[1:], mine)


def test_needs_are_any_set() -> None:
    class Own(SinkRate):
        name = "own"

    wanted: Any = {"column_mass": 1}.keys()
    own = Own((0.1,))
    own.needs = wanted
    assert list(statistic_factories([own])) == ["own"]


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"needs": frozenset({"column_mass"})}, "Own has no name"),
        ({"name": "own"}, "Own has no needs"),
        ({"name": "own", "needs": ("column_mass",)}, "statistic own: expected needs as a set"),
    ],
)
def test_a_statistic_without_what_it_must_say(attributes: dict[str, object], message: str) -> None:
    own = type("Own", (PerLayer,), {**attributes, "layer_values": lambda self, layer: ()})()
    with pytest.raises(UserError, match=message):
        select_statistics([own])


def test_a_measured_statistic_says_what_it_is() -> None:
    body = {"name": "own", "needs": {"column_mass"}, "layer_values": lambda self, layer: ()}
    own = type("Own", (PerLayer,), body)()
    assert select_statistics([own]) == [own]
    with pytest.raises(UserError, match="statistic own: expected its info"):
        MeasureConfig(statistics=(own,))


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
