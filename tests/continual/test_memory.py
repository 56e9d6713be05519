"""A memory: who is in it by Vitter's rule and by equal shares, what is drawn from it, and the batches with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.continual import memory
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.method import MethodState
from regard.continual.methods.baselines import Finetune
from regard.continual.methods.replay import ReplayConfig
from regard.continual.run import make_learner
from regard.continual.training_phase import ExampleRef
from regard.errors import UserError
from tests.continual.small_tasks import BUDGET, loaded, stream

ITEMS = [ExampleRef(0, row) for row in range(6)]


@pytest.fixture(scope="module")
def learner() -> Learner:
    return make_learner(stream(), Finetune(), loaded(), BUDGET, seed=1)


def outcomes(rows: int, capacity: int) -> Counter[frozenset[int]]:
    """Which rows are in a reservoir, over every way in which its draws can come out."""
    found: Counter[frozenset[int]] = Counter()
    for said in product(*(range(number + 1) for number in range(capacity, rows))):
        below, draw = _drawing(said)
        kept = memory.update_reservoir([], ITEMS[:rows], seen=0, capacity=capacity, draw=draw)
        assert below == list(range(capacity + 1, rows + 1))
        found[frozenset(item.row for item in kept)] += 1
    return found


def _drawing(said: tuple[int, ...]) -> tuple[list[int], Callable[[int], int]]:
    """What says these numbers one after the other, and a list of what it was asked."""
    asked, numbers = list[int](), iter(said)

    def draw(below: int) -> int:
        asked.append(below)
        return next(numbers)

    return asked, draw


# -- a reservoir ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, capacity", [(4, 2), (5, 2), (6, 3), (5, 1)])
def test_every_set_of_examples_is_in_a_reservoir_with_the_same_chance(rows: int, capacity: int) -> None:
    found = outcomes(rows, capacity)
    assert len(found) == comb(rows, capacity)
    assert len(set(found.values())) == 1
    assert all(len(each) == capacity for each in found)


def test_a_reservoir_goes_on_with_what_has_come_before() -> None:
    draws = iter([2, 1, 5, 0])
    whole = memory.update_reservoir([], ITEMS, seen=0, capacity=2, draw=lambda below: next(draws))
    draws = iter([2, 1, 5, 0])
    part = memory.update_reservoir([], ITEMS[:3], seen=0, capacity=2, draw=lambda below: next(draws))
    assert part == [ExampleRef(0, 0), ExampleRef(0, 1)]
    assert memory.update_reservoir(part, ITEMS[3:], seen=3, capacity=2, draw=lambda below: next(draws)) == whole
    assert whole == [ExampleRef(0, 5), ExampleRef(0, 3)]


def test_a_reservoir_that_is_not_full_draws_nothing() -> None:
    def never(below: int) -> int:
        raise AssertionError

    assert memory.update_reservoir(ITEMS[:2], ITEMS[2:4], seen=2, capacity=4, draw=never) == ITEMS[:4]


# -- equal shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, capacity, expected",
    [
        ([9, 9, 9], 7, [3, 2, 2]),
        ([1, 9, 9], 7, [1, 3, 3]),
        ([2, 2], 7, [2, 2]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([], 5, []),
    ],
)
def test_shares_are_dealt_one_at_a_time(sizes: list[int], capacity: int, expected: list[int]) -> None:
    assert memory.allocate(sizes, capacity) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 30))
def test_shares_fill_the_memory_evenly_and_only_shrink(sizes: list[int], capacity: int) -> None:
    found = memory.allocate(sizes, capacity)
    assert sum(found) == min(capacity, sum(sizes))
    assert all(share <= size for share, size in zip(found, sizes, strict=True))
    short = [share for share, size in zip(found, sizes, strict=True) if share < size]
    assert all(share >= max(found) - 1 for share in short)
    fewer = memory.allocate(sizes[:-1], capacity)
    assert all(now <= then for now, then in zip(found, fewer, strict=False))


def test_a_balanced_memory_keeps_the_first_of_each_group() -> None:
    items = [ExampleRef(0, 0), ExampleRef(0, 1), ExampleRef(0, 2), ExampleRef(1, 0), ExampleRef(1, 1)]
    found = memory.balance_groups(items, capacity=3, group=lambda item: item.task)
    assert found == [ExampleRef(0, 0), ExampleRef(0, 1), ExampleRef(1, 0)]


def test_a_memory_that_is_balanced_has_as_many_of_each_class(learner: Learner) -> None:
    kept, config = MethodState(), memory.MemoryConfig(memory_size=11, storage_policy="balanced")
    for task, many in enumerate(([6, 5], [3, 2, 2, 2, 2], [2, 2, 2, 2, 1, 1, 1])):
        before = set(kept.examples)
        memory.store_examples(learner, kept, config, task)
        labels = Counter(
            (item.task, int(learner.encoded[item.task, "train"].labels[item.row])) for item in kept.examples
        )
        assert sorted(labels.values(), reverse=True) == many
        assert all(item.task == task or item in before for item in kept.examples)


def test_what_is_kept_depends_on_the_seed_alone(learner: Learner) -> None:
    other = make_learner(stream(), Finetune(), loaded(seed=5), BUDGET, seed=2)
    again = make_learner(stream(), Finetune(), loaded(seed=5), BUDGET, seed=1)
    for store in ("reservoir", "balanced"):
        found = []
        for each in (learner, again, other):
            kept = MethodState()
            for task in range(3):
                memory.store_examples(each, kept, memory.MemoryConfig(memory_size=7, storage_policy=store), task)
            assert len(set(kept.examples)) == len(kept.examples) == 7
            found.append(kept)
        assert found[0] == found[1] != found[2]
        assert found[0].values == ({"seen": 42} if store == "reservoir" else {})


# -- what is drawn --------------------------------------------------------------------------------------


def test_what_is_drawn_is_a_function_of_seed_and_step() -> None:
    first = [memory.sample_memory(ITEMS, 4, seed=3, step=step) for step in range(20)]
    assert first == [memory.sample_memory(ITEMS, 4, seed=3, step=step) for step in range(20)]
    assert first != [memory.sample_memory(ITEMS, 4, seed=4, step=step) for step in range(20)]
    assert len({tuple(each) for each in first}) > 15
    assert all(len(set(each)) == 4 for each in first)
    assert sorted(memory.sample_memory(ITEMS, 9, seed=0, step=0)) == ITEMS


def test_each_example_is_drawn_as_often_as_the_others() -> None:
    steps = 3000
    found = Counter(item for step in range(steps) for item in memory.sample_memory(ITEMS, 2, seed=0, step=step))
    expected, deviation = steps / 3, (steps * 2 / 9) ** 0.5
    assert all(abs(found[item] - expected) < 4 * deviation for item in ITEMS)


# -- batches --------------------------------------------------------------------------------------------


def remembering(*rows: int, **settings: int) -> memory.MemoryMethod:
    method = memory.MemoryMethod(memory.MemoryConfig(**settings))  # type: ignore[arg-type]
    method.state.examples = [ExampleRef(0, row) for row in rows]
    return method


def items_of(rows: dict[str, torch.Tensor]) -> list[ExampleRef]:
    """The examples of a batch that count."""
    listed = zip(rows["tasks"].tolist(), rows["rows"].tolist(), rows["labels"].tolist(), strict=True)
    return [ExampleRef(task, row) for task, row, label in listed if label != IGNORE_INDEX]


def test_batches_beside_a_memory_are_those_of_fine_tuning_and_more(learner: Learner) -> None:
    stage, method = learner.fine_tuning_phase(), remembering(1, 4, 7, replay_batch_size=2)
    learner.task = 1
    plain = learner.epoch_batches(learner.items(1), stage)
    found = method.replay_batches(learner, 1, stage)
    assert (found.steps, found.size) == (plain.steps, 6)
    for step in range(found.steps):
        rows, new = found.rows(step), items_of(plain.rows(step))
        assert {len(value) for value in rows.values()} == {6}
        assert items_of(rows)[: len(new)] == new
        old = items_of(rows)[len(new) :]
        assert len(old) == 2
        assert set(old) < set(method.state.examples)


def test_a_small_memory_is_drawn_whole(learner: Learner) -> None:
    learner.task = 1
    found = remembering(1, 4).replay_batches(learner, 1, learner.fine_tuning_phase())
    rows = found.rows(0)
    assert found.size == BUDGET.batch_size + 2
    assert sorted(items_of(rows)[4:]) == [ExampleRef(0, 1), ExampleRef(0, 4)]


@pytest.mark.parametrize("interval, expected", [(1, "nonononono"), (2, "nnonnonnon"), (4, "nnnnonnnno"), (20, "n")])
def test_one_batch_of_the_memory_follows_each_interval(interval: int, expected: str, learner: Learner) -> None:
    learner.task = 1
    stage = learner.fine_tuning_phase()
    plain = learner.epoch_batches(learner.items(1), stage)
    found = remembering(1, 4, 7, replay_batch_size=3).replay_batches(learner, 1, stage, interval=interval)
    assert found.steps == plain.steps + plain.steps // interval
    batches = [items_of(found.rows(step)) for step in range(found.steps)]
    kinds = "".join("o" if {item.task for item in each} == {0} else "n" for each in batches)
    assert kinds.startswith(expected)
    assert kinds.count("o") == plain.steps // interval
    new = [each for each, kind in zip(batches, kinds, strict=True) if kind == "n"]
    assert new == [items_of(plain.rows(step)) for step in range(plain.steps)]
    assert all(len(each) == 3 for each, kind in zip(batches, kinds, strict=True) if kind == "o")
    assert found.size == BUDGET.batch_size


@pytest.mark.parametrize(
    "said, told",
    [
        ({"memory_size": 0}, "memory_size: expected a whole number of at least 1, got 0"),
        ({"memory_size": "2.5"}, "memory_size: expected a whole number, got '2.5'"),
        ({"memory_size": True}, "memory_size: expected a whole number of at least 1, got True"),
        ({"replay_batch_size": -1}, "replay_batch_size: expected a whole number of at least 0, got -1"),
        ({"storage_policy": "all"}, "storage_policy: expected one of reservoir, balanced, got 'all'"),
        ({"replay_mode": "some"}, "replay_mode: expected one of batch, interval, merge, got 'some'"),
        ({"replay_interval": 0}, "replay_interval: expected a whole number of at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be(said: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as raised:
        ReplayConfig.parse(said)
    assert str(raised.value) == told


def test_settings_come_from_texts() -> None:
    assert ReplayConfig.parse({"memory_size": "9", "replay_mode": "merge"}) == replace(
        ReplayConfig(), memory_size=9, replay_mode="merge"
    )
