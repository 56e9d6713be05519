"""Cheaper forms of constants against their definitions written out."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertModel

import regard
from regard.attention.call import AttentionCall, ConstantHeadsInput
from regard.attention.constant import constant_weights
from regard.constants import FORMS, Constants, Form, Origin, approximate, approximation_error, count_multiply_adds
from regard.errors import UserError

T, HEADS = 12, 3
Sizes = dict[str, int]


def drawn(seed: int = 0, length: int = T, layers: int = 1, counts: bool = False) -> Constants:
    """Random rows that sum to one, or averages of inputs of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {
        ("encoder", layer): torch.randn(HEADS, length, length, generator=generator).mul(2).softmax(-1)
        for layer in range(layers)
    }
    lengths = torch.randint(1, length + 1, (9,), generator=generator)
    real = (torch.arange(length) < lengths[:, None]).long()
    seen = {"encoder": real.mT @ real} if counts else {}
    return Constants(matrices=matrices, counts=seen, origin=Origin(source="average"))


def weights_of(constants: Constants) -> Tensor:
    """√ of √(n_i n_j), by hand."""
    length = constants.length
    found = torch.ones(length, length, dtype=torch.float64)
    for query in range(length if constants.counts else 0):
        for key in range(length):
            often = [max(int(constants.counts["encoder"][at, at]), 1) for at in (query, key)]
            found[query, key] = (often[0] * often[1]) ** 0.25
    return found


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("rank", [1, 3, T - 1])
def test_low_rank_is_what_singular_values_give(counts: bool, rank: int) -> None:
    constants = drawn(counts=counts)
    found = approximate(constants, "low-rank", rank).matrices["encoder", 0]
    weight = weights_of(constants)
    for head, matrix in enumerate(constants.matrices["encoder", 0].double()):
        scaled = weight * matrix
        values, vectors = torch.linalg.eigh(scaled.mT @ scaled)
        nearest = scaled @ vectors[:, -rank:] @ vectors[:, -rank:].mT
        torch.testing.assert_close(found[head].double(), nearest / weight, rtol=1e-4, atol=1e-5)
        missed = approximation_error(constants, approximate(constants, "low-rank", rank))["encoder", 0][head]
        assert float(missed) == pytest.approx(float((values[:-rank].sum() / values.sum()).sqrt()), rel=1e-4)
        assert int(torch.linalg.matrix_rank(found[head].double(), rtol=1e-5)) == rank


def test_queries_and_keys_of_cross_attention_weigh_by_their_own_counts() -> None:
    """Keys from the eighth on are in no sample, so that their columns are zero, and stay so."""
    queries, keys = ((torch.arange(T) < torch.tensor(ends)[:, None]).double() for ends in ([12, 12, 3], [2, 5, 7]))
    counts = queries.mT @ keys
    matrix = drawn().matrices["encoder", 0] * (counts > 0)
    constants = Constants(
        matrices={("cross", 0): matrix}, counts={"cross": counts.long()}, origin=Origin(source="average")
    )
    often = [real.sum(0).clamp(min=1).sqrt() for real in (queries, keys)]
    weight = (often[0][:, None] * often[1]).sqrt()
    found = approximate(constants, "low-rank", 2)
    for head, scaled in enumerate(matrix.double() * weight):
        values, vectors = torch.linalg.eigh(scaled.mT @ scaled)
        nearest = scaled @ vectors[:, -2:] @ vectors[:, -2:].mT / weight
        torch.testing.assert_close(found.matrices["cross", 0][head].double(), nearest, rtol=1e-4, atol=1e-5)
        missed = float((values[:-2].sum() / values.sum()).sqrt())
        assert float(approximation_error(constants, found)["cross", 0][head]) == pytest.approx(missed, rel=1e-4)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_columns_and_band_keep_the_best_columns(counts: bool, size: int) -> None:
    constants = drawn(counts=counts)
    found = approximate(constants, "columns+band", size).matrices["encoder", 0]
    weight = weights_of(constants)
    for head, matrix in enumerate(constants.matrices["encoder", 0]):
        beside = {}
        for key in range(T):
            rows = [query for query in range(T) if abs(query - key) >= size]
            beside[key] = sum(float((weight[query, key] * matrix[query, key]) ** 2) for query in rows)
        columns = sorted(beside, key=lambda key: -beside[key])[:size]
        for query in range(T):
            for key in range(T):
                kept = abs(query - key) < size or key in columns
                assert float(found[head, query, key]) == pytest.approx(kept * float(matrix[query, key]), rel=1e-5)


