"""What a mask hides from all queries of a block is left out, and no number depends on that."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import blockwise as by_blocks
from regard.attention import tiles as by_tiles
from regard.attention.blockwise import blocks, blockwise, reduce_by_rows
from regard.attention.call import AttentionCall, Operation
from regard.attention.onepass import one_pass
from regard.attention.reduction import ReductionRequest
from regard.attention.spans import key_spans, union
from regard.attention.tiles import tiles

ROWS = 4
ROW_NAMES = ("entropy", "first_mass", "distance", "row_sum", "lse")
COLUMN_NAMES = ("column_mass", "column_sum", "column_square", "weights")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four queries, and of few enough bytes that no call is one tile."""
    monkeypatch.setitem(by_tiles.ROWS, "cpu", ROWS)
    monkeypatch.setitem(by_tiles.BYTES, "cpu", 256)
    monkeypatch.setitem(by_blocks.ROWS, "cpu", (ROWS, ROWS))


def band(queries: int, keys: int, window: int) -> Tensor:
    """True where a key is the query's own or one of those before it."""
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    return ((distance >= 0) & (distance < window))[None, None]


def packed(lengths: list[int]) -> Tensor:
    """True where both tokens are of one sequence, and the key is not later."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ((number[:, None] == number) & torch.ones(len(number), len(number)).tril().bool())[None, None]


def make_call(keep: Tensor, *, batch: int, heads: int = 2, dtype: torch.dtype = torch.float64) -> AttentionCall:
    queries, keys = keep.shape[2:]
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    query = torch.randn(batch, heads, queries, 4, generator=generator, dtype=dtype)
    key, value = torch.randn(2, batch, heads, keys, 4, generator=generator, dtype=dtype)
    return AttentionCall(query=query, key=key, value=value, scale=0.7, keep=keep)


def dense(call: AttentionCall, first_keys: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and reductions of the whole matrix, as they are defined."""
    assert call.keep is not None
    scores = (call.query @ call.key.mT * call.scale).masked_fill(~call.keep, -torch.inf)
    sees = call.keep.any(-1, keepdim=True).expand(*scores.shape[:3], 1)
    weights = torch.where(sees, scores.softmax(-1), 0.0)
    queries, keys = scores.shape[2:]
    distance = (torch.arange(queries)[:, None] + call.offset - torch.arange(keys)).abs().double()
    starts = call.starts or (0,) * len(weights)
    first = torch.zeros(*weights.shape[:3], first_keys, dtype=weights.dtype)
    for sample, start in enumerate(starts):
        for place in range(first_keys):
            if 0 <= start + place < keys:
                first[sample, ..., place] = weights[sample, ..., start + place]
    return weights @ call.value, {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "first_mass": first,
        "distance": (weights * distance).sum(-1),
        "row_sum": weights.sum(-1),
        "lse": scores.logsumexp(-1),
        "column_mass": weights.sum(2),
        "column_sum": weights.sum(2),
        "column_square": weights.square().sum(2),
        "weights": weights.sum(0),
    }


def check(call: AttentionCall) -> None:
    request = ReductionRequest(names=frozenset((*ROW_NAMES, *COLUMN_NAMES)), num_first_keys=3)
    expected_output, expected = dense(call, 3)
    output, found = one_pass(call, request, output=True)
    torch.testing.assert_close(output, expected_output)
    by_rows = reduce_by_rows(call, request)
    for name, tensor in expected.items():
        for backend in (found, by_rows):
            torch.testing.assert_close(backend[name].double(), tensor, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.every_value
@pytest.mark.parametrize(
    "keep, most",
    [
        (band(24, 24, 3), 6 * 6),
        (band(24, 24, 1), 6 * 4),
        (band(9, 30, 5), 3 * 8),
        (packed([8, 4, 12]), 40),
        (packed([8, 4, 12]).mT.contiguous(), 40),
        (band(24, 24, 24), (4 + 8 + 12 + 16 + 20 + 24)),
    ],
)
def test_hidden_ranges_are_not_computed(keep: Tensor, most: int) -> None:
    call = make_call(keep, batch=1)
    check(call)
    of_tiles = [tile for tile in tiles(call) if tile.heads.start == 0]
    assert sum(tile.keys.stop - tile.keys.start for tile in of_tiles) <= most
    assert sum(columns.stop - columns.start for _, columns in blocks(call)) <= most


def test_samples_of_a_tile_see_the_keys_of_all() -> None:
    keep = torch.cat([packed([8, 4, 12]), packed([20, 4]), band(24, 24, 2)])
    call = make_call(keep, batch=3)
    check(call)
    check(replace(call, starts=(0, 5, -2)))
    check(make_call(keep[:1], batch=3))


def test_a_row_that_sees_nothing_has_zeros() -> None:
    keep = band(12, 12, 3).clone()
    keep[:, :, 4:8] = False
    check(make_call(keep, batch=2))
    check(make_call(torch.zeros(1, 1, 12, 12, dtype=torch.bool), batch=1))


@pytest.mark.parametrize("keep", [packed([8, 4, 12]), band(24, 24, 6)], ids=["packed", "window"])
def test_a_prefix_is_that_of_all_keys(keep: Tensor) -> None:
    """Of what the mask left of a block, the first keys were taken for the prefix, and seen outside of the window."""
    call, near = make_call(keep, batch=1), keep & (band(24, 24, 2) | (torch.arange(24) < 3))
    expected, sums = dense(replace(call, keep=near), 3)
    operation = Operation(window=2, prefix=3)
    torch.testing.assert_close(blockwise(call, operation), expected)
    found = reduce_by_rows(replace(call, operation=operation), ReductionRequest(names=frozenset({"column_mass"})))
    torch.testing.assert_close(found["column_mass"], sums["column_mass"])


@given(st.data())
def test_any_mask(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(5, 14)), data.draw(st.integers(3, 14))
    shape = (data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2])), queries, keys)
    seed, share = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.05, 0.2, 0.7]))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    offset = data.draw(st.integers(-1, 3))
    check(replace(make_call(keep, batch=2), offset=offset))


def test_ranges_of_a_mask() -> None:
    keep = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()[None, None]
    call = make_call(torch.cat([keep, keep.flip(-1)]), batch=2)
    spans = key_spans(call, 2)
    assert spans is not None
    assert spans[0] == [slice(1, 4), slice(0, 3)]
    assert [union(block) for block in spans] == [slice(0, 4), slice(0, 0), slice(0, 4)]
    one_row = replace(call, keep=torch.tensor([0, 1, 1, 0]).bool()[None, None, None])
    assert key_spans(one_row, 2) == [[slice(1, 3)]] * 3
    assert union([slice(2, 4), slice(0, 0), slice(3, 5)]) == slice(2, 5)


class _Other(Tensor):
    """A mask that may stand for others."""


def test_nothing_is_read_where_it_cannot_be() -> None:
    call = make_call(band(8, 8, 2), batch=1)
    assert key_spans(replace(call, keep=None), 2) is None
    assert call.keep is not None
    assert key_spans(replace(call, keep=call.keep.to("meta")), 2) is None
    assert key_spans(replace(call, keep=call.keep.as_subclass(_Other)), 2) is None
    for rows in (0, 1):
        assert key_spans(replace(call, query=call.query[:, :, :0], keep=call.keep[:, :, :rows]), 2) is None
