"""Identity of the base model that adapters belong to."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.lora import LoraAdapters, MixedLayer
from regard.adapters.prompt_adapters import PromptAdapters


def base_sha256(model: PreTrainedModel) -> str:
    """Return the sha256 of the base model's weights by name, rounded to bfloat16; its head does not count.

    It is the same with adapters and without, and in float32 and bfloat16.
    """
    digest = hashlib.sha256()
    for name, value in sorted(_base_weights(model).items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        rounded = value.detach().to("cpu", torch.bfloat16) if value.is_floating_point() else value.detach().cpu()
        digest.update(rounded.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the base model's weights by the names they have without adapters."""
    base: nn.Module = model.base_model
    adapters = tuple(
        f"{name}." for name, module in base.named_modules() if isinstance(module, (LoraAdapters, PromptAdapters))
    )
    layers = {name for name, module in base.named_modules() if isinstance(module, MixedLayer)}
    return {
        _original_name(name, layers): value
        for name, value in base.state_dict().items()
        if not name.startswith(adapters)
    }


def _original_name(name: str, layers: set[str]) -> str:
    """Return the name that a weight has without adapters beside its layer."""
    layer, separator, weight = name.rpartition(".base_layer.")
    return f"{layer}.{weight}" if separator and layer in layers else name
