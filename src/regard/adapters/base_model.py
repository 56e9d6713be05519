"""What tells the base that blocks belong to from another."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.lora import LoraAdapters, MixedLayer
from regard.adapters.prompt_adapters import PromptAdapters


def base_sha256(model: PreTrainedModel) -> str:
    """The sha256 over the base model's weights by name, each rounded to bfloat16: a model's head is none of it.

    It is the same for a model with blocks and without, and for one that is held in float32 or in bfloat16.
    """
    found = hashlib.sha256()
    for name, value in sorted(_base_weights(model).items()):
        found.update(f"{name} {tuple(value.shape)}".encode())
        plain = value.detach().to("cpu", torch.bfloat16) if value.is_floating_point() else value.detach().cpu()
        found.update(plain.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The base model's own weights by the names that they have where there are no blocks."""
    base: nn.Module = model.base_model
    blocks = {name for name, module in base.named_modules() if isinstance(module, (LoraAdapters, PromptAdapters))}
    layers = {name for name, module in base.named_modules() if isinstance(module, MixedLayer)}
    found: dict[str, Tensor] = base.state_dict()
    own = {name: value for name, value in found.items() if not any(name.startswith(f"{one}.") for one in blocks)}
    return {_without(name, layers): value for name, value in own.items()}


def _without(name: str, layers: set[str]) -> str:
    """The name of a weight in a layer that has no blocks beside it."""
    layer, found, last = name.rpartition(".base_layer.")
    return f"{layer}.{last}" if found and layer in layers else name
