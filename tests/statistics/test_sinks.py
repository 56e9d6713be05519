"""Sinks against their definitions, written out over whole matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import UserError
from regard.statistics import Observation, Statistic
from regard.statistics.sink_tokens import CommonSinkRatio, SinksByTokenClass, SinkTokens
from regard.statistics.sinks import (
    ColumnMass,
    FirstMass,
    SecondarySinks,
    SinkDeviation,
    SinkRate,
    sink_deviation,
    sink_rate,
    topk_keys,
)


@pytest.fixture(scope="session")
def rows_of(make: Callable[..., Any], observe: Callable[..., Observation]) -> Callable[..., list]:
    """Measures samples that are given, layer by layer, as a list of their matrices."""

    def rows(statistic: Statistic, *layers: Sequence[Tensor], site: str = "decoder", tokens: Any = None) -> list:
        found = []
        for number, matrices in enumerate(layers):
            ids = tokens or [None] * len(matrices)
            found.append(
                observe([make(m, site=site, layer=number, tokens=t) for m, t in zip(matrices, ids, strict=True)])
            )
        statistic.update(found)
        return statistic.result()

    return rows


def alphas(matrix: Tensor) -> list[float]:
    """α_k = 1/(T−k+1) Σ_{i=k..T} A_ik, of one head."""
    length = len(matrix)
    return [sum(float(matrix[i, k]) for i in range(k, length)) / (length - k) for k in range(length)]


def test_sink_rate_is_that_of_the_paper(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float]
) -> None:
    """Threshold per sample first, mean over layers and heads, mean over samples last, × 100."""
    generator = torch.Generator().manual_seed(0)
    samples, length, epsilon = 6, 12, 0.2
    layers = [[attention(generator, length, length, causal=True) for _ in range(samples)] for _ in range(3)]
    rows = rows_of(SinkRate((epsilon,), minimum_queries=1), *layers)
    for k in range(length):
        by_sample = []
        for s in range(samples):
            hits = [float(alphas(head)[k] > epsilon) for layer in layers for head in layer[s]]
            by_sample.append(sum(hits) / len(hits))
        overall = value_of(rows, layer=None, head=None, position=k)
        assert overall == pytest.approx(100 * sum(by_sample) / samples, abs=1e-9)
        for number, layer in enumerate(layers):
            for head in range(2):
                expected = 100 * sum(alphas(layer[s][head])[k] > epsilon for s in range(samples)) / samples
                assert value_of(rows, layer=number, head=head, position=k) == pytest.approx(expected, abs=1e-9)
    assert len(rows) == length * (1 + 3 * 2)
    assert {(row.epsilon, row.n, row.site) for row in rows} == {(epsilon, samples, "decoder")}
    assert len({row.value for row in rows}) > 3, "the case decides nothing"


def test_the_threshold_comes_before_the_mean(rows_of: Callable[..., list], value_of: Callable[..., float]) -> None:
    """α_1 is 1 in one sample and 0.2 in the other, 0.6 > 0.3 on average, but only one of them has a sink."""
    every, some = torch.zeros(1, 10, 10, dtype=torch.float64), torch.zeros(1, 10, 10, dtype=torch.float64)
    every[:, :, 0] = 1
    some[:, :, 0], some[:, :, 1] = 0.2, 0.8
    some[:, 0, :2] = torch.tensor([0.2, 0.0])
    rows = rows_of(SinkRate(), [every, some])
    assert value_of(rows, layer=0, position=0) == 50
    assert value_of(rows, layer=None, position=0) == 50
    assert [row.standard_error for row in rows if row.position == 0] == [pytest.approx(50.0)] * 2


def test_a_sink_is_strictly_above_epsilon(make: Callable[..., Any], observe: Callable[..., Observation]) -> None:
    matrix = torch.zeros(1, 10, 10, dtype=torch.float64)
    matrix[:, :, 0] = 0.5
    for dtype in (torch.float32, torch.float64):
        for epsilon, expected in ((0.5, 0.0), (0.499, 100.0)):
            statistic = SinkRate((epsilon,))
            statistic.update([observe([make(matrix)], dtype=dtype)])
            assert statistic.result()[0].value == expected
        assert sink_rate(torch.tensor([[[0.3]]], dtype=dtype), 0.3).item() == 0


@pytest.mark.parametrize("length,printed", [(64, 0.074), (512, 0.013)])
def test_uniform_causal_attention_gives_the_first_token_a_harmonic_share(
    rows_of: Callable[..., list], value_of: Callable[..., float], length: int, printed: float
) -> None:
    uniform = torch.ones(length, length, dtype=torch.float64).tril()
    uniform = (uniform / uniform.sum(-1, keepdim=True))[None]
    harmonic = sum(1 / i for i in range(1, length + 1)) / length
    assert round(harmonic, 3) == printed
    rows = rows_of(FirstMass(), [uniform])
    assert value_of(rows, position=0) == pytest.approx(harmonic)
    rows = rows_of(SinkRate((harmonic * 0.999, harmonic * 1.001)), [uniform])
    below, above = sorted({row.epsilon for row in rows})
    assert value_of(rows, layer=0, position=0, epsilon=below) == 100
    assert value_of(rows, layer=0, position=0, epsilon=above) == 0


@pytest.mark.parametrize(
    "shift,sinks",
    [pytest.param(0, [61, 62, 63], id="identity head"), pytest.param(1, [61, 62], id="previous-token head")],
)
def test_late_columns_are_sinks_only_without_a_minimum_of_queries(
    rows_of: Callable[..., list], shift: int, sinks: list[int]
) -> None:
    """At T = 64 and ε = 0.3 the paper's metric has sinks at k = 62, 63, 64 of its identity head, and k = 62, 63."""
    matrix = torch.zeros(1, 64, 64, dtype=torch.float64)
    for i in range(64):
        matrix[0, i, max(i - shift, 0)] = 1
    rows = rows_of(SinkRate(minimum_queries=1), [matrix])
    assert [row.position for row in rows if row.layer == 0 and row.value > 0] == sinks
    rows = rows_of(SinkRate(), [matrix])
    assert [row.position for row in rows if row.value > 0] == []
    assert max(row.position for row in rows) == 64 - 8


