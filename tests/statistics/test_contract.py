"""What every statistic promises, whatever it measures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.statistics import STATISTICS, Observation, Statistic, StatisticRow
from regard.statistics.columns import join_columns, make_columns
from regard.statistics.dependence import InputDependence
from regard.statistics.sink_tokens import CommonSinkRatio, SinksByTokenClass, SinkTokens
from regard.statistics.sinks import FirstMass, SecondarySinks, SinkDeviation, SinkRate
from regard.statistics.table import make_table

VARIANTS: dict[str, Callable[[], Statistic]] = {
    **STATISTICS,
    "sink_rate, several ε": lambda: SinkRate((0.1, 0.3, 0.5), minimum_queries=1),
    "sink_rate, two queries": lambda: SinkRate((0.2,), minimum_queries=2),
    "secondary_sinks, two ε": lambda: SecondarySinks((0.1, 0.3), minimum_queries=1),
    "first_mass, two": lambda: FirstMass(2),
    "sink_deviation, three": lambda: SinkDeviation(top=3),
    "common_sink_ratio, given": lambda: CommonSinkRatio({0, 3}),
    "common_sink_ratio, three, given": lambda: CommonSinkRatio([1, 2, 1], top=3),
    "common_sink_ratio, none given": lambda: CommonSinkRatio([]),
    "common_sink_ratio, three, found": lambda: CommonSinkRatio(top=3, frequent=0.25),
    "sinks_by_token_class, all": lambda: SinksByTokenClass({0, 3}, {1, 3}, (0.1, 0.3), minimum_queries=1),
    "input_dependence, five tokens": lambda: InputDependence(5),
}
POOLED = {
    "input_dependence",
    "input_dependence, five tokens",
    "common_sink_ratio",
    "common_sink_ratio, three, found",
}
"""Known of all samples together: no mean over something known of each."""

Document = tuple[int, int, int, bool]
"""Seed, length, keys of the encoder (0: none), and whether the decoder has a second layer."""

everywhere = pytest.mark.parametrize("new", [pytest.param(new, id=name) for name, new in VARIANTS.items()])
averages = pytest.mark.parametrize(
    "new", [pytest.param(new, id=name) for name, new in VARIANTS.items() if name not in POOLED]
)
seeds = st.integers(0, 10**6)


def documents(new: Callable[[], Statistic], *, fewest: int = 0, most: int = 6) -> st.SearchStrategy[list[Document]]:
    """Documents of any length, none too; for averages of matrices all of one length."""
    lengths = st.just(5) if isinstance(new(), InputDependence) else st.sampled_from([0, 1, 2, 3, 5, 8, 11])
    keys = st.just(5) if isinstance(new(), InputDependence) else st.sampled_from([0, 0, 1, 4, 9])
    return st.lists(st.tuples(seeds, lengths, keys, st.booleans()), min_size=fewest, max_size=most)


@pytest.fixture(scope="session")
def seen(observe: Callable[..., Observation], random_sample: Callable[..., Any]) -> Callable[..., list[Observation]]:
    """The observations of one batch of documents: every place with those that have it, padded with garbage."""
    made: dict[tuple[Document, str, int], Any] = {}

    def sample(document: Document, site: str, layer: int) -> Any:
        if (document, site, layer) not in made:
            seed, length, keys, _ = document
            first, second = {"decoder": (length, length), "encoder": (keys, keys), "cross": (length, keys)}[site]
            made[document, site, layer] = random_sample(seed, first, second, site, layer)
        return made[document, site, layer]

    def batch(some: Sequence[Document], width: int = 0, dtype: torch.dtype = torch.float64) -> list[Observation]:
        places = {
            ("encoder", 0): [d for d in some if d[2]],
            ("decoder", -1): list(some),
            ("decoder", 0): list(some),
            ("decoder", 1): list(some) if all(d[3] for d in some) else [],
            ("cross", 0): [d for d in some if d[2]],
        }
        return [observe([sample(d, *place) for d in ds], width, dtype) for place, ds in places.items() if ds]

    return batch


def measured(new: Callable[[], Statistic], *batches: list[Observation]) -> Statistic:
    statistic = new()
    for batch in batches:
        statistic.update(batch)
    return statistic


def through_bytes(statistic: Statistic, new: Callable[[], Statistic]) -> Statistic:
    """The same statistic as another process sees it."""
    state = statistic.state()
    assert all(isinstance(name, str) and tensor.is_contiguous() and tensor.is_cpu for name, tensor in state.items())
    other = new()
    other.load(safetensors.torch.load(safetensors.torch.save(state)))
    return other


def assert_same(found: Statistic, expected: Statistic, by_place: Callable[..., dict]) -> None:
    found_rows, expected_rows = by_place(found.result()), by_place(expected.result())
    assert found_rows.keys() == expected_rows.keys()
    for place, row in expected_rows.items():
        other = found_rows[place]
        assert other.n == row.n, place
        assert other.value == pytest.approx(row.value, rel=1e-9, abs=1e-9), place
        assert (other.standard_error is None) == (row.standard_error is None), place
        if row.standard_error is not None:
            assert other.standard_error == pytest.approx(row.standard_error, rel=1e-7, abs=1e-6), place
    if isinstance(found, SinkTokens):
        assert found.tokens() == expected.tokens()


@pytest.mark.every_value
@everywhere
def test_there_are_rows(new: Callable[[], Statistic], seen: Callable[..., list[Observation]]) -> None:
    """The observations here have the reductions that it needs; without them every test below would pass."""
    length = 5 if isinstance(new(), InputDependence) else 11
    rows = measured(new, seen([(number, length, length, True) for number in range(3)])).result()
    assert rows, "add its reductions to conftest.py"


@pytest.mark.sample(1)
@everywhere
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_stepwise_is_at_once_is_merged_in_any_order(
    new: Callable[[], Statistic], seen: Callable[..., list[Observation]], by_place: Callable[..., dict], data: Any
) -> None:
    """Cut into batches of any widths, spread over processes that send bytes, merged in any order."""
    every = data.draw(documents(new, fewest=1), label="documents")
    layers = bool(data.draw(st.booleans()))
    every = [(*d[:3], layers) for d in every]
    at_once = measured(new, seen(every))

    cuts = sorted(data.draw(st.lists(st.integers(1, len(every)), max_size=3)))
    shuffled = data.draw(st.permutations(every))
    parts = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(every)], strict=True)]
    width = 0 if isinstance(new(), InputDependence) else data.draw(st.sampled_from([0, 12, 15]), label="width")
    batches = [seen(part, width) for part in parts if part]
    assert_same(measured(new, *batches), at_once, by_place)

    processes = [measured(new, batch) for batch in batches] + [new()]
    if data.draw(st.booleans(), label="through bytes"):
        processes = [through_bytes(process, new) for process in processes]
    while len(processes) > 1:
        mine = processes.pop(data.draw(st.integers(0, len(processes) - 1)))
        other = data.draw(st.sampled_from(processes))
        before = other.result()
        mine.merge(other)
        assert other.result() == before, "merging changes what is merged"
        processes[processes.index(other)] = mine
    assert_same(processes[0], at_once, by_place)


@pytest.mark.sample(4)
@everywhere
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_rows_are_well_formed(
    new: Callable[[], Statistic], seen: Callable[..., list[Observation]], by_place: Callable[..., dict], data: Any
) -> None:
    every = data.draw(documents(new, fewest=1))
    statistic = measured(new, *[seen([document]) for document in every])
    rows = statistic.result()
    assert statistic.result() == rows
    by_place(rows)
    for row in rows:
        assert type(row) is StatisticRow
        assert row.statistic.startswith(statistic.name)
        assert type(row.value) is float
        assert math.isfinite(row.value)
        assert type(row.n) is int
        assert 1 <= row.n <= len(every)
        assert row.site in ("decoder", "encoder", "cross")
        for part in (row.layer, row.head, row.position):
            assert part is None or type(part) is int
        assert (row.epsilon is None) == (not row.statistic.endswith(("sink_rate", "secondary_sinks", "_share")))
        if row.standard_error is not None:
            assert type(row.standard_error) is float
            assert math.isfinite(row.standard_error)
            assert row.standard_error >= 0
            assert row.n > 1


@pytest.mark.sample(2)
@averages
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_value_is_the_mean_over_samples_with_its_standard_error(
    new: Callable[[], Statistic], seen: Callable[..., list[Observation]], by_place: Callable[..., dict], data: Any
) -> None:
    """Each document measured alone gives the sample that numpy averages; padding of the batch plays no part."""
    every = data.draw(documents(new, fewest=1))
    every = [(*d[:3], True) for d in every]
    alone: dict[tuple[Any, ...], list[float]] = {}
    total: dict[tuple[Any, ...], int] = {}
    for document in every:
        result = measured(new, seen([document])).result()
        for place, row in by_place(result).items():
            assert row.n == 1
            assert row.standard_error is None
            alone.setdefault(place, []).append(row.value)
        for place in {(row.site, row.layer) for row in result}:
            total[place] = total.get(place, 0) + 1
    statistic = measured(new, seen(every, 13))
    if isinstance(statistic, SinkTokens):  # a position that is not a sample's strongest has 0 there, without a row
        for place, values in alone.items():
            values += [0.0] * (total[place[1], place[2]] - len(values))
    rows = by_place(statistic.result())
    assert rows.keys() == alone.keys()
    for place, values in alone.items():
        assert rows[place].n == len(values), place
        assert rows[place].value == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9), place
        if len(values) < 2:
            assert rows[place].standard_error is None
        else:
            expected = np.std(values, ddof=1) / math.sqrt(len(values))
            assert rows[place].standard_error == pytest.approx(expected, rel=1e-6, abs=1e-6), place


@pytest.mark.sample(6)
@everywhere
def test_a_state_is_a_snapshot_and_loading_touches_no_other(
    new: Callable[[], Statistic], seen: Callable[..., list[Observation]]
) -> None:
    first, second = seen([(1, 5, 5, True), (2, 5, 5, True)]), seen([(3, 5, 5, True)])
    statistic = measured(new, first)
    before = statistic.result()
    state = statistic.state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    shallow = copy.copy(statistic)
    shallow.load(measured(new, second).state())
    assert statistic.result() == before
    statistic.update(second)
    assert state.keys() == kept.keys()
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    again = measured(new, second)
    again.load(state)
    assert again.result() == before


@pytest.mark.sample(6)
@everywhere
def test_merging_nothing_changes_nothing(new: Callable[[], Statistic], seen: Callable[..., list[Observation]]) -> None:
    statistic = measured(new, seen([(1, 5, 5, True)]))
    before = statistic.result()
    statistic.merge(new())
    assert statistic.result() == before
    empty = new()
    assert empty.result() == []
    assert through_bytes(empty, new).result() == []
    empty.merge(new())
    empty.update([])
    assert empty.result() == []
    empty.merge(statistic)
    assert empty.result() == before


@pytest.mark.sample(6)
@everywhere
def test_samples_of_padding_alone_do_not_count(
    new: Callable[[], Statistic], seen: Callable[..., list[Observation]], by_place: Callable[..., dict]
) -> None:
    assert measured(new, seen([(1, 0, 0, True), (2, 0, 0, True)], 7)).result() == []
    some = [(3, 5, 5, True), (4, 5, 5, True)]
    expected = measured(new, seen(some))
    found = measured(new, seen(some))
    found.update(seen([(1, 0, 0, True), (2, 0, 0, True)], 5))
    assert_same(found, expected, by_place)


@pytest.mark.sample(6)
@everywhere
def test_what_a_model_gives_in_single_precision_is_enough(
    new: Callable[[], Statistic], seen: Callable[..., list[Observation]], by_place: Callable[..., dict]
) -> None:
    some = [(seed, 5, 5, True) for seed in range(4)]
    expected = by_place(measured(new, seen(some)).result())
    found = by_place(measured(new, seen(some, dtype=torch.float32)).result())
    assert found.keys() == expected.keys()
    for place, row in expected.items():
        assert found[place].value == pytest.approx(row.value, rel=1e-4, abs=1e-4), place


@pytest.mark.every_value
@everywhere
def test_a_statistic_says_what_it_is(new: Callable[[], Statistic]) -> None:
    statistic = new()
    named = STATISTICS[statistic.name]()
    assert (named.name, type(named)) == (statistic.name, type(statistic))
    assert statistic.needs
    assert statistic.info.title
    assert statistic.info.description
    assert statistic.info.source


def test_every_need_is_something_that_the_tests_supply(seen: Callable[..., list[Observation]]) -> None:
    """So that no statistic above passes for want of anything to see."""
    supplied = {name for layer in seen([(1, 12, 12, True)]) for name in layer.tensors}
    assert {need for new in STATISTICS.values() for need in new().needs} <= supplied
    for new in STATISTICS.values():
        assert measured(new, seen([(1, 12, 12, True), (2, 12, 12, True)])).result(), new


@pytest.mark.every_value
@everywhere
def test_columns_are_the_rows(new: Callable[[], Statistic], seen: Callable[..., list[Observation]]) -> None:
    statistic = measured(new, seen([(number, 5, 5, True) for number in range(3)]))
    columns, rows = list(statistic.columns()), statistic.result()
    assert [row for part in columns for row in part.rows()] == rows
    pd.testing.assert_frame_equal(join_columns(columns), make_table(rows), check_exact=True)
    assert [row for part in make_columns(rows) for row in part.rows()] == rows
