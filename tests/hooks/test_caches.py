"""The cache of a forward is found by the name of each release of Transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from regard.hooks.caches import CACHE_NAMES, cache_name, is_filled, read_cache
from regard.hooks.forward_pass import ForwardContext
from tests.named_cache import behind


def filled(tokens: int = 3) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, tokens, 4), torch.zeros(1, 2, tokens, 4), 0)
    return cache


class Old(nn.Module):
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...


class New(nn.Module):
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


class Open(nn.Module):
    def forward(self, input_ids: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "module, name",
    [
        (Old(), "past_key_values"),
        (New(), "cache"),
        (New(), "past_key_values"),
        *((Open(), name) for name in CACHE_NAMES),
    ],
)
def test_a_forward_behind_a_cache_is_a_later_step_by_either_name(module: nn.Module, name: str) -> None:
    given = {"input_ids": torch.ones(1, 1, dtype=torch.long), name: filled()}
    assert ForwardContext.from_arguments(module, (), given, None).offset == 3


def test_a_cache_by_position() -> None:
    for module in (Old(), New()):
        assert ForwardContext.from_arguments(module, (torch.ones(1, 1).long(), filled(2)), {}, None).offset == 2


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_arguments_and_outputs(name: str) -> None:
    cache, other = filled(), next(other for other in CACHE_NAMES if other != name)
    assert cache_name({name: cache, other: None}) == name
    assert read_cache({name: cache, other: None}) is cache
    assert read_cache(SimpleNamespace(**{name: cache})) is cache
    assert read_cache((cache,)) is None
    assert read_cache(BaseModelOutputWithPast(last_hidden_state=torch.zeros(1))) is None


def test_the_output_of_this_release() -> None:
    cache: Any = filled()
    assert read_cache(BaseModelOutputWithPast(**behind(cache))) is cache


def test_what_else_is_called_cache_is_none() -> None:
    assert read_cache({"cache": {"slen": 3}}) is None
    assert read_cache({"cache": {"slen": 3}, "past_key_values": "tuple"}) == "tuple"


def test_whether_tokens_were_read() -> None:
    assert is_filled(filled())
    assert not is_filled(DynamicCache())
    assert is_filled((0,))
    assert not is_filled(())


@pytest.mark.parametrize("first", ["linear_attention", "sliding_attention"])
def test_padding_is_read_from_masks_by_kind_of_layer_in_any_order(first: str) -> None:
    """`generate` with a static cache makes them in the order of a set; behind the cache linear attention has none."""
    padding = torch.tensor([[True, True, True, True], [False, False, True, True]])
    pairs = padding[:, None, None, :] & torch.ones(4, 4, dtype=torch.bool).tril()
    steps: list[tuple[dict[str, Any], int]] = [
        ({"linear_attention": padding[:, :3].long(), "sliding_attention": pairs[:, :, :3]}, 3),
        ({"linear_attention": None, "sliding_attention": pairs[:, :, 3:]}, 1),
    ]
    cache, last = DynamicCache(), None
    for masks, tokens in steps:
        ordered = {first: masks[first], **masks}
        ids = torch.ones(2, tokens, dtype=torch.long)
        last = ForwardContext.from_arguments(Open(), (ids,), {"attention_mask": ordered, **behind(cache)}, last)
        cache = filled(3)
    assert last is not None
    assert last.token_mask is not None
    assert torch.equal(last.token_mask, padding)