def test_a_bidirectional_site_divides_by_all_queries(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float]
) -> None:
    matrix = attention(torch.Generator().manual_seed(1), 9, 9, causal=False)
    mean = matrix.mean(1)
    epsilon = float(mean.median())
    rows = rows_of(SinkRate((epsilon,)), [matrix], site="encoder")
    for head in range(2):
        for k in range(9):
            assert value_of(rows, layer=0, head=head, position=k) == 100 * float(mean[head, k] > epsilon)


@pytest.mark.every_value
@pytest.mark.parametrize("new", [SinkRate, FirstMass])
@pytest.mark.parametrize("merged", [False, True])
def test_impossible_attention_is_found_whatever_comes_after_it(
    merged: bool, new: Callable[[], Statistic], make: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    possible = torch.eye(9, dtype=torch.float64)[None]
    impossible = possible.clone()
    impossible[:, :, 0] = 1.01
    for matrices in itertools.permutations((impossible, possible)):
        parts = [new(), new()] if merged else [new()] * 2
        for statistic, matrix in zip(parts, matrices, strict=True):
            statistic.update([observe([make(matrix)])])
        if merged:
            parts[0].merge(parts[1])
        with pytest.raises(UserError, match="impossible attention in layer 0"):
            parts[0].result()


def test_one_epsilon_given_twice_counts_once(attention: Callable[..., Tensor], rows_of: Callable[..., list]) -> None:
    matrix = attention(torch.Generator().manual_seed(1), 9, 9, causal=True)
    assert rows_of(SinkRate((0.3, np.float64(0.3))), [matrix]) == rows_of(SinkRate((0.3,)), [matrix])
    statistic = SinkRate((np.float64(0.3),))
    rows_of(statistic, [matrix])
    again = SinkRate((0.3,))
    again.load(statistic.state())
    assert again.result() == statistic.result()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20), causal=st.booleans(), data=st.data())
