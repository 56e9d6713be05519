"""From Llama's weights to those of our decoder, and back: at the default choices both compute the same."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regard.attention.spec import AttentionSpec
from regard.errors import UserError
from regard.models.configuration import RegardConfig
from regard.models.decoder import RegardForCausalLM

SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def _check_type(model: Any, wanted: type) -> None:
    if not isinstance(model, wanted):
        raise UserError(f"model: expected a {wanted.__name__}, got {type(model).__name__}")


def from_llama(model: LlamaForCausalLM) -> RegardForCausalLM:
    """A decoder with a copy of a Llama's weights. Raises UserError for what only some Llamas have."""
    _check_type(model, LlamaForCausalLM)
    config = model.config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    differing = {
        "attention_bias": (bool(config.attention_bias), False),
        "mlp_bias": (bool(config.mlp_bias), False),
        "attention_dropout": (float(config.attention_dropout or 0.0), 0.0),
        "hidden_act": (config.hidden_act, "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (float(rope.get("partial_rotary_factor") or 1.0), 1.0),
    }
    _refuse(differing, "Llama")
    settings: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    made = RegardForCausalLM(RegardConfig(**settings, rope_theta=float(rope.get("rope_theta", 10_000.0))))
    return _filled(made, model)


def to_llama(model: RegardForCausalLM) -> LlamaForCausalLM:
    """A Llama with a copy of the decoder's weights. Raises UserError for a decoder that no Llama can be."""
    _check_type(model, RegardForCausalLM)
    config = model.config
    differing = {"ffn": (config.ffn, "swiglu"), "norm": (config.norm, "pre")}
    plain = AttentionSpec(form=config.spec.form).to_dict()
    differing |= {f"attention {name}": (value, plain[name]) for name, value in config.attention.items()}
    _refuse(differing, "decoder")
    settings: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return _filled(LlamaForCausalLM(LlamaConfig(**settings, rope_parameters=rope)), model)


def _refuse(differing: dict[str, tuple[Any, Any]], what: str) -> None:
    for name, (value, allowed) in differing.items():
        if value != allowed:
            raise UserError(f"cannot convert this {what}: expected {name}={allowed}, got {value}")


def _filled(made: Any, model: Any) -> Any:
    """The model with the other one's weights, dtype, device and mode."""
    made = made.to(device=model.device, dtype=model.dtype)
    with torch.no_grad():
        made.load_state_dict(model.state_dict())
    made.tie_weights()
    return made.train(model.training)
