"""Reductions of vectors and outputs against whole matrices in float64, of calls longer than one block of queries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import reference
from regard.attention.call import AttentionCall, ConstantHeadsInput
from regard.hooks.reductions import REDUCTIONS, ROWS, AttentionIO, HeadOutputs, no_projection

BATCH, HEADS, GROUPS, WIDTH, LENGTH = 2, 4, 2, 3, 300
assert LENGTH > ROWS


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(length: int = LENGTH, **options: Any) -> AttentionCall:
    query, key, value = (
        drawn(BATCH, heads, length, WIDTH, seed=heads + place) for place, heads in enumerate((HEADS, GROUPS, GROUPS))
    )
    return AttentionCall(query=query, key=key, value=value, scale=0.7, causal=True, **options)


def windows(length: int = LENGTH, size: int = 40) -> Tensor:
    """A mask of pairs: the last keys up to the own, and those behind it among the tokens of two images."""
    row, column = torch.arange(length)[:, None], torch.arange(length)
    sees = (row >= column) & (row - column < size)
    for first in (240, 270):
        image = (torch.arange(length) >= first) & (torch.arange(length) < first + 10)
        sees |= image[:, None] & image
    return sees[None, None]


def compute(name: str, made: AttentionCall) -> Tensor:
    found = REDUCTIONS[name].compute(AttentionIO(made, no_projection, is_self=True))
    assert isinstance(found, Tensor)
    return found


@pytest.mark.every_value
@pytest.mark.parametrize("padded", [False, True])
def test_sums_over_the_queries_that_a_mask_lets_see_a_key(padded: bool) -> None:
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, :30] = not padded
    made = call(keep=windows(), query_mask=real if padded else None)
    made = AttentionCall(**{**vars(made), "causal": False})
    sees = (windows() & real[:, None, :, None]).double()
    key = made.key.repeat_interleave(HEADS // GROUPS, dim=1)
    norms = made.query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
    cosine = made.query @ key.mT / norms
    for name, pairs in (("cosine_sum", cosine), ("norm_sum", norms), ("pair_count", torch.ones_like(norms))):
        expected = (pairs * sees).sum(2)
        torch.testing.assert_close(compute(name, made).expand_as(expected), expected)
    early = (sees * torch.ones(LENGTH, LENGTH).triu(1)).sum(2)
    assert early.max() == 9
    torch.testing.assert_close(compute("early_query_count", made).double(), early)


@pytest.mark.every_value
@pytest.mark.parametrize("cached", [0, 4])
def test_all_queries_before_a_key_see_it_where_nothing_is_hidden(cached: int) -> None:
    """Queries at positions 4 to 8 behind a cache, or 0 to 8, of which one row begins with two of padding."""
    whole = call(9)
    made = whole.select_tokens(slice(cached, 9), slice(0, 9))
    real = torch.ones(BATCH, 9 - cached, dtype=torch.bool)
    real[1, :2] = False
    made = AttentionCall(**{**vars(made), "causal": False, "query_mask": real})
    positions = torch.arange(cached, 9)
    expected = [[float((real[row] & (positions < key)).sum()) for key in range(9)] for row in range(BATCH)]
    torch.testing.assert_close(compute("early_query_count", made)[:, 0].double(), torch.tensor(expected).double())


def gated(made: AttentionCall, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """What is found of gated outputs, and Σ_i A_ij ‖W_O (g_i ∘ v_j)‖ from the whole matrix."""
    value = made.value.repeat_interleave(HEADS // GROUPS, dim=1)
    output, gate = matrix @ value, drawn(*matrix.shape[:3], WIDTH, seed=5).sigmoid()
    weight = drawn(8, HEADS * WIDTH, seed=6)
    outputs = HeadOutputs("attention", made, output, output * gate, weight, None)
    parts = weight.unflatten(1, (HEADS, WIDTH))
    moved = torch.einsum("mhd,bhqd,bhkd->bhqkm", parts, gate, value).norm(dim=-1)
    found = REDUCTIONS["value_weighted_sum"].compute(outputs)
    return found, (matrix * moved).sum(2)


def test_values_are_weighted_by_the_gates_of_queries_of_several_blocks() -> None:
    made = call(150)
    matrix = (made.query @ made.key.repeat_interleave(HEADS // GROUPS, dim=1).mT * made.scale).masked_fill(
        ~torch.ones(150, 150, dtype=torch.bool).tril(), -torch.inf
    )
    torch.testing.assert_close(*gated(made, matrix.softmax(-1)))


def test_values_are_weighted_by_the_gates_beside_constant_heads() -> None:
    """More keys than a head is wide."""
    rows = drawn(2, 11, 11, seed=7).exp().tril()
    fixed = rows / rows.sum(-1, keepdim=True)
    made = call(11, constant=ConstantHeadsInput(matrices=fixed, heads=(0, 3), normalised=True))
    matrix = reference.weights(call(11))
    matrix[:, [0, 3]] = fixed
    torch.testing.assert_close(*gated(made, matrix))
