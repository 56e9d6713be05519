"""Samples that wait for later ones give the numbers of samples that are added at once."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.statistics import DEFAULT, STATISTICS, Observation, Statistic, waiting_samples
from regard.statistics.sinks import ColumnMass

HEADS, LAYERS = 3, 2


def observation(samples: int, tokens: int, seed: int, *, joined: bool, early: bool = False) -> list[Observation]:
    """Return layers of random samples, as one observation or one each; every other sample is two tokens shorter."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(samples, *shape, generator=generator, dtype=torch.float64)

    length = torch.tensor([tokens - 2 * (index % 2) for index in range(samples)])
    ids = (rand(tokens) * 5).long()
    parts = []
    for layer in range(LAYERS):
        mass = rand(HEADS, tokens) / tokens
        tensors = {
            "column_mass": mass,
            "column_sum": mass,
            "column_square": mass * mass,
            **{name: rand(HEADS, tokens) for name in ("entropy", "distance", "key_norm", "value_norm")},
            "hidden_norm": rand(tokens),
            "direction": rand(4),
        }
        if early:
            tensors["early_query_count"] = torch.ones(samples, 1, tokens)
        parts.append(
            Observation(
                site="decoder", layer=layer, causal=True, length=length, keys=length, token_ids=ids, tensors=tensors
            )
        )
    if not joined:
        return parts
    first = parts[0]
    return [
        Observation(
            site="decoder",
            layer=0,
            more_layers=tuple(range(1, LAYERS)),
            causal=True,
            length=torch.cat([length] * LAYERS),
            keys=torch.cat([length] * LAYERS),
            token_ids=torch.cat([ids] * LAYERS),
            tensors={name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors},
        )
    ]


def numbers(statistic: Statistic) -> tuple[list[tuple[Any, ...]], np.ndarray]:
    """Return what the rows are of, and their values and standard errors: NaN where there is none."""
    rows = statistic.result()
    return [(*row[:5], row.n, row.site) for row in rows], np.array([row[5:7] for row in rows], dtype=np.float64)


def assert_same(actual: Statistic, *others: Statistic) -> None:
    """Compare the rows of one with those of each of the others."""
    places, expected = numbers(actual)
    assert places
    assert not np.isnan(expected[:, 0]).any()
    for found, values in map(numbers, others):
        assert found == places
        np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)


Batches = Sequence[tuple[int, int, bool, bool]]
BATCH = st.tuples(st.integers(1, 3), st.integers(9, 10), st.booleans(), st.booleans())


def observations(batches: Batches) -> list[list[Observation]]:
    return [
        observation(samples, tokens, seed, joined=joined, early=early)
        for seed, (samples, tokens, joined, early) in enumerate(batches)
    ]


@pytest.mark.parametrize("name", [name for name in DEFAULT if STATISTICS[name]().joins_batches])
@given(batches=st.lists(BATCH, min_size=1, max_size=7))
def test_they_are_those_of_single_batches(name: str, batches: Batches) -> None:
    make: Callable[[], Statistic] = STATISTICS[name]
    later, now = make(), make()
    for batch in observations(batches):
        later.add_later(batch)
        now.update(batch)
    copied, loaded, merged = deepcopy(later), make(), make()
    loaded.load(deepcopy(later).state())
    merged.merge(deepcopy(later))
    assert_same(now, copied, loaded, merged, later)


def test_reading_between_batches_adds_what_waits() -> None:
    later, now = ColumnMass(), ColumnMass()
    for seed in range(5):
        batch = observation(2, 9, seed, joined=True)
        later.add_later(batch)
        now.update(batch)
        assert_same(later, now)


def test_what_waits_does_not_survive_loading() -> None:
    statistic, other = ColumnMass(), ColumnMass()
    other.update(observation(2, 9, 0, joined=True))
    statistic.add_later(observation(2, 9, 1, joined=True))
    statistic.load(other.state())
    assert_same(statistic, other)


def test_batches_wait_up_to_a_number_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 2 samples, 3 heads and 9 keys are 108 entries: four of them fit into 449, and not five."""
    sizes: list[int] = []

    class Spy(ColumnMass):
        joins_batches = True

        def update(self, layers: Sequence[Observation]) -> None:
            sizes.append(len(layers[0].length))
            super().update(layers)

    def add(count: int) -> list[int]:
        sizes.clear()
        statistic = Spy()
        for seed in range(count):
            statistic.add_later(observation(2, 9, seed, joined=True))
        statistic.settle()
        return list(sizes)

    monkeypatch.setattr(waiting_samples, "MAX_BATCHES", 3)
    assert add(7) == [12, 12, 4]
    monkeypatch.setitem(waiting_samples.MAX_ENTRIES, "cpu", 449)
    monkeypatch.setattr(waiting_samples, "MAX_BATCHES", 32)
    assert add(6) == [16, 8]
    monkeypatch.setitem(waiting_samples.MAX_ENTRIES, "cpu", 100)  # a batch alone is too large to wait
    assert add(2) == [4, 4]


def test_other_statistics_take_each_batch_as_it_comes() -> None:
    class Own(ColumnMass):
        joins_batches = False

        def update(self, layers: Sequence[Observation]) -> None:
            seen.append(len(layers[0].length))
            super().update(layers)

    seen: list[int] = []
    statistic = Own()
    for seed in range(2):
        statistic.add_later(observation(2, 9, seed, joined=True))
    assert seen == [4, 4]


@pytest.mark.parametrize("joins", [False, True])
def test_a_class_that_counts_for_itself_gets_each_batch_unless_it_says_otherwise(joins: bool) -> None:
    class Counts(ColumnMass):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def update(self, layers: Sequence[Observation]) -> None:
            self.seen.append(len(layers[0].length) // LAYERS)

    class Joins(Counts):
        joins_batches = True

    statistic = Joins() if joins else Counts()
    for seed in range(3):
        statistic.add_later(observation(2, 9, seed, joined=True))
    assert statistic.seen == ([] if joins else [2, 2, 2])
    statistic.settle()
    assert statistic.seen == ([6] if joins else [2, 2, 2])


def test_statistics_of_the_package_take_several_batches() -> None:
    """But for those of matrices, which are summed as they come, and of two forwards."""
    alone = {name for name in STATISTICS if not STATISTICS[name]().joins_batches}
    assert alone == {"input_dependence", "perturbation_spread"}
