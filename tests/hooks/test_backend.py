"""`regard` as an attention of Transformers, without any block."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.hooks.attention_function import attention_function

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "learned sinks": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=4, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "soft-capping": lambda: transformers.Gemma2Config(**SIZES, attn_logit_softcapping=2.0, sliding_window=8),
    "encoder": lambda: transformers.BertConfig(**SIZES),
    "encoder and decoder": lambda: transformers.BigBirdPegasusConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_attention_heads=4, decoder_ffn_dim=48, attention_type="original_full", decoder_start_token_id=1
    ),
}  # fmt: skip


def model(kind: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    if kind == "encoder":
        return transformers.BertForMaskedLM._from_config(config, attn_implementation=implementation).eval()
    if kind == "encoder and decoder":
        auto: Any = transformers.AutoModelForSeq2SeqLM
    else:
        auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=implementation).eval()


def step(model: Any, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and its gradients by parameter."""
    ids = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(1))
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_and_gradients_are_those_of_eager_attention(kind: str, padded: bool) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, -6:] = 0
    expected, gradients = step(model(kind, "eager"), mask if padded else None)
    loss, actual = step(model(kind, "regard"), mask if padded else None)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert actual.keys() == gradients.keys()
    if kind == "learned sinks":
        assert bool(actual["model.layers.0.self_attn.sinks"].abs().min() > 0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_it_is_switched_on_and_off() -> None:
    ids = torch.arange(5, 15)[None]
    switched = model("learned sinks", "eager")
    with torch.no_grad():
        expected = switched(ids).logits
        switched.set_attn_implementation("regard")
        assert switched(ids, output_attentions=True).attentions in (None, (None, None), ())
        torch.testing.assert_close(switched(ids).logits, expected, rtol=1e-4, atol=1e-5)
        switched.set_attn_implementation("eager")
        assert torch.equal(switched(ids).logits, expected)


def test_a_missing_mask_of_unknown_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModuleType("modeling_of_nobody")
    host = type("Host", (PreTrainedModel,), {"_supports_sdpa": False, "__module__": file.__name__})
    attention = type("Attention", (nn.Module,), {"__module__": file.__name__})
    vars(file).update(Host=host, Attention=attention)
    monkeypatch.setitem(sys.modules, file.__name__, file)
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UserError, match="attn_implementation='regard-eager'"):
        attention_function(attention(), states, states, states, None)
    output, _ = attention_function(attention(), states, states, states, None, is_eager_host=True)
    assert output.shape == (1, 3, 2, 4)
