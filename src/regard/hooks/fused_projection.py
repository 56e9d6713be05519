"""Projections that hold queries, keys and values in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from regard.attention.call import AttentionCall

if TYPE_CHECKING:
    pass


FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj", "qkv", "in_proj")
"""Names of layers that make queries, keys and values at once."""


FusedOrder = Literal["parts", "heads"]


@dataclass(frozen=True)
class FusedProjection:
    """A projection for queries, keys and values: all queries first ("parts"), or head by head ("heads")."""

    name: str
    order: FusedOrder


def find_fused_projection(
    module: nn.Module, outputs: Mapping[nn.Module, Tensor], call: AttentionCall
) -> FusedProjection | None:
    """The projection of a module that makes queries, keys and values at once, if its output shows the call's values."""
    for name in FUSED:
        layer = getattr(module, name, None)
        output = outputs.get(layer) if isinstance(layer, nn.Module) else None
        if output is None or type(layer) not in (nn.Linear, Conv1D):
            continue
        heads, groups, width = call.query.shape[1], call.value.shape[1], call.value.shape[-1]
        if output.shape[-1] != (heads + 2 * groups) * width:
            continue
        flat = call.value.transpose(1, 2).flatten(2)
        bias = getattr(module, "v_bias", 0)  # DeBERTa adds that of its values afterwards
        if torch.allclose(output[..., -groups * width :] + bias, flat):
            return FusedProjection(name, "parts")
        if heads == groups and torch.allclose(
            output.unflatten(-1, (heads, 3, width))[..., 2, :].flatten(2) + bias, flat
        ):
            return FusedProjection(name, "heads")
    return None
