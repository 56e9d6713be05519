"""Input dependence and average attention, against the matrices themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.statistics import Observation
from regard.statistics.dependence import InputDependence


def test_it_is_the_distance_from_the_average(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, 5) for seed in range(4)]
    measured = InputDependence()
    for some in (samples[:1], samples[1:]):
        measured.update([observe(some)])
    every = torch.stack([s.matrix for s in samples])
    mean = every.mean(0)
    torch.testing.assert_close(measured.mean_attention(), {("decoder", 0): mean})
    for head in range(2):
        away = sum(float((a[head] - mean[head]).square().sum()) for a in every)
        squares = sum(float(a[head].square().sum()) for a in every)
        assert value_of(measured.result(), head=head) == pytest.approx((away / 3) / (squares / 4))
    assert {(row.n, row.standard_error) for row in measured.result()} == {(4, None)}


def test_a_constant_head_depends_on_nothing(
    attention: Callable[..., Tensor], make: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    constant = attention(torch.Generator().manual_seed(0), 6, 6, causal=True)
    measured = InputDependence()
    measured.update([observe([make(constant)] * 3)])
    assert [row.value for row in measured.result()] == [pytest.approx(0, abs=1e-12)] * 2
    torch.testing.assert_close(measured.mean_attention()["decoder", 0], constant)


def test_heads_that_never_look_at_the_same_depend_on_all(
    make: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    """Of n disjoint permutations the average explains 1/n, no more than each explains of itself."""
    shifts = [torch.eye(4).double().roll(shift, 1)[None] for shift in range(4)]
    measured = InputDependence()
    measured.update([observe([make(matrix, site="encoder") for matrix in shifts])])
    assert [row.value for row in measured.result()] == [pytest.approx(1)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 9), count=st.integers(1, 5))
def test_it_lies_between_zero_and_one(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], seed: int, length: int, count: int
) -> None:
    for dtype in (torch.float32, torch.float64):
        measured = InputDependence()
        measured.update([observe([random_sample(seed + s, length) for s in range(count)], dtype=dtype)])
        assert all(0 <= row.value <= 1 for row in measured.result())


def test_only_whole_samples_of_one_length_count(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    """In a padded batch those without padding, of later batches those of that length; nothing of cross-attention."""
    measured = InputDependence()
    measured.update([observe([random_sample(1, 3), random_sample(2, 5)])])
    measured.update([observe([random_sample(3, 4)])])
    measured.update([observe([random_sample(4, 5)], width=6)])
    measured.update([observe([random_sample(5, 5, 5, "cross")])])
    assert {key: sums.samples for key, sums in measured.sums.items()} == {("decoder", 0): 1}
    assert measured.result() == []
    assert measured.single_lengths() == {"decoder": 5}
    torch.testing.assert_close(measured.mean_attention()["decoder", 0], random_sample(2, 5).matrix)
    given = InputDependence(4)
    given.update([observe([random_sample(1, 3)])])
    given.update([observe([random_sample(2, 4)])])
    torch.testing.assert_close(given.mean_attention()["decoder", 0], random_sample(2, 4).matrix)


def test_padded_samples_of_a_batch_are_no_part_of_the_value(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    whole = [random_sample(seed, 5) for seed in (1, 2)]
    alone, beside = InputDependence(), InputDependence()
    alone.update([observe(whole)])
    beside.update([observe([whole[0], random_sample(3, 4), whole[1]])])
    assert beside.result() == alone.result()
    assert len(alone.result()) == 2


def test_the_sites_of_a_model_may_differ_in_length(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    measured = InputDependence()
    for seed in range(2):
        measured.update([observe([random_sample(seed, 7, 7, "encoder")])])
        measured.update([observe([random_sample(seed, 4)])])
    assert {(row.site, row.n) for row in measured.result()} == {("encoder", 2), ("decoder", 2)}
    assert measured.single_lengths() == {}


def test_samples_of_another_length_than_the_first_do_not_count_when_they_are_merged(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    one, other = InputDependence(), InputDependence()
    one.update([observe([random_sample(1, 4), random_sample(2, 4)])])
    other.update([observe([random_sample(3, 5)])])
    one.merge(other)
    assert {(row.site, row.n) for row in one.result()} == {("decoder", 2)}
    assert all(matrix.shape[-1] == 4 for matrix in one.mean_attention().values())


def test_statistics_of_one_batch_in_float64_keep_sums_of_their_own(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    """Later samples are added to sums in place: to those of one statistic, of two that saw or were merged with it."""
    samples = [random_sample(seed, 5) for seed in range(3)]
    one, other, merged = InputDependence(), InputDependence(), InputDependence()
    first, second = observe(samples[:2]), observe(samples[2:])
    for measured in (one, other):
        measured.update([first])
    merged.merge(one)
    one.update([second])
    torch.testing.assert_close(first.tensors["weights"], samples[0].matrix + samples[1].matrix)
    half = {("decoder", 0): (samples[0].matrix + samples[1].matrix) / 2}
    torch.testing.assert_close(other.mean_attention(), half)
    torch.testing.assert_close(merged.mean_attention(), half)


def test_sums_of_inference_mode_go_on_outside_of_it_and_what_was_handed_out_stays(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    samples = [random_sample(seed, 5) for seed in range(3)]
    measured, restored, merged = InputDependence(), InputDependence(), InputDependence()
    with torch.inference_mode():
        measured.update([observe(samples[:1])])
        restored.load(measured.state())
    merged.merge(measured)
    states = [measured.state(), merged.state()]
    expected = [{name: value.clone() for name, value in state.items()} for state in states]
    for statistic in (measured, restored):
        statistic.update([observe(samples[1:])])
        mean = torch.stack([sample.matrix for sample in samples]).mean(0)
        torch.testing.assert_close(statistic.mean_attention(), {("decoder", 0): mean})
    for state in (states, [expected[0], merged.state()]):
        assert all(
            torch.equal(part[name], value)
            for part, old in zip(state, expected, strict=True)
            for name, value in old.items()
        )