def test_special_columns_and_the_neighbourhood_are_found() -> None:
    """A head on the first and the last token and on its neighbours is kept whole by two columns and a band of three."""
    matrix = torch.zeros(1, T, T)
    matrix[0, :, 0], matrix[0, :, T - 1] = 0.4, 0.2
    for offset in (-1, 0, 1):
        matrix[0] += torch.diag(torch.full((T - abs(offset),), 0.1), offset)
    constants = Constants(matrices={("encoder", 0): matrix}, origin=Origin(source="average"))
    torch.testing.assert_close(approximate(constants, "columns+band", 2).matrices["encoder", 0], matrix)
    assert float(approximation_error(constants, approximate(constants, "low-rank", 2))["encoder", 0]) > 0.1


def test_top_k_keeps_the_largest_of_each_row() -> None:
    constants = drawn()
    found = approximate(constants, "top-k", 3).matrices["encoder", 0]
    for row, kept in zip(constants.matrices["encoder", 0].flatten(0, 1), found.flatten(0, 1), strict=True):
        largest = sorted(row.tolist(), reverse=True)[:3]
        assert sorted(kept[kept > 0].tolist(), reverse=True) == pytest.approx(largest)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("size", [2, 4, T])
def test_toeplitz_is_the_average_at_each_offset_and_at_both_ends(counts: bool, size: int) -> None:
    constants = drawn(counts=counts)
    found = approximate(constants, "toeplitz", size).matrices["encoder", 0]
    seen = constants.counts["encoder"].double() if counts else torch.ones(T, T, dtype=torch.float64)
    for head, matrix in enumerate(constants.matrices["encoder", 0].double()):
        for query in range(T):
            for key in range(T):
                if key in (0, T - 1):
                    among = [(i, key) for i in range(T)]
                else:
                    among = [(i, j) for i in range(T) for j in range(1, T - 1) if i - j == query - key]
                often = sum(float(seen[pair]) for pair in among)
                average = sum(float(seen[pair] * matrix[pair]) for pair in among) / often if often else 0.0
                if key not in (0, T - 1) and abs(query - key) >= size:
                    average = 0.0
                if often:
                    assert float(found[head, query, key]) == pytest.approx(average, rel=1e-4)


def test_toeplitz_keeps_the_columns_of_separators() -> None:
    """A weight of their own each, which is no part of the means by offset."""
    matrix = torch.zeros(1, T, T)
    for column, weight in ((0, 0.4), (5, 0.3), (T - 1, 0.2)):
        matrix[0, :, column] = weight
    origin = Origin(source="average", layout="paper", separators=(0, 5, T - 1))
    constants = Constants(matrices={("encoder", 0): matrix}, origin=origin)
    torch.testing.assert_close(approximate(constants, "toeplitz", 2).matrices["encoder", 0], matrix)


@pytest.mark.parametrize("form", ["low-rank", "columns+band", "top-k"])
@pytest.mark.parametrize("counts", [False, True])
def test_the_whole_size_is_exact(form: Form, counts: bool) -> None:
    constants = drawn(layers=2, counts=counts)
    found = approximate(constants, form, T)
    for place, matrix in constants.matrices.items():
        torch.testing.assert_close(found.matrices[place], matrix, rtol=1e-5, atol=1e-7)
        assert float(approximation_error(constants, found)[place].max()) < 1e-6


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(2, 10), form=st.sampled_from(FORMS), counts=st.booleans())
def test_a_larger_size_is_never_worse(seed: int, length: int, form: Form, counts: bool) -> None:
    """With counts the means of Toeplitz are the best by the counts themselves, not by √(n_i n_j)."""
    constants = drawn(seed, length, counts=counts and form != "toeplitz")
    missed = [
        approximation_error(constants, approximate(constants, form, size))["encoder", 0]
        for size in range(1, length + 1)
    ]
    for smaller, larger in itertools.pairwise(missed):
        assert bool((larger <= smaller + 1e-6).all())
    assert all(bool(((one >= 0) & (one <= 1 + 1e-6)).all()) for one in missed)