def test_sink_rate_falls_with_epsilon(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], seed: int, length: int, causal: bool, data: Any
) -> None:
    epsilons = sorted(data.draw(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=4, unique=True)))
    matrix = attention(torch.Generator().manual_seed(seed), length, length, causal=causal)
    rows = rows_of(SinkRate(epsilons, minimum_queries=1), [matrix], site="decoder" if causal else "encoder")
    for place in {(row.layer, row.head, row.position) for row in rows}:
        values = [row.value for row in rows if (row.layer, row.head, row.position) == place]
        assert len(values) == len(epsilons)
        assert values == sorted(values, reverse=True)
        assert all(0 <= value <= 100 for value in values)


# -- masses ----------------------------------------------------------------------------------------------------------


def test_column_mass_is_the_mean_over_all_queries(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float]
) -> None:
    generator = torch.Generator().manual_seed(2)
    matrices = [attention(generator, length, length, causal=True) for length in (3, 6)]
    rows = rows_of(ColumnMass(), matrices)
    for head in range(2):
        for k in range(6):
            degrees = [
                sum(float(m[head, i, k]) for i in range(len(m[head]))) / len(m[head])
                for m in matrices
                if k < m.shape[1]
            ]
            assert value_of(rows, head=head, position=k) == pytest.approx(sum(degrees) / len(degrees))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 15), keys=st.integers(1, 15), causal=st.booleans())
def test_column_masses_of_a_softmax_sum_to_one(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], seed: int, length: int, keys: int, causal: bool
) -> None:
    keys = length if causal else keys
    matrix = attention(torch.Generator().manual_seed(seed), length, keys, causal=causal)
    rows = rows_of(ColumnMass(), [matrix], site="decoder" if causal else "cross")
    for head in range(2):
        assert sum(row.value for row in rows if row.head == head) == pytest.approx(1)


@pytest.mark.parametrize("site", ["decoder", "encoder"])
def test_first_mass_is_alpha(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float], site: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = [attention(generator, length, length, causal=site == "decoder") for length in (7, 2, 9)]
    rows = rows_of(FirstMass(), matrices, site=site)
    for head in range(2):
        for k in range(4):
            matrix_of = [m[head] for m in matrices if k < m.shape[1]]
            if site == "decoder":
                expected = [alphas(m)[k] for m in matrix_of]
            else:
                expected = [float(m[:, k].mean()) for m in matrix_of]
            assert value_of(rows, head=head, position=k) == pytest.approx(sum(expected) / len(expected))
    assert {row.position for row in rows} == set(range(4))


# -- deviation -------------------------------------------------------------------------------------------------------


def deviation(matrix: Tensor, i: int) -> float:
    """Δ_i = √(Σ_k (a_ki − d_i)²) / (n d_i)."""
    n = len(matrix)
    d = sum(float(matrix[k, i]) for k in range(n)) / n
    return math.sqrt(sum((float(matrix[k, i]) - d) ** 2 for k in range(n))) / (n * d)


@pytest.mark.parametrize("top", [1, 2, 5])
def test_sink_deviation_is_that_of_the_strongest_columns(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float], top: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    matrices = [attention(generator, length, length, causal=False) for length in (8, 3, 6)]
    rows = rows_of(SinkDeviation(top), matrices, site="encoder")
    for head in range(2):
        by_sample = []
        for matrix in (m[head] for m in matrices):
            order = sorted(range(len(matrix)), key=lambda i: -float(matrix[:, i].sum()))[:top]
            by_sample.append(sum(deviation(matrix, i) for i in order) / len(order))
        assert value_of(rows, head=head) == pytest.approx(sum(by_sample) / 3)


def test_sink_deviation_of_known_matrices(rows_of: Callable[..., list], value_of: Callable[..., float]) -> None:
    alike = torch.tensor([[[0.8, 0.2]] * 4]).double().expand(1, 4, 2)
    alike = torch.nn.functional.pad(alike, (0, 2))
    assert value_of(rows_of(SinkDeviation(), [alike], site="encoder")) == pytest.approx(0, abs=1e-7)
    # One of two queries looks at the key: d = 1/2, Σ(a − d)² = 1/2, n·d = 1.
    identity = torch.eye(2, dtype=torch.float64)[None]
    assert value_of(rows_of(SinkDeviation(), [identity], site="encoder")) == pytest.approx(math.sqrt(0.5))
    alone = torch.ones(1, 1, 1, dtype=torch.float64)
    assert value_of(rows_of(SinkDeviation(), [alone])) == 0


