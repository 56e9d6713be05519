"""What a model is passed to read text."""

from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError


def text_inputs(model: Any, input_ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a forward; an encoder–decoder reads it on both sides, the decoder behind its start."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if model.config.is_encoder_decoder:
        start = input_ids.new_full((len(input_ids), 1), decoder_start(model))
        inputs["decoder_input_ids"] = torch.cat([start, input_ids[:, :-1]], dim=1)
    if hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    return inputs


def text_configs(model: Any) -> list[Any]:
    """Return the configuration of a model, and that of its text if it has one of its own."""
    try:
        return [model.config, model.config.get_text_config()]
    except ValueError:  # several
        return [model.config]


def decoder_start(model: Any) -> int:
    """Return the decoder's start token, else the padding token, as in T5."""
    configs, generation = text_configs(model), getattr(model, "generation_config", None)
    candidates = [getattr(config, "decoder_start_token_id", None) for config in (*configs, generation)]
    for token in (*candidates, *(getattr(config, "pad_token_id", None) for config in configs)):
        if token is not None:
            return int(token)
    raise UserError(f"cannot measure {type(model).__name__}: its configuration has no decoder_start_token_id")
