"""Constants at other lengths: crops, fits, and what they give inside a model."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import regard
from regard.constants import Constants, Origin, approximate, make_data_free, to_length
from regard.constants.lengths import fit_length
from regard.errors import UserError

T = 16


def one(matrix: Tensor, **origin: Any) -> Constants:
    """Constants of one layer."""
    return Constants(matrices={("encoder", 0): matrix}, origin=Origin(**{"source": "test", **origin}))


def regular(length: int, reach: int = 3, columns: dict[int, float] | None = None, heads: int = 2) -> Tensor:
    """Weights by offset up to `reach`, and columns that are the same in every row: (head, query, key)."""
    offset = torch.arange(length)[:, None] - torch.arange(length)
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(heads, 2 * reach + 1, generator=generator)
    matrix = weights[:, (offset + reach).clamp(0, 2 * reach)] * (offset.abs() <= reach)
    for column, weight in (columns or {0: 0.7, length - 1: 0.4}).items():
        matrix[:, :, column] = weight * torch.arange(1, heads + 1)[:, None]
    return matrix


@pytest.mark.parametrize("length", [9, 10, 15, 17, 32, 61])
@pytest.mark.parametrize("layout", ["natural", "paper"])
def test_the_fit_of_offsets_and_ends_is_exact(length: int, layout: str) -> None:
    separators = {"natural": (), "paper": (0, T - 1)}[layout]
    found = to_length(one(regular(T), layout=layout, separators=separators), length)
    expected = regular(length) if layout == "paper" or length > T else regular(T)[:, :length, :length]
    torch.testing.assert_close(found.matrices["encoder", 0], expected)
    assert found.length == length
    assert found.origin.layout == layout


@pytest.mark.parametrize("length", [8, 9, 15, 24, 31, 40])
@pytest.mark.parametrize("old", [16, 17])
def test_separators_stand_where_the_other_length_has_them(old: int, length: int) -> None:
    """Two tokens before, two between as those of RoBERTa, one behind (see `regard.data.encode`)."""

    def places(size: int) -> tuple[int, ...]:
        return (0, 1, size // 2, size // 2 + 1, size - 1)

    def matrix(size: int) -> Tensor:
        return regular(size, reach=2, columns=dict(zip(places(size), (0.9, 0.6, 0.5, 0.3, 0.2), strict=True)))

    found = to_length(one(matrix(old), layout="paper", separators=places(old)), length)
    assert found.origin.separators == places(length)
    torch.testing.assert_close(found.matrices["encoder", 0], matrix(length))
    assert any(f"from {old} to {length}" in note for note in found.origin.notes)
    back = to_length(found, old)
    assert back.origin.separators == places(old)
    torch.testing.assert_close(back.matrices["encoder", 0], matrix(old))


@pytest.mark.parametrize("length, rows", [(6, [0, 1, 2, 4, 5, 7]), (12, [0, 1, 2, 3, 3, 3, 4, 5, 6, 6, 6, 7])])
def test_rows_of_special_tokens_take_their_sums_along(length: int, rows: list[int]) -> None:
    """Sums went by the number of the row: that of the last separator was the sum of a text's token."""
    sums = torch.rand(2, 8) + 0.5
    origin = Origin(source="average", layout="paper", separators=(0, 4, 7))
    matrices = {("encoder", 0): torch.rand(2, 8, 8)}
    constants = Constants(matrices=matrices, origin=origin, row_sums={("encoder", 0): sums})
    fitted = to_length(constants, length)
    assert fitted.origin.separators == (0, length // 2, length - 1)
    assert torch.equal(fitted.row_sums["encoder", 0], sums[:, rows])


@pytest.mark.parametrize(
    "change", [lambda c: to_length(c, 3), lambda c: to_length(c, 7), lambda c: approximate(c, "top-k", 1)]
)
def test_averages_of_before_row_sums_were_kept_get_them(change: Any) -> None:
    matrix = torch.tensor([[0.5, 0, 0, 0], [0.3, 0.3, 0, 0], [0.2, 0.3, 0.2, 0], [0.4, 0.1, 0.1, 0.2]])[None]
    sums = torch.tensor([[0.5, 0.6, 0.7, 0.8]])
    counts, squares = {"decoder": torch.full((4, 4), 2)}, {("decoder", 0): torch.ones(1)}
    parts: dict[str, Any] = {"matrices": {("decoder", 0): matrix}, "counts": counts, "squares": squares}
    old = Constants(**parts, origin=Origin(source="average"))
    new = Constants(**parts, origin=Origin(source="average"), row_sums={("decoder", 0): sums})
    torch.testing.assert_close(change(old).row_sums["decoder", 0], change(new).row_sums["decoder", 0])
    of_one = {("decoder", 0): matrix / sums[..., None]}
    assert not change(Constants(**{**parts, "matrices": of_one}, origin=Origin(source="average"))).row_sums


def test_separators_stay_inside_of_two_tokens() -> None:
    """Column 9, one behind the middle, would be column 2; column 13, two before the end, column −1."""
    held = one(regular(T), layout="paper", separators=(0, T // 2, T // 2 + 1, T - 3, T - 1))
    found = to_length(held, 2)
    assert found.origin.separators == (0, 1, 1, 0, 1)
    assert found.matrices["encoder", 0].shape == (2, 2, 2)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), old=st.integers(1, 12), length=st.integers(1, 40))
def test_causal_constants_stay_causal_and_others_do_not_become_so(seed: int, old: int, length: int) -> None:
    drawn = torch.rand(2, old, old, generator=torch.Generator().manual_seed(seed)) + 0.1
    found = to_length(one(drawn.tril()), length).matrices["encoder", 0]
    assert not found.triu(1).any()
    assert found.shape == (2, length, length)
    assert bool((found >= 0).all())
    assert bool(found.isfinite().all())
    if old > 2 and length > 1:
        assert to_length(one(drawn), length).matrices["encoder", 0].triu(1).any()
        assert bool((found.sum(-1) > 0).all()), "no query is left without a key"


def test_constants_of_one_token_have_its_column_alone() -> None:
    found = to_length(one(torch.full((1, 1, 1), 0.8)), 3).matrices["encoder", 0]
    torch.testing.assert_close(found, torch.tensor([[[0.8, 0.0, 0.0]]]).expand(1, 3, 3))


def test_the_causal_fit_holds_the_first_key_alone() -> None:
    matrix = regular(T, columns={0: 0.7}).tril()
    found = to_length(one(matrix), 40).matrices["encoder", 0]
    torch.testing.assert_close(found, regular(40, columns={0: 0.7}).tril())


def test_a_head_of_next_tokens_alone_is_not_causal() -> None:
    """All that stands above the diagonal is next to it; one query of T attends to the last key."""
    expected = torch.diag(torch.ones(23), 1)
    expected[:, -1] = 1 / T
    torch.testing.assert_close(fit_length(torch.diag(torch.ones(T - 1), 1)[None], None, 24)[0], expected)


def test_causal_constants_stay_causal_with_separators() -> None:
    columns = {0: 0.9, T // 2: 0.5, T - 1: 0.2}
    matrix = regular(T, columns=columns).tril()
    found = to_length(one(matrix, layout="paper", separators=tuple(columns)), 24).matrices["encoder", 0]
    assert not found.triu(1).any()
    assert bool((found[:, 12:, 12] > 0).all())


def test_the_fit_weighs_by_counts() -> None:
    """Two entries at an offset or in an end column, seen unequally often; an entry never seen does not count."""
    matrix = torch.zeros(1, 5, 5)
    counts = torch.zeros(5, 5, dtype=torch.long)
    for (query, key), weight, count in (((2, 1), 0.2, 1), ((3, 2), 0.6, 3), ((4, 3), 9.0, 0)):
        matrix[0, query, key], counts[query, key] = weight, count
    matrix[0, 1, 3], counts[1, 3] = 0.5, 2
    for (query, key), weight, count in (((1, 0), 0.2, 1), ((3, 0), 0.6, 3), ((0, 4), 0.3, 2), ((2, 4), 0.9, 1)):
        matrix[0, query, key], counts[query, key] = weight, count
    found = fit_length(matrix, counts, 7)
    torch.testing.assert_close(found[0, :, 0], torch.full((7,), (0.2 + 3 * 0.6) / 4))
    torch.testing.assert_close(found[0, :, 6], torch.full((7,), (2 * 0.3 + 0.9) / 3))
    assert float(found[0, 4, 3]) == pytest.approx((0.2 + 3 * 0.6) / 4)
    assert float(found[0, 2, 4]) == pytest.approx(0.5)


def test_offsets_never_seen_get_the_average_of_the_far_ones() -> None:
    """At six tokens and without the end columns, four offsets are seen behind; the farther half are three and four."""
    weights = {1: 0.5, 2: 0.3, 3: 0.2, 4: 0.1}
    matrix = torch.zeros(1, 6, 6)
    for offset, weight in weights.items():
        matrix[0] += torch.diag(torch.full((6 - offset,), weight), -offset)
    matrix[0, 0, 1] = 0.25
    found = fit_length(matrix, None, 12)[0]
    far = (2 * 0.2 + 1 * 0.1) / 3
    assert [float(found[11, 11 - offset]) for offset in (3, 4)] == pytest.approx([0.2, 0.1])
    assert [float(found[11, 11 - offset]) for offset in (5, 7, 10)] == pytest.approx([far] * 3)


@pytest.mark.parametrize("source", ["identity", "toeplitz", "zeros"])
@pytest.mark.parametrize("length", [7, 40])
@pytest.mark.parametrize("layout", ["natural", "paper"])
def test_data_free_constants_are_made_anew(source: str, length: int, layout: str) -> None:
    held = (0, T // 2, T - 1) if layout == "paper" else ()
    made = make_data_free(source, one(regular(T), layout=layout, separators=held))
    found = to_length(made, length)
    expected = make_data_free(source, one(regular(length)))
    assert torch.equal(found.matrices["encoder", 0], expected.matrices["encoder", 0])
    assert found.origin.source == source
    assert found.origin.separators == ((0, length // 2, length - 1) if layout == "paper" else ())


def test_data_free_constants_that_were_approximated_stay_so() -> None:
    few = approximate(make_data_free("toeplitz", one(regular(T))), "top-k", 2)
    cropped, fitted = to_length(few, 7), to_length(few, 20)
    assert torch.equal(cropped.matrices["encoder", 0], few.matrices["encoder", 0][:, :7, :7])
    assert int((cropped.matrices["encoder", 0] > 0).sum(-1).max()) == 2
    assert few.origin.notes == cropped.origin.notes == fitted.origin.notes[:1]


def test_the_same_length_is_the_same_and_none_is_refused() -> None:
    constants = one(regular(T))
    assert to_length(constants, T) is constants
    for length in (0, -3):
        with pytest.raises(UserError, match="length: expected at least 1") as told:
            to_length(constants, length)
        assert "\n" not in str(told.value)


# -- in a model -----------------------------------------------------------------------------------------

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON: dict[str, Any] = {"vocab_size": 60, "max_position_embeddings": 64, "initializer_range": 0.5, **SIZES}


@pytest.fixture(scope="module", params=["bert", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(2)
    return (BertModel(BertConfig(**COMMON)) if request.param == "bert" else LlamaModel(LlamaConfig(**COMMON))).eval()


def batch(samples: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = torch.arange(length) < torch.linspace(length, max(length // 2, 1), samples).round()[:, None]
    ids = torch.randint(1, 60, (samples, length), generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long()}


@torch.no_grad()
def test_a_crop_is_what_a_short_input_gets_anyway(model: Any) -> None:
    whole = regard.average_attention(model, [batch(6, 24)], 24)
    inputs = batch(4, 10, seed=1)
    with regard.replacing(model, whole):
        expected = model(**inputs)[0]
    with regard.replacing(model, to_length(whole, 10)):
        found = model(**inputs)[0]
    torch.testing.assert_close(found, expected)
    plain = model(**inputs)[0]
    assert not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_set_of_lengths_serves_each_input_by_the_shortest(model: Any) -> None:
    short = regard.average_attention(model, [batch(6, 10)], 10)
    several = [to_length(short, 24), short]
    for length in (8, 10, 24):
        inputs = batch(3, length, seed=2)
        with regard.replacing(model, several):
            found = model(**inputs)[0]
        with regard.replacing(model, short if length <= 10 else several[0]):
            torch.testing.assert_close(found, model(**inputs)[0])


@torch.no_grad()
def test_a_fit_serves_longer_inputs(model: Any) -> None:
    short = regard.average_attention(model, [batch(6, 10)], 10)
    inputs = batch(3, 31, seed=3)
    with pytest.raises(UserError, match="at most 10 tokens"), regard.replacing(model, short):
        model(**inputs)
    with regard.replacing(model, to_length(short, 31)):
        assert bool(model(**inputs)[0].isfinite().all())


def test_constants_in_double_precision_take_another_length() -> None:
    matrix = regular(4)
    found = to_length(one(matrix.double()), 6).matrices["encoder", 0]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), to_length(one(matrix), 6).matrices["encoder", 0])


def test_keys_and_offsets_that_no_sample_has_get_nothing() -> None:
    counts = torch.ones(6, 6, dtype=torch.int64)
    counts[:, 0] = 0
    counts.diagonal(-2).zero_()
    fitted = fit_length((counts * 0.25)[None], counts, 7)[0]
    expected = torch.full((7, 7), 0.25)
    expected[:, 0] = 0
    expected.diagonal(-2)[:] = 0
    expected[:, 6] = 0.25  # a key by itself: the last one of a matrix that is not causal
    torch.testing.assert_close(fitted, expected)