def test_a_column_that_nobody_attends_to_deviates_by_nothing() -> None:
    mass = torch.tensor([[[2.0, 0.0]]])
    assert sink_deviation(mass, torch.tensor([[[2.0, 0.0]]]), torch.tensor([2])).tolist() == [[[0.0, 0.0]]]


# -- tokens ----------------------------------------------------------------------------------------------------------


def pointing(length: int, *keys: int) -> Tensor:
    """One head per key, at which all its queries look."""
    matrix = torch.full((len(keys), length, length), 0.1 / length, dtype=torch.float64)
    for head, key in enumerate(keys):
        matrix[head, :, key] += 0.9
    return matrix


def test_sink_tokens_are_counted_by_position_and_token(
    rows_of: Callable[..., list], by_place: Callable[..., dict]
) -> None:
    matrices = [pointing(5, 0, 2), pointing(5, 0, 4), pointing(3, 1, 2)]
    tokens = [torch.tensor([7, 1, 2, 3, 4]), torch.tensor([8, 1, 2, 3, 4]), torch.tensor([7, 9, 2])]
    statistic = SinkTokens()
    rows = by_place(rows_of(statistic, matrices, site="encoder", tokens=tokens))
    third, two = pytest.approx(1 / 3), pytest.approx(2 / 3)
    assert statistic.tokens() == [
        ("encoder", 0, 0, 0, 7, 1, third),
        ("encoder", 0, 0, 0, 8, 1, third),
        ("encoder", 0, 0, 1, 9, 1, third),
        ("encoder", 0, 1, 2, 2, 2, two),
        ("encoder", 0, 1, 4, 4, 1, third),
    ]
    values = {place[3:5]: row.value for place, row in rows.items()}
    elsewhere = dict.fromkeys(((head, position) for head in range(2) for position in range(5)), 0.0)
    assert values == elsewhere | {
        (0, 0): pytest.approx(200 / 3),
        (0, 1): pytest.approx(100 / 3),
        (1, 2): pytest.approx(200 / 3),
        (1, 4): pytest.approx(100 / 3),
    }
    expected = np.std([100, 100, 0], ddof=1) / math.sqrt(3)
    errors = [row.standard_error for row in rows.values() if row.value]
    assert errors == [pytest.approx(expected)] * 4


def test_sink_tokens_without_ids_still_have_positions(rows_of: Callable[..., list]) -> None:
    statistic = SinkTokens()
    rows_of(statistic, [pointing(4, 3)], site="encoder")
    assert statistic.tokens() == [("encoder", 0, 0, 3, -1, 1, 1.0)]


def test_common_sink_ratio_of_given_tokens(rows_of: Callable[..., list], value_of: Callable[..., float]) -> None:
    matrices = [pointing(4, 0, 1, 2, 3), pointing(4, 0, 0, 0, 1)]
    tokens = [torch.tensor([7, 1, 2, 9])] * 2
    rows = rows_of(CommonSinkRatio({7, 9}), matrices, site="encoder", tokens=tokens)
    assert value_of(rows, layer=0, head=None, position=None) == pytest.approx((50 + 75) / 2)
    assert rows[0].standard_error == pytest.approx(np.std([50, 75], ddof=1) / math.sqrt(2))
    assert rows_of(CommonSinkRatio({7}), matrices, site="encoder") == [], "without ids nothing is known"


def test_common_sink_ratio_over_several_columns(rows_of: Callable[..., list], value_of: Callable[..., float]) -> None:
    matrix = pointing(4, 0)
    matrix[:, :, 2] += 0.3
    for short in (False, True):
        some = matrix[:, :3, :3] if short else matrix
        rows = rows_of(
            CommonSinkRatio({7, 5}, top=2), [some], site="encoder", tokens=[torch.tensor([7, 1, 2, 5])[: some.shape[1]]]
        )
        assert value_of(rows) == 50
    rows = rows_of(CommonSinkRatio({7}, top=9), [matrix], site="encoder", tokens=[torch.tensor([7, 1, 2, 5])])
    assert value_of(rows) == 25


