"""Attention and masks that a user has registered in Transformers, and continuous batching: refused or exact."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard
from regard.errors import UserError
from regard.hooks import watching
from regard.models import RegardConfig, RegardForCausalLM
from tests.hooks.test_fidelity import SMALL
from tests.named_cache import behind, cache_of

IDS = torch.arange(4, 24).view(2, 10)


@wraps(sdpa_attention_forward)
def same(*args: Any, **options: Any) -> Any:
    return sdpa_attention_forward(*args, **options)


def sharper(*args: Any, scaling: float, **options: Any) -> Any:
    return sdpa_attention_forward(*args, scaling=2 * scaling, **options)


def other_mask(**options: Any) -> Tensor | None:
    return sdpa_mask(**options)


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Register an attention `mine`, and a mask function if there is one, until the test is over."""
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping

    def register(attention: Any, mask: Any = sdpa_mask) -> None:
        AttentionInterface.register("mine", attention)
        if mask is not None:
            AttentionMaskInterface.register("mine", mask)

    yield register
    for mapping in (functions, masks):
        mapping.pop("mine", None)


def llama(implementation: str = "mine") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def blocks(model: Any) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "watching": lambda: watching(model, "column_mass"),
        "operation": lambda: regard.replacing(model, "softmax+window=4"),
        "heads": lambda: regard.replacing(model, "zeros", [(0, 1)]),
        "constants": lambda: regard.replacing(model, regard.average_attention(model, [IDS], length=10), [(0, 1)]),
    }


@pytest.mark.parametrize("name", blocks(None))
@torch.no_grad()
def test_a_registered_attention_is_refused_if_it_computes_another_thing(name: str, registered: Any) -> None:
    registered(sharper)
    with pytest.raises(UserError, match=r"other values .*\. An attention that was registered"), blocks(llama())[name]():
        pass


@pytest.mark.parametrize("name", blocks(None))
@torch.no_grad()
def test_a_registered_attention_that_is_that_of_the_model_is_taken(name: str, registered: Any) -> None:
    registered(same)
    with blocks(llama())[name]():
        found = llama()(IDS).logits
    with blocks(llama("sdpa"))[name]():
        expected = llama("sdpa")(IDS).logits
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_an_attention_in_the_place_of_sdpa_is_noticed_behind_a_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("sdpa")
    with watching(model, "column_mass"):
        model(IDS)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sharper)
    with pytest.raises(UserError, match="other values"), watching(model, "column_mass"):
        pass


@pytest.mark.parametrize("name", blocks(None))
def test_masks_of_a_registered_function_are_refused(name: str, registered: Any) -> None:
    """A window of a hundred tokens would not be seen in a few."""
    registered(same, other_mask)
    match = r"its masks are made by a function that was registered for the attention 'mine'"
    with pytest.raises(UserError, match=match), blocks(llama())[name]():
        pass


def test_masks_in_the_place_of_those_of_sdpa_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", other_mask)
    with pytest.raises(UserError, match="registered for the attention 'sdpa'"), watching(llama("sdpa")):
        pass


