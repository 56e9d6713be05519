"""Which way a layer attends, of calls made by hand."""

import pytest
import torch
from torch import nn

from regard.attention.call import AttentionCall
from regard.hooks.direction import is_causal_layer


def call(keep: torch.Tensor) -> AttentionCall:
    queries, keys = keep.shape
    query, key = torch.zeros(1, 2, queries, 4), torch.zeros(1, 2, keys, 4)
    return AttentionCall(query=query, key=key, value=key, scale=1.0, keep=keep[None, None])


def module(is_causal: bool | None) -> nn.Module:
    made = nn.Module()
    if is_causal is not None:
        made.is_causal = is_causal  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("is_causal", [True, False])
def test_several_queries_behind_a_cache_are_told_by_the_module(is_causal: bool) -> None:
    """Their mask is no square: what stands above its diagonal are earlier keys."""
    steps = call(torch.ones(2, 5, dtype=torch.bool).tril(3))
    assert is_causal_layer(module(is_causal), steps) == is_causal


def test_a_mask_of_tokens_that_see_themselves_alone_tells_nothing() -> None:
    alone = call(torch.eye(3, dtype=torch.bool))
    assert [is_causal_layer(module(told), alone) for told in (True, None, False)] == [True, True, False]


def test_a_mask_tells_a_layer_that_sees_later_tokens() -> None:
    whole, earlier = torch.ones(4, 4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool).tril()
    prefix = earlier.clone()
    prefix[:2, :2] = True  # two tokens that see each other
    for told in (True, None, False):
        assert is_causal_layer(module(told), call(earlier))
        assert not is_causal_layer(module(told), call(whole))
        assert is_causal_layer(module(told), call(prefix), embeds_tokens=True)
    assert not is_causal_layer(module(False), call(prefix))  # chunks of a streaming encoder
    ahead = torch.ones(4, 4, dtype=torch.bool).triu()  # each sees itself and later ones
    assert not is_causal_layer(module(None), call(ahead))