@pytest.mark.every_value
@pytest.mark.parametrize("new", [SinkTokens, CommonSinkRatio])
def test_merged_counts_are_those_of_all_samples(
    new: Callable[[], Statistic], make: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    """Token 7 is in three of four samples, and common for that: in the first two it is in one, which is not most."""
    ids = [[7, 1, 2], [3, 4, 5], [7, 8, 9], [7, 6, 5]]
    samples = [make(pointing(3, 0, 1), site="encoder", tokens=torch.tensor(some)) for some in ids]
    whole, first, second = new(), new(), new()
    whole.update([observe(samples)])
    first.update([observe(samples[:2])])
    second.update([observe(samples[2:])])
    first.merge(second)
    assert first.result() == whole.result()
    assert {row.n for row in first.result()} == {4}


def test_padding_is_no_common_token(make: Callable[..., Any], observe: Callable[..., Observation]) -> None:
    """Of the three strongest columns of a text of two tokens, the first is common, and the third is padding."""
    ids = (torch.tensor([7, 1]), torch.tensor([2, 3, 4, 5]))
    samples = [make(pointing(len(t), 0), site="encoder", tokens=t) for t in ids]
    layer = observe(samples)
    assert layer.token_ids is not None
    statistic = CommonSinkRatio({7}, top=3)
    statistic.update([replace(layer, token_ids=layer.token_ids.where(layer.key_mask(4), 7))])
    assert [(row.value, row.n) for row in statistic.result()] == [(25.0, 2)]


@pytest.mark.every_value
@pytest.mark.parametrize(
    "new", [ColumnMass, FirstMass, SinkDeviation, SinkTokens, CommonSinkRatio, partial(CommonSinkRatio, {7})]
)
def test_keys_of_a_text_without_queries_tell_nothing(
    new: Callable[[], Statistic], make: Callable[..., Any], observe: Callable[..., Observation]
) -> None:
    """As where a row of the decoder is padding alone, and that of the encoder is not."""
    tokens = torch.tensor([7, 1, 2])
    asked = make(torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]]).double(), site="cross", tokens=tokens)
    silent = make(torch.zeros(1, 0, 3, dtype=torch.float64), site="cross", tokens=tokens)
    alone, beside = new(), new()
    alone.update([observe([asked])])
    beside.update([observe([asked, silent])])
    assert [row.n for row in alone.result()] == [1] * len(alone.result()) != []
    assert repr(beside.result()) == repr(alone.result())


def test_a_position_is_pooled_over_layers_that_all_count_it(make: Callable[..., Any], observe: Any) -> None:
    """Eight queries see key 2 of the first layer alone, where the first two see it as well, as tokens of an image."""
    uniform = torch.full((1, 8, 8), 1 / 8, dtype=torch.float64)
    first, second = (observe([make(uniform, layer=layer)]) for layer in range(2))
    early = torch.tensor([[[0, 0, 2, 0, 0, 0, 0, 0]]])
    first = replace(first, tensors={**first.tensors, "early_query_count": early})
    measured = SinkRate()
    measured.update([first, second])
    found = {(row.layer, row.head): [] for row in measured.result()}
    for row in measured.result():
        found[row.layer, row.head].append(row.position)
    assert found == {(None, None): [0], (0, 0): [0, 2], (1, 0): [0]}


def test_common_tokens_are_found_where_none_are_given(
    rows_of: Callable[..., list], value_of: Callable[..., float]
) -> None:
    """In more than half of the samples: token 7 in all four, 1 in three, 2 in two only (and often in one of them)."""
    ids = [[7, 1, 2, 2], [7, 1, 2, 3], [7, 1, 4, 5], [7, 6, 8, 9]]
    statistic = CommonSinkRatio()
    matrices = [pointing(4, 0, 2), pointing(4, 1, 2), pointing(4, 0, 3), pointing(4, 1, 1)]
    rows = rows_of(statistic, matrices, site="encoder", tokens=[torch.tensor(i) for i in ids])
    assert statistic.common_tokens("encoder") == {7, 1}
    assert value_of(rows) == pytest.approx(100 * 3 / 8)
    assert (rows[0].n, rows[0].standard_error) == (4, None)
    assert CommonSinkRatio({3}).common_tokens("anywhere") == {3}


