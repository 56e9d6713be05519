"""Which calls are one tile; what is kept from one for the next is of use to it, wherever it was made."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from regard.attention import onepass, tiles
from regard.attention.call import AttentionCall
from regard.attention.onepass import one_pass
from regard.attention.reduction import ReductionRequest


def reduced(*, batch: int = 1, device: str = "cpu") -> tuple[AttentionCall, Tensor | None, dict[str, Tensor]]:
    query, key, value = torch.randn(3, batch, 2, 4, 8, dtype=torch.float64, device=device)
    call = AttentionCall(query=query, key=key, value=value, scale=0.5, causal=True)
    return call, *one_pass(call, ReductionRequest(names=frozenset({"distance"})), output=True)


def check() -> None:
    call, output, found = reduced()
    expected = scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True, scale=0.5)
    torch.testing.assert_close(output, expected)
    weights = (call.query @ call.key.mT * 0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1)
    distances = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    torch.testing.assert_close(found["distance"], (weights * distances).sum(-1))


@pytest.fixture(autouse=True)
def _without_earlier_tables() -> None:
    tiles._future.cache_clear()
    onepass._distance_table.cache_clear()


def test_a_mask_stands_where_its_scores_stand() -> None:
    """Scores are added nothing, without an error, where the mask has no data."""
    with torch.device("meta"):
        call, output, _ = reduced()
    torch.testing.assert_close(
        output, scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True, scale=0.5)
    )
    check()


def test_tables_of_fake_tensors_and_of_transforms_are_not_kept() -> None:
    with FakeTensorMode():
        reduced()
    check()
    tiles._future.cache_clear()
    onepass._distance_table.cache_clear()

    def shown(query: Tensor) -> Tensor:
        call = AttentionCall(query=query.detach(), key=query.detach(), value=query.detach(), scale=0.5, causal=True)
        one_pass(call, ReductionRequest(names=frozenset({"distance"})), output=True)
        return query.sum()

    torch.func.grad(shown)(torch.randn(1, 2, 4, 8, dtype=torch.float64))
    assert tiles._future.cache_info().currsize == onepass._distance_table.cache_info().currsize == 0
    check()


@pytest.mark.parametrize("batch, device", [(0, "cpu"), (0, "meta")])
def test_no_sample_has_reductions_of_no_rows(batch: int, device: str) -> None:
    _, output, found = reduced(batch=batch, device=device)
    assert output is not None
    assert output.shape == (0, 2, 4, 8)
    assert found["distance"].shape == (0, 2, 4)


@pytest.mark.parametrize("heads, is_left_out", [(2, False), (64, True)])
@pytest.mark.parametrize("hidden", ["padding", "room"])
def test_keys_that_no_query_sees_are_computed_in_small_calls_alone(heads: int, is_left_out: bool, hidden: str) -> None:
    query, key = torch.randn(1, heads, 16, 4), torch.randn(1, heads, 128, 4)
    call = AttentionCall(query=query, key=key, value=key, scale=0.5, causal=hidden == "room")
    assert call.query[..., 0].nbytes * 128 <= tiles.BYTES["cpu"]
    if hidden == "padding":
        call = replace(call, key_mask=(torch.arange(128) < 16)[None])
    assert {tile.keys.stop for tile in tiles.tiles(call)} == {16 if is_left_out else 128}
