"""Conversion between Llama's weights and our decoder's; with the default choices both compute the same."""

import copy
import inspect
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regard.errors import UserError
from regard.models.configuration import RegardConfig, llama_differences
from regard.models.decoder import RegardForCausalLM

SHARED_FIELDS = tuple(
    name
    for name in inspect.signature(RegardConfig.__init__).parameters
    if name not in ("self", "rope_theta", "ffn", "norm", "attention", "others")
)


def from_llama(model: LlamaForCausalLM) -> RegardForCausalLM:
    """Copy a Llama into a decoder. Raise UserError for options that the decoder does not have."""
    _check_type(model, LlamaForCausalLM)
    config = model.config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    options: dict[str, Any] = {name: (bool(getattr(config, name)), False) for name in ("attention_bias", "mlp_bias")}
    options["attention_dropout"] = (float(config.attention_dropout or 0.0), 0.0)
    options |= {"hidden_act": (config.hidden_act, "silu"), "rope_type": (rope.get("rope_type", "default"), "default")}
    options["partial_rotary_factor"] = (float(rope.get("partial_rotary_factor") or 1.0), 1.0)
    _check_options("Llama", options)
    fields: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    decoder = RegardForCausalLM(RegardConfig(**fields, rope_theta=float(rope.get("rope_theta", 10_000.0))))
    return _copy_weights(decoder, model)


def to_llama(model: RegardForCausalLM) -> LlamaForCausalLM:
    """Copy a decoder into a Llama. Raise UserError for choices that Llama does not have."""
    _check_type(model, RegardForCausalLM)
    config = model.config
    _check_options("decoder", llama_differences(config))
    fields: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return _copy_weights(LlamaForCausalLM(LlamaConfig(**fields, rope_parameters=rope)), model)


def _check_type(model: Any, expected: type) -> None:
    if not isinstance(model, expected):
        raise UserError(f"model: expected a {expected.__name__}, got {type(model).__name__}")


def _check_options(kind: str, options: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, expected) in options.items():
        if value != expected:
            raise UserError(f"cannot convert this {kind}: expected {name}={expected}, got {value}")


def _copy_weights(target: Any, source: Any) -> Any:
    target = target.to(device=source.device, dtype=source.dtype)
    with torch.no_grad():
        target.load_state_dict(source.state_dict())
    target.tie_weights()
    target.generation_config = copy.deepcopy(source.generation_config)
    return target.train(source.training)