def test_the_strongest_come_first_and_equals_in_order() -> None:
    mass = torch.tensor([[[1.0, 3.0, 3.0, 2.0, 9.0]], [[-3.0, -2.0, 9.0, torch.nan, 9.0]]])
    real = torch.tensor([[True, True, True, True, False], [True, True, False, False, False]])
    assert topk_keys(mass, real, 1).tolist() == [[[1]], [[1]]]
    assert topk_keys(mass, real, 3)[0].tolist() == [[1, 2, 3]]
    assert topk_keys(mass, real, 2)[1].tolist() == [[1, 0]]
    assert topk_keys(mass, real, 9).shape[-1] == 5


@pytest.mark.parametrize("site", ["decoder", "encoder"])
def test_secondary_sinks_are_counted_beyond_the_first_key(
    site: str, attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float]
) -> None:
    """Samples of unequal length; a sample of two tokens has no key beyond the first that two queries see."""
    generator = torch.Generator().manual_seed(3)
    matrices = [attention(generator, n, n, causal=site == "decoder") for n in (9, 2, 5)]
    rows = rows_of(SecondarySinks((0.1, 0.25), minimum_queries=2), matrices, site=site)
    counts_of_all = 0
    for head, epsilon in itertools.product(range(2), (0.1, 0.25)):
        counts = []
        for matrix in matrices:
            length = len(matrix[head])
            seen_by = [length - k if site == "decoder" else length for k in range(length)]
            alpha = [float(matrix[head][:, k].sum()) / n for k, n in enumerate(seen_by)]
            eligible = [k for k in range(1, length) if seen_by[k] >= 2]
            counts += [sum(alpha[k] > epsilon for k in eligible)] if eligible else []
        counts_of_all += sum(counts)
        assert len(counts) == (2 if site == "decoder" else 3)
        assert value_of(rows, head=head, epsilon=epsilon, n=len(counts)) == pytest.approx(sum(counts) / len(counts))
    assert counts_of_all


def test_sinks_by_token_class(
    attention: Callable[..., Tensor], rows_of: Callable[..., list], value_of: Callable[..., float]
) -> None:
    """Token 0 is special, 1 a delimiter, the first token neither; samples of unequal length in two layers."""
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.tensor([0, 1, 2, 0, 3, 1, 2]), torch.tensor([1, 0, 2, 2])]
    layers = [[attention(generator, len(t), len(t), causal=True) for t in tokens] for _ in range(2)]
    epsilon, names = 0.2, {0: "special", 1: "delimiter"}
    rows = rows_of(SinksByTokenClass({0}, {1, 0}, (epsilon,), minimum_queries=2), *layers, tokens=tokens)
    for number, matrices in enumerate(layers):
        for name in ("first", "special", "delimiter", "other"):
            means: list[list[float]] = [[], []]
            shares = []
            for matrix, ids in zip(matrices, tokens, strict=True):
                classes = ["first", *(names.get(t, "other") for t in ids.tolist()[1:])][:-1]
                alpha = [alphas(head)[:-1] for head in matrix]
                for head in range(2):
                    members = [a for a, of in zip(alpha[head], classes, strict=True) if of == name]
                    means[head] += [sum(members) / len(members)] if members else []
                sinks = [of for head in range(2) for a, of in zip(alpha[head], classes, strict=True) if a > epsilon]
                shares += [100 * sinks.count(name) / len(sinks)] if sinks else []
            label = f"sinks_by_token_class_{name}"
            for head in range(2):
                expected = sum(means[head]) / len(means[head])
                assert value_of(rows, statistic=label, layer=number, head=head) == pytest.approx(expected)
            assert value_of(rows, statistic=f"{label}_share", layer=number, n=len(shares)) == pytest.approx(
                sum(shares) / len(shares), abs=1e-9
            )
