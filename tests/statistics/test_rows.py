"""What is known of each query, against loops over its row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.statistics import STATISTICS, Observation


def entropy(row: list[float], _i: int) -> float:
    return -sum(a * math.log(a) for a in row if a > 0)


def distance(row: list[float], i: int) -> float:
    return sum(a * abs(i - j) for j, a in enumerate(row))


def row_sum(row: list[float], _i: int) -> float:
    return sum(row)


def virtual(row: list[float], _i: int) -> float:
    return 1 - sum(row)


@pytest.mark.parametrize(
    "name,definition",
    [("entropy", entropy), ("distance", distance), ("row_sum", row_sum), ("virtual_sink_mass", virtual)],
)
@pytest.mark.parametrize("site", ["decoder", "encoder"])
def test_mean_over_queries_and_profile(
    name: str,
    definition: Callable[[list[float], int], float],
    site: str,
    attention: Callable[..., Tensor],
    make: Callable[..., Any],
    observe: Callable[..., Observation],
    value_of: Callable[..., float],
) -> None:
    """The mean over a sample's queries, then over samples; the profile over samples long enough. Rows sum to 0.9."""
    generator = torch.Generator().manual_seed(5)
    matrices = [0.9 * attention(generator, n, n, causal=site == "decoder") for n in (6, 2, 9)]
    measured = STATISTICS[name]()
    measured.update([observe([make(m, site=site) for m in matrices])])
    rows = measured.result()
    for head in range(2):
        values = [[definition(row.tolist(), i) for i, row in enumerate(m[head])] for m in matrices]
        expected = sum(sum(of_sample) / len(of_sample) for of_sample in values) / 3
        assert value_of(rows, head=head, position=None) == pytest.approx(expected)
        for i in range(9):
            there = [of_sample[i] for of_sample in values if i < len(of_sample)]
            assert value_of(rows, head=head, position=i) == pytest.approx(sum(there) / len(there), abs=1e-12)
    assert len(rows) == 2 * (1 + 9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20), causal=st.booleans())
def test_entropy_lies_between_zero_and_the_logarithm_of_the_keys(
    attention: Callable[..., Tensor],
    make: Callable[..., Any],
    observe: Callable[..., Observation],
    seed: int,
    length: int,
    causal: bool,
) -> None:
    measured = STATISTICS["entropy"]()
    matrix = attention(torch.Generator().manual_seed(seed), length, length, causal=causal)
    measured.update([observe([make(matrix, site="decoder" if causal else "encoder")])])
    for row in measured.result():
        keys = length if row.position is None or not causal else row.position + 1
        assert -1e-12 <= row.value <= math.log(keys) + 1e-12


def test_known_heads(
    make: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    """A uniform head: entropy log n, mean distance (n² − 1)/(3n). A previous-token head: 0, and 1 but for the first."""
    n = 8
    uniform = torch.full((n, n), 1 / n, dtype=torch.float64)
    previous = torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    previous[0, 0] = 1
    both = observe([make(torch.stack([uniform, previous]), site="encoder")])
    measured = {name: STATISTICS[name]() for name in ("entropy", "distance")}
    for one in measured.values():
        one.update([both])
    assert value_of(measured["entropy"].result(), head=0, position=None) == pytest.approx(math.log(n))
    assert value_of(measured["entropy"].result(), head=1, position=None) == pytest.approx(0, abs=1e-12)
    assert value_of(measured["distance"].result(), head=0, position=None) == pytest.approx((n * n - 1) / (3 * n))
    assert value_of(measured["distance"].result(), head=1, position=None) == pytest.approx((n - 1) / n)


def test_distance_means_nothing_between_two_sequences(
    random_sample: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    for site, expected in (("cross", False), ("cross@decoder.1", False), ("encoder", True)):
        measured = STATISTICS["distance"]()
        measured.update([observe([random_sample(1, 4, 4, site)])])
        assert bool(measured.result()) == expected


def test_head_output_norm_is_that_of_each_query(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, length) for seed, length in ((1, 5), (2, 3))]
    measured = STATISTICS["head_output_norm"]()
    measured.update([observe(samples)])
    for head in range(2):
        means = [sum(s.tensors["output_norm"][head].tolist()) / s.length for s in samples]
        assert value_of(measured.result(), head=head, position=None) == pytest.approx(sum(means) / 2)
    assert value_of(measured.result(), head=1, position=4) == pytest.approx(
        float(samples[0].tensors["output_norm"][1, 4])
    )
