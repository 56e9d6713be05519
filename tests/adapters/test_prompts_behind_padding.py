"""Soft prompts of left-padded rows stand behind the padding: windows and recurrent layers see them as without it."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from regard.adapters.prompt_pool import PromptAdapterPool
from regard.errors import UserError
from tests.named_cache import behind

WORDS, LENGTH = 20, 3
_SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None}
_SIZES |= {"bos_token_id": None, "max_position_embeddings": 64}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("MistralConfig", {"sliding_window": 4}),
    "Gemma3": ("Gemma3TextConfig", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "GptOss": ("GptOssConfig", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "Bamba": (
        "BambaConfig",
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
        | {"mamba_expand": 2, "mamba_chunk_size": 4},
    ),
}
KINDS = tuple(_KINDS)
TEXTS = ([5, 7, 9, 11, 4, 6, 8], [6, 8, 10], [12])
IDS = torch.tensor([[0] * (7 - len(text)) + text for text in TEXTS])
MASK = IDS.ne(0).long()


def pooled(kind: str) -> tuple[Any, PromptAdapterPool]:
    """A model in which prompts and distance matter, and its prompts."""
    torch.manual_seed(3)
    config, options = _KINDS[kind]
    built = getattr(transformers, config)(**{**_SIZES, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(built).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    pool = PromptAdapterPool(model, num_virtual_tokens=LENGTH, encoder_hidden_size=0, seed=1)
    pool.reserve(2)
    return model, pool


def alone(model: Any, pool: PromptAdapterPool, weights: Tensor, row: int) -> Any:
    with pool.use_weights(weights[row : row + 1]), torch.no_grad():
        return model(input_ids=torch.tensor([TEXTS[row]]), output_hidden_states=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_left_padded_row_is_read_as_alone(kind: str) -> None:
    model, pool = pooled(kind)
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    places = (MASK.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        without = model(input_ids=IDS, attention_mask=MASK, position_ids=places).logits
        with pool.use_weights(weights):
            found = model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True)
            placed = model(input_ids=IDS, attention_mask=MASK, position_ids=places)
    assert found.logits.shape == (3, 7, WORDS)
    for row in range(3):
        real, expected = MASK[row].bool(), alone(model, pool, weights, row)
        assert not torch.allclose(without[row, real], expected.logits[0], atol=1e-2)
        assert_close(found.logits[row, real], expected.logits[0], atol=1e-4, rtol=1e-4)
        assert_close(placed.logits[row, real], expected.logits[0], atol=1e-4, rtol=1e-4)
        for states, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert_close(states[row, real], other[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_left_padded_rows_go_on_as_alone(kind: str, search: dict[str, Any]) -> None:
    model, pool = pooled(kind)
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, **search}
    with pool.use_weights(weights):
        found = model.generate(IDS, attention_mask=MASK, **options)[:, 7:]
    for row, text in enumerate(TEXTS):
        with pool.use_weights(weights[row : row + 1]):
            expected = model.generate(torch.tensor([text]), **options)[:, len(text) :]
        assert torch.equal(found[row : row + 1], expected)


def test_a_prompt_is_taught_alike_behind_padding() -> None:
    model, pool = pooled("Mistral")
    pool.set_trainable(1)
    gradients = []
    for ids, mask in ((IDS[1:2], MASK[1:2]), (torch.tensor([TEXTS[1]]), torch.ones(1, 3, dtype=torch.long))):
        with pool.use_weights(torch.tensor([0.0, 1.0])):
            logits = model(input_ids=ids, attention_mask=mask).logits
        logits[mask.bool()].square().mean().backward()
        gradients.append(pool.prompts.P[1].grad)
        pool.prompts.P[1].grad = None
    assert bool(gradients[1].any())
    assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_a_row_of_padding_alone_cannot_begin_a_cache() -> None:
    """Later tokens of that row would take the prompt to be elsewhere."""
    model, pool = pooled("Mistral")
    with pool.use_weights(torch.tensor([1.0, 0.0])):
        with pytest.raises(
            UserError, match=r"^attention_mask: expected a word of each row .* got padding alone in one$"
        ):
            model(input_ids=IDS[:, :5], attention_mask=MASK[:, :5], **behind(DynamicCache()))
        model(input_ids=IDS[:, :6], attention_mask=MASK[:, :6], use_cache=False)
