"""Means and variances that are merged, against numpy on all samples at once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.statistics.moments import RunningMoments


def assert_equals_numpy(moments: RunningMoments, values: np.ndarray, *, variance: float = 1e-12) -> None:
    np.testing.assert_array_equal(moments.count.numpy(), len(values))
    np.testing.assert_allclose(moments.mean.numpy(), values.mean(0), rtol=1e-12, atol=1e-12)
    expected = values.std(0, ddof=1) / np.sqrt(len(values))
    np.testing.assert_allclose(moments.standard_error().numpy(), expected, rtol=variance, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    seed=st.integers(0, 2**31),
    backwards=st.booleans(),
)
def test_merging_equals_numpy(sizes: list[int], seed: int, backwards: bool) -> None:
    values = np.random.default_rng(seed).normal(size=(sum(sizes), 2, 3))
    parts = np.split(values, np.cumsum(sizes)[:-1])
    total = RunningMoments()
    for part in reversed(parts) if backwards else parts:
        one = RunningMoments()
        one.add(torch.from_numpy(part))
        total.merge(one)
    assert_equals_numpy(total, values)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=8), seed=st.integers(0, 2**31))
def test_a_large_offset_does_not_drown_small_noise(sizes: list[int], seed: int) -> None:
    """Where Σx² − (Σx)²/n would have no digit left; a float64 near 1e8 itself has 1.5e-8 to tell numbers apart by."""
    values = 1e8 + np.random.default_rng(seed).normal(size=(sum(sizes), 2))
    total = RunningMoments()
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        total.add(torch.from_numpy(part))
    assert_equals_numpy(total, values, variance=1e-6)


def test_the_last_axis_grows_and_lacking_entries_do_not_count() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=(2, length)) for length in (3, 7, 1, 7, 5)]
    total = RunningMoments()
    for sample in samples:
        total.add(torch.from_numpy(sample[None]))
    assert total.count[0].tolist() == [5, 4, 4, 3, 3, 2, 2]
    for position in range(7):
        there = np.stack([sample[:, position] for sample in samples if sample.shape[1] > position])
        np.testing.assert_allclose(total.mean[:, position], there.mean(0), rtol=1e-12)
        expected = there.std(0, ddof=1) / np.sqrt(len(there))
        np.testing.assert_allclose(total.standard_error()[:, position], expected, rtol=1e-12)


def test_what_is_absent_does_not_count_whatever_it_is() -> None:
    values = torch.tensor([[[1.0, torch.nan], [3.0, torch.inf]], [[5.0, 1e300], [7.0, -torch.inf]]])
    moments = RunningMoments()
    moments.add(values, torch.tensor([[True, False], [True, False]]))
    assert moments.count.tolist() == [[2, 0]], "all heads have one count"
    assert moments.mean.tolist() == [[3, 0], [5, 0]]
    assert moments.deviation.tolist() == [[8, 0], [8, 0]]
    error = moments.standard_error()
    assert error[:, 0].tolist() == [2, 2]
    assert error[:, 1].isnan().all()


def test_one_sample_has_no_standard_error_and_two_have() -> None:
    moments = RunningMoments()
    moments.add(torch.tensor([3.0]))
    assert moments.standard_error().isnan()
    moments.add(torch.tensor([5.0]))
    assert moments.mean == 4
    assert moments.standard_error() == pytest.approx(1.0)


def test_a_state_gives_the_same_moments() -> None:
    moments = RunningMoments()
    moments.add(torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0)))
    again = RunningMoments(*moments.state())
    for part in ("count", "mean", "deviation"):
        assert torch.equal(getattr(again, part), getattr(moments, part).expand_as(moments.mean))


def test_nothing_merged_with_nothing_is_nothing() -> None:
    moments = RunningMoments()
    moments.merge(RunningMoments())
    assert moments.count.numel() == 0
    moments.merge(RunningMoments(*moments.state()))
    assert moments.count.numel() == 0


@pytest.mark.parametrize("limits", [(1, 1 << 20), (3, 1 << 20), (32, 20), (32, 1 << 20)])
def test_when_samples_are_added_changes_nothing(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several sizes, lengths and masks wait for one another, and nobody changes what waits."""
    monkeypatch.setattr("regard.statistics.moments.MAX_WAITING", limits[0])
    monkeypatch.setattr("regard.statistics.moments.MAX_WAITING_NUMBERS", limits[1])
    rng, total, seen = np.random.default_rng(1), RunningMoments(), []
    for number, (size, length) in enumerate([(2, 3), (1, 5), (0, 5), (3, 3), (1, 4), (2, 5)]):
        values = torch.from_numpy(rng.normal(size=(size, 2, length)))
        present = torch.from_numpy(rng.random((size, length)) < 0.7) if number % 2 else None
        here = torch.ones(size, length, dtype=torch.bool) if present is None else present
        row = torch.nn.functional.pad(values.masked_fill(~here[:, None], torch.nan), (0, 5 - length), value=torch.nan)
        seen.append(row.numpy())
        total.add(values, present)
        values.zero_()
        here.zero_()
        if number == 3:
            assert total.count.shape[-1] == 5, "what is read in between is all so far"
    whole = np.concatenate(seen)
    np.testing.assert_array_equal(total.count.expand(2, 5).numpy(), (~np.isnan(whole)).sum(0))
    np.testing.assert_allclose(total.mean.numpy(), np.nanmean(whole, 0), rtol=1e-12)
    deviation = np.nansum((whole - np.nanmean(whole, 0)) ** 2, 0)
    np.testing.assert_allclose(total.deviation.numpy(), deviation, rtol=1e-11)


def test_what_waits_takes_a_mebibyte_at_most() -> None:
    """A watch has moments of each layer and statistic: of 19 batches of 40,000 numbers all waited, 6 MB a layer."""
    moments = RunningMoments()
    for _ in range(19):
        moments.add(torch.ones(1, 2, 20_000))
    parts = 8 * (2 * 40_000 + 20_000)  # means and deviations, and a count for both heads
    assert len(pickle.dumps(moments)) < parts + (1 << 20) + 10_000
    assert (moments.count == 19).all()
