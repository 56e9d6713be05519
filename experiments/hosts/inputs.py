"""Inputs that a model of unknown type may take, likely ones first."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.hosts.signature import BATCH, TARGETS, TOKENS, Inputs, from_signature, main_input, make_ids
from experiments.hosts.signature import make_noise as _noise

WITHOUT_CACHE = ("fsmt",)
"""Types whose decoder sees later tokens when it fills a cache with several at once."""


def candidates(model: Any, kind: str) -> Iterator[Inputs]:
    """Return inputs to try, one after the other, until the model takes one."""
    config = model.config
    text: Inputs = {"input_ids": make_ids()}
    target: Inputs = {"decoder_input_ids": make_ids(TARGETS)} if getattr(config, "is_encoder_decoder", False) else {}
    if config.model_type in WITHOUT_CACHE:
        target["use_cache"] = False
    pixels = _pixels(config)
    features = [
        {"input_features": _noise(BATCH, 16, 128)}, {"input_features": _noise(BATCH, 64, 16)},
        {"input_values": _noise(BATCH, 4000)}, {"input_values": _noise(BATCH, 1, 4000)},
        {"input_values": _noise(BATCH, 128, 16)}, {"input_features": _noise(BATCH, 80, 128)},
        {"input_features": _noise(BATCH, 64, 80)}, {"input_features": _noise(BATCH, 1, 16, 128)},
    ]  # fmt: skip
    main = main_input(model)
    if kind == "vision" or main.startswith("pixel"):
        yield {"pixel_values": pixels} | target
        yield {"pixel_values": pixels[:, None].repeat(1, 4, 1, 1, 1)}
        yield {"pixel_values": pixels, **text} | target
        yield {"pixel_values": _noise(BATCH, 1, 32, 32)}
    elif kind == "audio" or (main.startswith("input_") and main != "input_ids"):
        for feature in features:
            yield feature | target
    yield text | target
    yield text | {"attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long)} | target
    yield {"pixel_values": pixels, **text} | target
    yield text | {"bbox": torch.zeros(BATCH, TOKENS, 4, dtype=torch.long)} | target
    yield {"inputs_embeds": _noise(BATCH, TOKENS, 32)} | target
    yield {"hidden_states": _noise(BATCH, TOKENS, 32)}
    yield {"pixel_values": pixels}
    yield {"pixel_values": pixels[:, None].repeat(1, 4, 1, 1, 1)}
    for feature in features:
        yield feature | target
        yield feature | text
    yield {"past_values": _noise(BATCH, 64)}
    yield {"past_values": _noise(BATCH, 64, 32)}
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    patches = _noise(BATCH * 16, 3 * 2 * 8 * 8)
    yield {"hidden_states": patches, "grid_thw": grid}
    yield {"pixel_values": patches, "grid_thw": grid}
    yield {"pixel_values_videos": _noise(BATCH, 4, 3, 32, 32)}
    yield {"past_values": _noise(BATCH, 512, 32)}
    yield from from_signature(model)


def _pixels(config: Any) -> Tensor:
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return _noise(BATCH, 3, *size)
        if isinstance(size, int):
            return _noise(BATCH, getattr(part, "num_channels", 3) or 3, size, size)
    return _noise(BATCH, 3, 64, 64)