@pytest.mark.parametrize("name", blocks(None))
@torch.no_grad()
def test_a_registered_attention_without_masks_gets_none_in_a_block_either(name: str, registered: Any) -> None:
    """As in the documentation of Transformers: padding is seen then, and a block must not hide it."""
    registered(same, None)
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    expected, masked = llama()(IDS, attention_mask=mask).logits, llama("sdpa")(IDS, attention_mask=mask).logits
    assert not torch.allclose(expected[1, 3:], masked[1, 3:], rtol=1e-2)
    model, plain = llama(), llama("sdpa")
    with blocks(model)[name]():
        if name == "watching":
            with pytest.raises(UserError, match="cannot observe padding in LlamaModel: its tokens attend to padding"):
                model(IDS, attention_mask=mask)
        is_masked = name in ("operation", "heads")  # constants stand by tokens, behind padding that is named
        found = model(IDS, attention_mask=mask if is_masked else None).logits
        tokens = model.generate(IDS[:, :7], max_new_tokens=3, do_sample=False, pad_token_id=0)
    with blocks(plain)[name]():
        torch.testing.assert_close(found, plain(IDS).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(tokens, plain.generate(IDS[:, :7], max_new_tokens=3, do_sample=False, pad_token_id=0))
    assert model.config._attn_implementation == "mine"


@torch.no_grad()
def test_what_an_attention_without_masks_may_compute_in_several_ways_is_refused(registered: Any) -> None:
    registered(same, None)
    windows = transformers.MistralConfig(**SMALL | {"num_key_value_heads": 2}, sliding_window=6)
    mistral = transformers.MistralForCausalLM._from_config(windows, attn_implementation="mine").eval()
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]), "use_cache": False}
    refused = {
        "10 keys are more than the window of 6": (mistral, IDS, {}),
        "5 tokens follow 5 in a cache": (llama(), IDS[:, 5:], {}),
        "several sequences are packed into a row": (llama(), IDS[:1], packed),
    }
    for message, (model, ids, options) in refused.items():
        with watching(model, "column_mass"):
            begun = model(IDS[:, :5], use_cache=True)
            options = options if len(ids[0]) == 10 else behind(cache_of(begun))
            with pytest.raises(UserError, match=f"{message}; expected masks of Transformers, as by") as refusal:
                model(ids, **options)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="and a copy would get some; expected masks"):
        regard.replaced(llama(), "softmax+window=4")


@torch.no_grad()
def test_a_window_is_checked_in_each_step_of_a_layer_behind_one_without(registered: Any) -> None:
    """The next token of a generation goes a shorter way there."""
    registered(same, None)
    kinds = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    config = transformers.Qwen2Config(**SMALL | {"num_key_value_heads": 2, "num_hidden_layers": 2}, **kinds)
    model = transformers.Qwen2ForCausalLM._from_config(config, attn_implementation="mine").eval()
    cache = transformers.DynamicCache()
    with watching(model, "column_mass"):
        for step in range(2, 7):
            model(IDS[:, step - (2 if step == 2 else 1) : step], **behind(cache), use_cache=True)
        with pytest.raises(UserError, match="7 keys are more than the window of 6"):
            model(IDS[:, 6:7], **behind(cache), use_cache=True)


@torch.no_grad()
def test_a_decoder_of_ours_computes_its_own_attention_whatever_is_set(registered: Any) -> None:
    registered(sharper, None)
    config = RegardConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    model = RegardForCausalLM(config).eval()
    expected, seen = model(IDS).logits, []
    for implementation in ("regard", "mine"):
        model.set_attn_implementation(implementation)
        with watching(model, "column_mass") as watch:
            torch.testing.assert_close(model(IDS).logits, expected)
        seen.append(watch.frame())
    pd.testing.assert_frame_equal(*seen)


@torch.no_grad()
def test_a_sharper_attention_without_masks_or_with_a_name_of_the_hub_is_refused(registered: Any) -> None:
    registered(sharper, None)
    with pytest.raises(UserError, match="An attention that was registered"), watching(llama(), "column_mass"):
        pass
    model = llama("sdpa")
    try:
        for attention, expected in ((same, None), (sharper, "An attention that was registered")):
            AttentionInterface.register("me/mine", attention)
            AttentionMaskInterface.register("me/mine", sdpa_mask)
            model.config._attn_implementation_internal = "me/mine"
            if expected is None:
                with watching(model, "column_mass"):
                    model(IDS)
                continue
            with pytest.raises(UserError, match=expected), watching(model, "column_mass"):
                pass
    finally:
        for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
            mapping.pop("me/mine", None)


@pytest.mark.parametrize("name", blocks(None))
def test_continuous_batching_is_refused_in_one_line(name: str) -> None:
    model = llama("sdpa")
    with blocks(model)[name](), pytest.raises(UserError, match="cannot generate by continuous batching"):
        model.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=2)
    assert "init_continuous_batching" not in vars(model)


def test_continuous_batching_of_a_replaced_model_is_refused_in_one_line() -> None:
    model = regard.replaced(llama("sdpa"), "softmax+window=4")
    with pytest.raises(UserError, match="cannot generate by continuous batching"):
        model.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=2)
