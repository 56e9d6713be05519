"""Projections of the heads that are not constant, in hosts that do more with queries and keys than to multiply them."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
)
from transformers.models.llama import modeling_llama

import regard
from regard.hooks.input_projections import PartialLinear


def test_all_heads_of_a_host_that_turns_queries_as_complex_numbers_are_replaced() -> None:
    """Zeros in the place of queries were no complex numbers. Constants of one text change nothing in it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "vocab_size": 50}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, num_local_experts=2, pad_token_id=0)).eval()
    ids = torch.randint(3, 50, (1, 9))
    constants = regard.average_attention(model, [{"input_ids": ids}], length=9)
    with torch.no_grad():
        expected, other = model(ids).logits, model(ids.flip(1)).logits
        with regard.replacing(model, constants):
            assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
            assert not torch.allclose(model(ids.flip(1)).logits, other, atol=1e-2)


def test_all_heads_of_a_host_that_clips_queries_in_place_are_replaced() -> None:
    """OLMo's `clip_qkv`: PyTorch refused to write to zeros that all tokens shared. The constants are of one text."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "num_hidden_layers": 2}
    model = OlmoForCausalLM(OlmoConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, clip_qkv=0.5)).eval()
    ids = torch.randint(3, 50, (1, 9))
    constants = regard.average_attention(model, [{"input_ids": ids}], length=9)
    with torch.no_grad():
        expected, other = model(ids).logits, model(ids.flip(1)).logits
        assert_close(regard.replaced(model, constants)(ids).logits, expected, atol=1e-5, rtol=1e-4)
        with regard.replacing(model, constants):
            assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
            assert not torch.allclose(model(ids.flip(1)).logits, other, atol=1e-5)


def test_projections_that_their_own_module_calls_for_positions_are_cut() -> None:
    """DeBERTa v3 projects relative positions as it does tokens. Constants of one text change nothing in it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 50, "num_hidden_layers": 2}
    relative: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}
    model: Any = DebertaV2Model(DebertaV2Config(**sizes, **relative, num_attention_heads=2)).eval()
    ids = torch.randint(3, 50, (1, 9))
    constants = regard.average_attention(model, [{"input_ids": ids}], length=9)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with regard.replacing(model, constants, heads=[(0, 1), (1, 1)]):
            assert_close(model(ids).last_hidden_state, expected, atol=1e-5, rtol=1e-4)
            for layer in model.encoder.layer:
                attention = layer.attention.self
                assert all(isinstance(part, PartialLinear) for part in (attention.query_proj, attention.key_proj))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_projections_that_something_else_calls_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's adaption prompts attend by the queries and keys of all heads, also of those that are constant."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 50, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    base, ids = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double().eval(), torch.randint(3, 50, (2, 9))
    model: Any = peft.get_peft_model(
        base, peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    ).eval()
    for name, parameter in model.named_parameters():
        if "adaption" in name:
            torch.nn.init.ones_(parameter) if "gate" in name else torch.nn.init.normal_(parameter)
    constants = regard.average_attention(model, [{"input_ids": ids.flip(1)}], length=9)

    def dense(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
        weights = (query @ key.mT * module.scaling).masked_fill(hidden, -torch.inf).softmax(-1)
        weights[:, 1] = constants.matrices["decoder", module.layer_idx][1].double()
        return (weights @ value).transpose(1, 2), None

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", dense)
    with torch.no_grad():
        with regard.replacing(model, constants, heads=[(0, 1), (1, 1)]):
            found = model(input_ids=ids, use_cache=False).logits
        base.set_attn_implementation("eager")
        assert_close(found, model(input_ids=ids, use_cache=False).logits, atol=1e-6, rtol=1e-6)
