"""Attention and masks that a user has registered in Transformers, and continuous batching: refused or exact."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

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
from tests.hooks.test_fidelity import SMALL

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


def test_a_registered_attention_without_masks_is_refused(registered: Any) -> None:
    registered(same, None)
    with pytest.raises(UserError, match="no mask function is registered for the attention 'mine'"), watching(llama()):
        pass


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
