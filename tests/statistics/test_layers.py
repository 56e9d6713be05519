"""What layers do to hidden states, against loops over tokens and pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.statistics import STATISTICS, Observation
from regard.statistics.layers import effective_rank, lower_median, matrix_entropy, rank_one_residual


def pairwise(hidden: np.ndarray) -> float:
    """Mean over i ≠ j of cos(h_i, h_j)."""
    n = len(hidden)
    cosines = [
        hidden[i] @ hidden[j] / (np.linalg.norm(hidden[i]) * np.linalg.norm(hidden[j]))
        for i in range(n)
        for j in range(n)
        if i != j
    ]
    return sum(cosines) / (n * (n - 1))


def test_over_smoothing_is_the_mean_over_pairs(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, length) for seed, length in ((1, 7), (2, 2), (3, 4), (4, 1))]
    measured = STATISTICS["over_smoothing"]()
    measured.update([observe(samples)])
    expected = [pairwise(s.hidden.numpy()) for s in samples[:3]]
    rows = measured.result()
    assert value_of(rows) == pytest.approx(sum(expected) / 3)
    assert rows[0].n == 3, "one token has no other to be like"
    assert rows[0].standard_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(3))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(2, 12), width=st.integers(1, 12), shift=st.floats(0, 10))
def test_over_smoothing_has_its_bounds(
    make: Callable[..., Any], observe: Callable[..., Observation], seed: int, length: int, width: int, shift: float
) -> None:
    hidden = torch.randn(length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    measured = STATISTICS["over_smoothing"]()
    measured.update([observe([make(torch.eye(length, dtype=torch.float64)[None], hidden=hidden)])])
    assert -1 / (length - 1) - 1e-12 <= measured.result()[0].value <= 1 + 1e-12


def test_over_smoothing_of_known_states(
    make: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    same, opposite = torch.ones(4, 3).double(), torch.tensor([[2.0, 0.0], [-3.0, 0.0]]).double()
    with_zeros = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]]).double()  # as of a padding token that is read
    for hidden, expected in (
        (same, 1.0),
        (opposite, -1.0),
        (torch.eye(5).double(), 0.0),
        (with_zeros, 1 / 3),
        (0 * same, 0.0),
    ):
        measured = STATISTICS["over_smoothing"]()
        measured.update([observe([make(torch.eye(len(hidden), dtype=torch.float64)[None], hidden=hidden)])])
        assert value_of(measured.result()) == pytest.approx(expected, abs=1e-12)


def test_matrix_entropy_counts_directions() -> None:
    assert matrix_entropy(torch.eye(5) * torch.arange(1, 6)[:, None]).item() == pytest.approx(math.log(5))
    same = matrix_entropy(torch.ones(5, 3)).item()
    assert same == pytest.approx(0, abs=1e-12)
    assert math.copysign(1, same) == 1
    two = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
    assert matrix_entropy(two).item() == pytest.approx(math.log(2))


def test_matrix_entropy_is_that_of_the_gram_matrix(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, length) for seed, length in ((1, 7), (2, 2), (3, 1))]
    entropies = []
    for sample in samples:
        unit = sample.hidden.numpy() / np.linalg.norm(sample.hidden.numpy(), axis=1, keepdims=True)
        gram = unit @ unit.T / len(unit)
        assert np.trace(gram) == pytest.approx(1)
        entropies.append(-sum(x * math.log(x) for x in np.linalg.eigvalsh(gram) if x > 1e-14))
    measured = STATISTICS["matrix_entropy"]()
    measured.update([observe(samples)])
    assert value_of(measured.result()) == pytest.approx(sum(entropies) / 3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 12), width=st.integers(1, 12))
def test_matrix_entropy_has_its_bounds(seed: int, length: int, width: int) -> None:
    hidden = torch.randn(length, width, generator=torch.Generator().manual_seed(seed))
    assert 0 <= matrix_entropy(hidden).item() <= math.log(min(length, width)) + 1e-6


def test_output_rank_is_that_of_the_singular_values(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    """σ² are the eigenvalues of XᵀX; the residual is the root of the variance over tokens. One sample has no token."""
    samples = [random_sample(seed, length) for seed, length in ((1, 7), (2, 2), (3, 1), (4, 0))]
    ranks, residuals = [], []
    for sample in samples[:3]:
        x = sample.hidden.numpy()
        sigma = np.sqrt(np.clip(np.linalg.eigvalsh(x.T @ x), 0, None))
        shares = [s for s in sigma / sigma.sum() if s > 1e-7]
        ranks.append(math.exp(-sum(p * math.log(p) for p in shares)))
        residuals.append(math.sqrt(x.var(0).sum() * len(x) / (x**2).sum()))
    halves = [STATISTICS["output_rank"]() for _ in range(2)]
    halves[0].update([observe(samples[:1], 9)])
    halves[1].update([observe(samples[1:])])
    halves[0].merge(halves[1])
    rows = halves[0].result()
    assert value_of(rows, statistic="output_rank", n=3) == pytest.approx(sum(ranks) / 3, rel=1e-5)
    assert value_of(rows, statistic="output_rank_residual", n=3) == pytest.approx(sum(residuals) / 3)


def test_output_rank_has_its_bounds() -> None:
    assert effective_rank(torch.eye(4, 6)).item() == pytest.approx(4)
    same = torch.arange(1.0, 4).expand(5, 3)
    assert effective_rank(same).item() == pytest.approx(1)
    assert rank_one_residual(same).item() == pytest.approx(0, abs=1e-12)
    assert rank_one_residual(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).item() == pytest.approx(1)


@pytest.mark.parametrize("number", [3, 4, 1001, 1024])
def test_the_lower_median_is_that_of_torch(number: int) -> None:
    values = torch.randn(number, generator=torch.Generator().manual_seed(number)).round(decimals=1)
    assert lower_median(values).item() == values.median().item()


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("shape", [(7, 40), (40, 7), (12, 12)])
def test_entropy_and_rank_are_those_of_all_singular_values(
    shape: tuple[int, int], dtype: torch.dtype, error: float
) -> None:
    states = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    hidden = states.double()
    values = torch.linalg.svdvals(torch.nn.functional.normalize(hidden, dim=-1)).square() / shape[0]
    assert matrix_entropy(hidden).item() == pytest.approx(torch.special.entr(values).sum().item(), rel=1e-12)
    share = torch.linalg.svdvals(hidden)
    share = share / share.sum()
    assert effective_rank(states).item() == pytest.approx(torch.special.entr(share).sum().exp().item(), rel=error)


def test_massive_activations_are_the_largest_and_the_median(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, length) for seed, length in ((1, 7), (2, 1), (3, 4))]
    measured = STATISTICS["massive_activations"]()
    measured.update([observe(samples)])
    rows = measured.result()
    ordered = [sorted(abs(x) for x in s.hidden.flatten().tolist()) for s in samples]
    for rank in (1, 2, 3):
        expected = sum(values[-rank] for values in ordered) / 3
        assert value_of(rows, statistic=f"massive_activations_top{rank}") == pytest.approx(expected)
    lower = sum(values[(len(values) - 1) // 2] for values in ordered) / 3
    assert value_of(rows, statistic="massive_activations_median") == pytest.approx(lower), (
        "the lower of two middle ones"
    )
    assert {row.layer for row in rows} == {0}


def test_the_most_frequent_position_is_that_of_most_samples_whatever_their_length(
    make: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    """Position 1 in two samples of three tokens; position 8 in one of nine, which is all that there are so long."""
    measured = STATISTICS["massive_activations"]()
    for count, length, position in ((2, 3, 1), (1, 9, 8)):
        hidden = torch.full((length, 2), 0.01, dtype=torch.float64)
        hidden[position, 0] = 200.0
        measured.update([observe([make(torch.eye(length, dtype=torch.float64)[None], hidden=hidden)] * count)])
    assert value_of(measured.result(), statistic="massive_activations_position", n=3) == 1
    assert value_of(measured.result(), statistic="massive_activations_channel", n=3) == 0


def test_bounds_of_massive_activations_and_a_median_of_zero(
    make: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    """At least 1,000 times the median, and more than 100; a median of 0 has no ratio, and is below both bounds."""
    cases = [
        (1000.0, 1.0, True),
        (999.0, 1.0, False),
        (100.0, 0.0625, False),
        (101.0, 0.0625, True),
        (200.0, 0.0, True),
    ]
    samples = []
    for largest, others, _ in cases:
        hidden = torch.full((4, 3), others, dtype=torch.float64)
        hidden[1, 2] = -largest
        samples.append(make(torch.eye(4, dtype=torch.float64)[None], hidden=hidden))
    measured = STATISTICS["massive_activations"]()
    measured.update([observe(samples)])
    rows = measured.result()
    assert value_of(rows, statistic="massive_activations_rate", n=5) == pytest.approx(60)
    ratios = [largest / others for largest, others, _ in cases if others]
    assert value_of(rows, statistic="massive_activations_ratio", n=4) == pytest.approx(sum(ratios) / 4)


def test_massive_activations_by_the_published_definition(
    make: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    """(Length, largest value, position, channel): of the third the magnitude is too small, of the fourth the ratio."""
    cases = [(5, -300.0, 3, 1), (2, 200.0, 0, 2), (9, 90.0, 8, 0), (4, 2000.0, 1, 1), (7, 150.0, 3, 2)]
    samples = []
    for seed, (length, largest, position, channel) in enumerate(cases):
        scale = 10 if largest == 2000 else 0.01
        hidden = (
            torch.rand(length, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + scale
        )
        hidden[position, channel] = largest
        samples.append(make(torch.eye(length, dtype=torch.float64)[None], hidden=hidden))
    whole, first, second = (STATISTICS["massive_activations"]() for _ in range(3))
    whole.update([observe(samples)])
    first.update([observe(samples[:2])])
    second.update([observe(samples[2:])])
    first.merge(second)
    ratios = [
        s.hidden.abs().max().item() / sorted(s.hidden.abs().flatten().tolist())[(3 * s.length - 1) // 2]
        for s in samples
    ]
    for measured in (whole, first):
        rows = measured.result()
        assert value_of(rows, statistic="massive_activations_ratio") == pytest.approx(sum(ratios) / 5)
        assert value_of(rows, statistic="massive_activations_rate") == pytest.approx(60)
        assert value_of(rows, statistic="massive_activations_position", n=3, standard_error=None) == 3
        assert value_of(rows, statistic="massive_activations_channel", n=3, standard_error=None) == 2


def test_spectral_bound_bounds_what_a_head_lets_through(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    """λ_max ≥ max_i Σ_k (a_ki − d_i)², and dist(AH) ≤ √λ_max dist(H)."""
    sample = random_sample(1, 8, 8, "encoder")
    measured = STATISTICS["spectral_bound"]()
    measured.update([observe([sample])])
    for head, a in enumerate(sample.matrix.numpy()):
        bound = value_of(measured.result(), head=head)
        project = np.eye(8) - 1 / 8
        assert bound == pytest.approx(np.linalg.eigvalsh(a.T @ project @ a)[-1])
        assert bound >= max(((a[:, i] - a[:, i].mean()) ** 2).sum() for i in range(8)) - 1e-12
        hidden = sample.hidden.numpy()
        assert np.linalg.norm(project @ a @ hidden) <= math.sqrt(bound) * np.linalg.norm(project @ hidden) + 1e-12