@pytest.mark.parametrize("form", FORMS)
def test_rows_sum_to_one_in_absolute_value_where_they_are_applied(form: Form) -> None:
    matrices = approximate(drawn(), form, 2).matrices["encoder", 0]
    real = torch.tensor([[True] * T, [True] * 5 + [False] * (T - 5)])
    value = torch.randn(2, HEADS, T, 4)
    signed = bool((matrices < 0).any())
    assert signed == (form == "low-rank")
    constant = ConstantHeadsInput(matrices=matrices, heads=tuple(range(HEADS)), signed=signed)
    call = AttentionCall(query=value, key=value, value=value, scale=1.0, key_mask=real, constant=constant)
    total = constant_weights(call).abs().sum(-1)
    assert bool(((total - 1).abs() < 1e-5)[total > 0].all())
    assert bool((total[0] > 0).all())


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_they_serve_in_a_model(form: Form) -> None:
    """The whole size gives what the averages give; a small one is another model, but one."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=60, initializer_range=0.5, **sizes)).eval()
    ids = torch.randint(1, 60, (5, T))
    mask = (torch.arange(T) < torch.tensor([12, 9, 7, 12, 4])[:, None]).long()
    averages = regard.average_attention(model, [{"input_ids": ids, "attention_mask": mask}], T)

    def hidden(constants: Constants) -> Tensor:
        with regard.replacing(model, constants):
            return model(input_ids=ids, attention_mask=mask)[0][mask.bool()]

    expected = hidden(averages)
    small = hidden(approximate(averages, form, 1))
    assert bool(small.isfinite().all())
    assert not torch.allclose(small, expected, atol=1e-2)
    if form != "toeplitz":
        torch.testing.assert_close(hidden(approximate(averages, form, T)), expected, rtol=1e-4, atol=1e-4)


def test_multiply_adds_are_those_of_the_entries() -> None:
    """Counted on what each form holds; columns and band count apart from each other."""
    for size in (1, 2, 5, T):
        steps = torch.arange(T)
        band = int(((steps[:, None] - steps).abs() < size).sum())
        assert count_multiply_adds("low-rank", size, T) == 2 * T * size
        assert count_multiply_adds("columns+band", size, T) == size * T + band
        assert count_multiply_adds("top-k", size, T) == size * T
        assert count_multiply_adds("toeplitz", size, T) == band + 2 * T
    assert count_multiply_adds("dense", 1, T) == T * T
    assert count_multiply_adds("top-k", T, T) == T * T


def test_they_say_what_they_are_and_can_be_saved(tmp_path: Any) -> None:
    constants = drawn(counts=True)
    for form in FORMS:
        made = approximate(constants, form, 2)
        assert made.origin.notes == (f"approximated as {form} of size 2",)
        assert not made.counts
        assert Constants.load(made.save(tmp_path / "made.safetensors")).origin == made.origin


def test_what_makes_no_sense_is_refused() -> None:
    constants = drawn()
    wrong: Any = "sparse"
    for call, what in (
        (lambda: approximate(constants, wrong, 1), "form: expected one of low-rank"),
        (lambda: approximate(constants, "low-rank", 0), "size: expected 1 to 12"),
        (lambda: approximate(constants, "top-k", T + 1), "size: expected 1 to 12"),
        (lambda: count_multiply_adds("toeplitz", 9, 8), "size: expected 1 to 8"),
        (lambda: approximation_error(constants, drawn(length=5)), "same layers and length"),
        (lambda: approximation_error(constants, drawn(layers=2)), "same layers and length"),
    ):
        with pytest.raises(UserError, match=what) as told:
            call()
        assert "\n" not in str(told.value)


def test_a_head_of_nothing_has_no_error() -> None:
    constants = Constants(matrices={("encoder", 0): torch.zeros(1, 4, 4)}, origin=Origin(source="zeros"))
    for form in FORMS:
        found = approximate(constants, form, 2)
        assert not found.matrices["encoder", 0].any()
        assert bool(approximation_error(constants, found)["encoder", 0].isnan().all())
