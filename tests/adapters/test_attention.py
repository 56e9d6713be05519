"""The attention over blocks, against its formulas written out in float64, and what cannot change its weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.attention import ORDERS, SharedAttention
from regard.adapters.queries import max_embeddings
from regard.errors import UserError
from tests.adapters import reference

WIDTH, INNER = 12, 5


def attention(blocks: int, **options: Any) -> SharedAttention:
    """In float64, with a layer norm that is not the identity and keys that tell the queries apart."""
    made = SharedAttention(WIDTH, hidden_size=INNER, **options).double()
    made.use(blocks)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for part in made.norm.parameters():
            part.add_(torch.randn(part.shape, generator=random, dtype=torch.float64) / 3)
    return made


def vectors(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("rows, blocks", [(4, 5), (1, 3), (3, 1)])
def test_the_weights_are_those_of_the_formulas(order: str, temperature: float | None, rows: int, blocks: int) -> None:
    made = attention(blocks, projection_order=order, temperature=temperature, seed=rows)
    expected = reference.attention(made, vectors(rows), blocks, temperature or math.sqrt(WIDTH))
    torch.testing.assert_close(made(vectors(rows)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_the_gradients_are_those_of_the_formulas(order: str) -> None:
    made = attention(4, projection_order=order)
    made.set_trainable(3)
    towards = torch.randn(3, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    trained = [part for part in made.parameters() if part.requires_grad]
    found = torch.autograd.grad((made(vectors(3)) * towards).sum(), trained)
    expected = torch.autograd.grad(
        (reference.attention(made, vectors(3), 4, math.sqrt(WIDTH)) * towards).sum(), trained
    )
    assert len(trained) == 5  # the key, both maps, the layer norm's two
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_two_orders_differ() -> None:
    published, paper = (attention(3, projection_order=order)(vectors(2)) for order in ORDERS)
    assert (published - paper).abs().max() > 1e-3


def test_weights_sum_to_one_and_a_lower_temperature_makes_them_sharper() -> None:
    warm, cold = attention(6, temperature=4.0)(vectors(8)), attention(6, temperature=0.5)(vectors(8))
    torch.testing.assert_close(warm.sum(1), torch.ones(8, dtype=torch.float64))
    assert (cold.amax(1) > warm.amax(1)).all()


def test_a_row_has_the_weights_it_has_alone() -> None:
    made, given = attention(4), vectors(5)
    together = made(given)
    for row in range(5):
        torch.testing.assert_close(made(given[row : row + 1]), together[row : row + 1])


def test_in_half_precision_the_weights_are_of_single_precision() -> None:
    exact = attention(4)
    half = attention(4).to(torch.bfloat16)
    found = half(vectors(3).to(torch.bfloat16))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(1), torch.ones(3))
    torch.testing.assert_close(found.double(), exact(vectors(3)), atol=0.03, rtol=0)


def test_no_block_in_use_is_refused() -> None:
    made = SharedAttention(WIDTH)
    with pytest.raises(UserError, match="adapters: expected at least one that is in use, got none"):
        made(vectors(2).float())
    made.reserve(3)
    with pytest.raises(UserError, match="adapters: expected at least one"):
        made(vectors(2).float())


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(UserError, match="projection_order: expected one of published, paper, got 'both'"):
        SharedAttention(WIDTH, projection_order="both")  # type: ignore[arg-type]


# -- keys -----------------------------------------------------------------------------------------------


def test_keys_that_are_reserved_have_no_part_before_they_are_used() -> None:
    made = attention(2)
    before = made(vectors(3))
    made.reserve(9)
    torch.testing.assert_close(made(vectors(3)), before)
    made.use(3)
    assert made(vectors(3)).shape == (3, 3)


def test_a_key_is_drawn_by_its_number_whenever_it_is_made() -> None:
    at_once, growing, others = attention(4, seed=5), attention(1, seed=5), attention(4, seed=6)
    growing.use(4)
    for one, other, apart in zip(at_once.keys, growing.keys, others.keys, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, apart)
        assert one.dtype == torch.float64
        assert one.abs().max() <= 1
    assert not torch.equal(at_once.keys[0], at_once.keys[1])


def test_only_the_key_that_is_open_and_the_maps_train() -> None:
    made = attention(3)
    made.set_trainable(1)
    assert [key.requires_grad for key in made.keys] == [False, True, False]
    assert {name for name, part in made.named_parameters() if part.requires_grad} == {
        *("down", "up", "norm.weight", "norm.bias", "keys.1")
    }
    made.set_trainable(None)
    assert not any(part.requires_grad for part in made.parameters())


def test_a_key_that_is_dropped_leaves_the_others_scores_alone() -> None:
    made, given = attention(4), vectors(3)
    before = made.scores(given)
    made.delete(1)
    torch.testing.assert_close(made.scores(given), before[:, [0, 2, 3]])
    assert int(made.count) == 3


def test_a_key_that_is_not_in_use_can_be_dropped() -> None:
    made = attention(2)
    made.reserve(4)
    before = made(vectors(3))
    made.delete(3)
    assert (int(made.count), len(made.keys)) == (2, 3)
    torch.testing.assert_close(made(vectors(3)), before)


def test_scores_of_the_blocks_that_are_asked_for() -> None:
    made, given = attention(4), vectors(3)
    torch.testing.assert_close(made.scores(given, [3, 1]), made.scores(given)[:, [3, 1]])


# -- query vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_query_vectors_are_the_highest_values_of_real_tokens(rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    embedded = torch.randn(rows, 6, WIDTH, generator=random, dtype=torch.float64) - 2  # below what padding might be
    real = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0]])[:rows]
    found = max_embeddings(embedded, real)
    assert found.shape == (rows, WIDTH)
    torch.testing.assert_close(found, reference.highest(embedded, real), rtol=0, atol=0)


@pytest.mark.parametrize("left", [True, False])
def test_padding_has_no_part_in_a_query_vector(left: bool) -> None:
    embedded = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 3
    real = torch.ones(2, 4, dtype=torch.bool)
    padding, not_real = torch.full((2, 5, WIDTH), 7.0, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    whole = (padding, embedded) if left else (embedded, padding)
    marks = (not_real, real) if left else (real, not_real)
    assert torch.equal(max_embeddings(torch.cat(whole, 1), torch.cat(marks, 1)), max_embeddings(embedded, real))
