"""Projections that hold queries, keys and values in one matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from regard.attention.call import AttentionCall

NAMES = ("c_attn", "query_key_value", "Wqkv", "qkv_proj", "qkv", "in_proj")
FusedOrder = Literal["parts", "heads"]


@dataclass(frozen=True)
class FusedProjection:
    """A projection for queries, keys and values: all queries first ("parts"), or head by head ("heads")."""

    name: str
    order: FusedOrder


def find_fused_projection(
    module: nn.Module, outputs: Mapping[nn.Module, Tensor], call: AttentionCall
) -> FusedProjection | None:
    """Return the fused projection of an attention module, whose output of this forward holds the values of its call.

    None if there is none that is recognized.
    """
    for name in NAMES:
        layer = getattr(module, name, None)
        output = outputs.get(layer) if isinstance(layer, nn.Module) else None
        if output is None or type(layer) not in (nn.Linear, Conv1D):
            continue
        heads, groups, width = call.query.shape[1], call.value.shape[1], call.value.shape[-1]
        if output.shape[-1] != (heads + 2 * groups) * width:
            continue
        values = call.value.transpose(1, 2).flatten(2)
        bias = getattr(module, "v_bias", 0)  # some models add that of the values afterwards
        if torch.allclose(output[..., -groups * width :] + bias, values):
            return FusedProjection(name, "parts")
        by_head = output.unflatten(-1, (heads, 3, width)) if heads == groups else None
        if by_head is not None and torch.allclose(by_head[..., 2, :].flatten(2) + bias, values):
            return FusedProjection(name, "heads")
    return None
