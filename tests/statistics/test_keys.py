"""Norms and products of keys, values and hidden states, against loops over samples and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.statistics import STATISTICS, Observation

LENGTHS = ((1, 6), (2, 3), (3, 1))


@pytest.mark.parametrize("name", ["key_norm", "value_norm"])
def test_norms_by_position_and_of_the_first_against_the_rest(
    name: str,
    random_sample: Callable[..., Any],
    observe: Callable[..., Observation],
    value_of: Callable[..., float],
) -> None:
    samples = [random_sample(seed, length) for seed, length in LENGTHS]
    measured = STATISTICS[name]()
    measured.update([observe(samples)])
    rows = measured.result()
    norms = [s.tensors[name][0].tolist() for s in samples]
    for k in range(6):
        there = [n[k] for n in norms if k < len(n)]
        assert value_of(rows, statistic=name, head=0, position=k) == pytest.approx(sum(there) / len(there))
    ratios = [n[0] / (sum(n[1:]) / len(n[1:])) for n in norms if len(n) > 1]
    assert value_of(rows, statistic=f"{name}_sink_ratio", head=0) == pytest.approx(sum(ratios) / len(ratios))
    assert {row.n for row in rows if row.statistic.endswith("ratio")} == {2}, "one token has no others"


def test_hidden_norms_have_no_head(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, length, layer=-1) for seed, length in LENGTHS]
    measured = STATISTICS["hidden_norm"]()
    measured.update([observe(samples)])
    rows = measured.result()
    norms = [[sum(x * x for x in h) ** 0.5 for h in s.hidden.tolist()] for s in samples]
    for k in range(6):
        there = [n[k] for n in norms if k < len(n)]
        assert value_of(rows, statistic="hidden_norm", position=k) == pytest.approx(sum(there) / len(there))
    ratios = [n[0] / (sum(n[1:]) / len(n[1:])) for n in norms if len(n) > 1]
    assert value_of(rows, statistic="hidden_norm_sink_ratio") == pytest.approx(sum(ratios) / len(ratios))
    assert {(row.layer, row.head) for row in rows} == {(-1, None)}


def test_a_ratio_to_nothing_is_left_out(make: Callable[..., Any], observe: Callable[..., Observation]) -> None:
    values = {"value_norm": torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 6.0]]).double()}
    measured = STATISTICS["value_norm"]()
    measured.update([observe([make(torch.eye(3).double().repeat(2, 1, 1), tensors=values)])])
    ratios = [(row.head, row.value) for row in measured.result() if row.statistic.endswith("ratio")]
    assert ratios == [(1, 0.25)]


@pytest.mark.parametrize("site", ["decoder", "encoder"])
@pytest.mark.parametrize("statistic,name", [("qk_cosine", "cosine_sum"), ("qk_norm", "norm_sum")])
def test_products_are_averaged_over_the_queries_that_may_see_a_key(
    statistic: str,
    name: str,
    site: str,
    make: Callable[..., Any],
    observe: Callable[..., Observation],
    value_of: Callable[..., float],
) -> None:
    generator = torch.Generator().manual_seed(6)
    samples, pairs = [], []
    for length in (6, 2):
        values = torch.randn(2, length, length, generator=generator, dtype=torch.float64)
        values = values.tril() if site == "decoder" else values
        pairs.append(values)
        sums = {name: values.sum(1), "pair_count": (values != 0).double().sum(1)}
        samples.append(make(torch.eye(length).double().repeat(2, 1, 1), site=site, tensors=sums))
    measured = STATISTICS[statistic]()
    measured.update([observe(samples)])
    for head in range(2):
        for k in range(6):
            means = []
            for values in pairs:
                seeing = range(k if site == "decoder" else 0, values.shape[1])
                if k < values.shape[2]:
                    means.append(sum(float(values[head, i, k]) for i in seeing) / len(seeing))
            assert value_of(measured.result(), head=head, position=k) == pytest.approx(sum(means) / len(means))


def test_a_key_that_no_query_sees_does_not_count(make: Callable[..., Any], observe: Callable[..., Observation]) -> None:
    both = {"cosine_sum": torch.tensor([[1.0, 0.5]]).double(), "pair_count": torch.tensor([[1.0, 1.0]]).double()}
    hidden = {"cosine_sum": torch.tensor([[3.0, 0.0]]).double(), "pair_count": torch.tensor([[2.0, 0.0]]).double()}
    measured = STATISTICS["qk_cosine"]()
    samples = [make(torch.eye(2).double()[None], site="encoder", tensors=tensors) for tensors in (both, hidden)]
    measured.update([observe(samples)])
    assert [(row.position, row.value, row.n) for row in measured.result()] == [(0, 1.25, 2), (1, 0.5, 1)]


def test_value_weighted_mass_is_the_mean_over_queries(
    random_sample: Callable[..., Any], observe: Callable[..., Observation], value_of: Callable[..., float]
) -> None:
    samples = [random_sample(seed, length) for seed, length in LENGTHS]
    measured = STATISTICS["value_weighted_mass"]()
    measured.update([observe(samples)])
    for head in range(2):
        for k in range(6):
            values = [float(s.tensors["value_weighted_sum"][head, k]) / s.length for s in samples if k < s.keys]
            assert value_of(measured.result(), head=head, position=k) == pytest.approx(sum(values) / len(values))
