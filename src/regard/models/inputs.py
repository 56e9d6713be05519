"""What a model is passed to read text."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError


def text_inputs(model: Any, input_ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a forward; an encoder–decoder reads it on both sides, the decoder behind its start."""
    check_decoder(model)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if model.config.is_encoder_decoder:
        start = input_ids.new_full((len(input_ids), 1), decoder_start(model))
        inputs["decoder_input_ids"] = torch.cat([start, input_ids[:, :-1]], dim=1)
    if hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    return inputs


def check_decoder(model: Any) -> None:
    """Raise a UserError if the decoder of a model reads something else than tokens, as SpeechT5's may."""
    if "decoder_input_values" in inspect.signature(model.forward).parameters:
        expected = "an encoder–decoder whose decoder reads tokens, as SpeechT5ForSpeechToText"
        raise UserError(f"model: expected {expected}; that of {type(model).__name__} reads spectrograms")


def text_configs(model: Any) -> list[Any]:
    """Return the configuration of a model, and that of its text if it has one of its own."""
    try:
        return [model.config, model.config.get_text_config()]
    except ValueError:  # several
        return [model.config]


def decoder_start(model: Any) -> int:
    """Return the token that `generate` begins with, else the padding token, as in a bare T5."""
    start = find_decoder_start(model)
    for token in (start, *(getattr(config, "pad_token_id", None) for config in text_configs(model))):
        if token is not None:
            return int(token)
    raise UserError(f"cannot measure {type(model).__name__}: its configuration has no decoder_start_token_id")


def find_first_token(inputs: Mapping[str, Any]) -> int | None:
    """Return the token with which a decoder behind an encoder begins in a forward of these arguments; None if none."""
    ids = inputs.get("decoder_input_ids")
    return int(ids[0, 0]) if isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() else None


def describe_decoder_start(token: int | None, tokenizer: Any | None) -> dict[str, Any]:
    """Return what a record says of the first token of a decoder; nothing without one."""
    if token is None:
        return {}
    text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    return {"decoder_start_token": {"id": token, "token": text}}


def find_decoder_start(model: Any) -> int | None:
    """Return the token that `generate` begins with: the decoder's start, else BOS (T5Gemma); None without either."""
    generation, decoder = getattr(model, "generation_config", None), getattr(model.config, "decoder", None)
    published = [generation, *text_configs(model), decoder]
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in published:
            if (token := getattr(config, name, None)) is not None:
                return int(token)
    return None
