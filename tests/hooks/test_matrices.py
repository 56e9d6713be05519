"""Tiles and strongest keys of a call's matrices, against its whole matrix in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import reference, tiles
from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation
from regard.attention.onepass import one_pass
from regard.attention.reduction import ReductionRequest
from regard.hooks.matrices import TileSums, strongest_keys, tile_means

CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both ways": {},
    "sink and cap": {"causal": True, "softcap": 2.0, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bias": {"bias": torch.linspace(-3, 3, 4 * 150 * 150).view(1, 4, 150, 150).sin()},
    "unseen": {"keep": torch.arange(150)[:, None] - torch.arange(150) > 2},
    "mask of a window": {"keep": torch.ones(150, 150).tril().triu(-19).bool()},
    "window": {"causal": True, "operation": Operation(window=20, prefix=2)},
    "window alone": {"causal": True, "operation": Operation(weighting="sigmoid", window=20)},
    "sigmoid": {"causal": True, "operation": Operation(weighting="sigmoid")},
    "constant": {"constant": ConstantHeadsInput(heads=(1, 2), matrices=torch.rand(2, 150, 150).softmax(-1))},
}


def make(case: str, dtype: torch.dtype = torch.float32) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    shapes = (1, 4, 150, 8), (1, 2, 150, 8), (1, 2, 150, 8)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    options = dict(CASES[case])
    if "keep" in options:
        options["keep"] = options["keep"][None, None]
    return AttentionCall(query=query, key=key, value=value, scale=0.7, **options)


def matrix(call: AttentionCall) -> Tensor:
    """Return the weights that are measured, in float64, of the numbers that the call has."""
    exact = replace(call, **{name: getattr(call, name).double() for name in ("query", "key", "value")})
    return reference.distribution(exact)[0][0].double()


def mean_of_tiles(weights: Tensor, count: int) -> Tensor:
    """Return means from slices, one tile at a time."""
    (heads, queries, keys), ranges = weights.shape, []
    for size in (queries, keys):
        parts = [index * min(count, size) // size for index in range(size)]
        ranges.append([[i for i, part in enumerate(parts) if part == n] for n in range(min(count, size))])
    rows = [[weights[:, down][:, :, across].sum((1, 2)) / len(down) for across in ranges[1]] for down in ranges[0]]
    assert len(rows[0][0]) == heads
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=1)


@pytest.mark.parametrize("case", CASES)
def test_tiles_are_means_of_the_matrix(case: str) -> None:
    call = make(case)
    torch.testing.assert_close(tile_means(call, 24).double(), mean_of_tiles(matrix(call), 24), rtol=1e-5, atol=1e-7)


def test_there_are_no_more_tiles_than_tokens() -> None:
    call = make("causal").select_tokens(slice(0, 5), slice(0, 5))
    torch.testing.assert_close(tile_means(call, 24).double(), matrix(call), rtol=1e-5, atol=1e-7)


def test_weights_of_bfloat16_are_those_of_its_numbers() -> None:
    call = make("causal", torch.bfloat16)
    torch.testing.assert_close(tile_means(call, 7).double(), mean_of_tiles(matrix(call), 7), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", ["causal", "sink and cap"])
@pytest.mark.parametrize("num_bytes", [1 << 21, 1 << 12])
def test_a_forward_sums_the_first_sample_while_it_has_its_tiles(
    case: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a tile is of one sample, and of some heads."""
    monkeypatch.setitem(tiles.BYTES, "cpu", num_bytes)
    one, other = make(case), make(case)
    batch = replace(one, **{n: torch.cat([getattr(one, n), -getattr(other, n)]) for n in ("query", "key", "value")})
    sums = TileSums(batch, 24)
    output, reductions = one_pass(
        batch, ReductionRequest(names=frozenset({"column_mass"}), visitors=(sums.add,)), output=True
    )
    sums.finish()
    assert sums.means is not None
    torch.testing.assert_close(sums.means.double(), mean_of_tiles(matrix(one), 24), rtol=1e-5, atol=1e-7)
    alone = one_pass(batch, ReductionRequest(names=frozenset({"column_mass"})), output=True)
    assert torch.equal(output, alone[0])
    assert torch.equal(reductions["column_mass"], alone[1]["column_mass"])


@pytest.mark.every_value
@pytest.mark.parametrize("case", CASES)
def test_the_strongest_keys_are_those_of_the_matrix(case: str) -> None:
    call = make(case)
    index, weight = strongest_keys(call, [2, 0], 8)
    weights = matrix(call)[[2, 0]]
    torch.testing.assert_close(weight.double(), weights.topk(8).values, rtol=1e-5, atol=1e-7)
    seen = weight > 0
    torch.testing.assert_close(weights.gather(2, index)[seen], weight.double()[seen], rtol=1e-5, atol=1e-7)
    assert not index[~seen].any()
