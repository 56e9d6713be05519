"""Batches of a stage: each example once an epoch, together with others of its length, a function of seed and step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regard.continual.training_phase import BATCHES_PER_SORT, Epochs, ExampleRef


def epochs(lengths: list[int], **options: int) -> Epochs:
    return Epochs(
        [ExampleRef(0, row) for row in range(len(lengths))], lengths, **{"size": 4, "epochs": 2, "seed": 1} | options
    )


@given(count=st.integers(1, 150), size=st.integers(1, 9), many=st.integers(1, 3), seed=st.integers(0, 2**48))
def test_each_once_an_epoch(count: int, size: int, many: int, seed: int) -> None:
    drawn = epochs([row % 13 + 1 for row in range(count)], size=size, epochs=many, seed=seed)
    per_epoch = -(-count // size)
    assert drawn.steps == many * per_epoch
    for epoch in range(many):
        batches = [drawn.at(epoch * per_epoch + place) for place in range(per_epoch)]
        assert sorted(item for batch in batches for item in batch) == [ExampleRef(0, row) for row in range(count)]
        assert sorted(map(len, batches))[1:] == [size] * (per_epoch - 1)
        assert all(batches)


@given(st.permutations(range(12)))
def test_a_step_is_a_function_of_itself(order: list[int]) -> None:
    """In whichever order steps are asked for, as after a run was resumed."""
    lengths = [row * 7 % 11 + 1 for row in range(22)]
    straight, jumping = epochs(lengths), epochs(lengths)
    expected = [straight.at(step) for step in range(12)]
    assert {step: jumping.at(step) for step in order} == dict(enumerate(expected))


def test_seeds_and_epochs_differ() -> None:
    lengths = [row % 9 + 1 for row in range(40)]
    first, other = epochs(lengths), epochs(lengths, seed=2)
    told = [[one.at(step) for step in range(20)] for one in (first, other)]
    assert told[0] != told[1]
    assert told[0][:10] != told[0][10:]


def test_rows_of_a_batch_are_about_as_long() -> None:
    """Among as many as `BATCHES_PER_SORT` batches, so that little of a batch is padding; batches come in any order."""
    lengths = [(row * 37) % 64 + 1 for row in range(4 * BATCHES_PER_SORT)]
    drawn = epochs(lengths, epochs=1)
    longest = [[lengths[item.row] for item in drawn.at(step)] for step in range(drawn.steps)]
    assert all(max(batch) - min(batch) <= 3 for batch in longest)
    assert [batch[0] for batch in longest] != sorted(batch[0] for batch in longest)
    padded = sum(4 * max(batch) for batch in longest)
    assert padded / sum(lengths) < 1.1


@given(rows=st.integers(1, 60), many=st.integers(0, 4), least=st.integers(0, 40), most=st.integers(1, 40))
def test_few_rows_get_more_epochs(rows: int, many: int, least: int, most: int) -> None:
    """Never fewer steps than the epochs have; a limit holds in any case, and no epochs are none."""
    of_epochs = -(-rows // 4) * many
    expected = max(of_epochs, least) if many else 0
    assert epochs([1] * rows, epochs=many, min_steps=least).steps == expected
    assert epochs([1] * rows, epochs=many, min_steps=least, max_steps=most).steps == min(expected, most)
    assert epochs([], epochs=many, min_steps=least).steps == 0
