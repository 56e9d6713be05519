"""Reductions that need no more than the log-normalizer of each query, which fused kernels return beside the output."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.reduction import ReductionRequest
from regard.attention.tiles import LOG2_E

FLASH_FORWARD: Any | None = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""PyTorch's flash attention for CPUs, which returns the log-normalizer; None if this release has none."""


def supports_lse(call: AttentionCall, request: ReductionRequest) -> bool:
    """Return whether the fused kernel for CPUs can take a call, and its log-normalizer gives every reduction."""
    return (
        request.names == request.by_backend("lse")
        and call.is_plain
        and call.query.device.type == "cpu"
        and all(t.stride(-1) == 1 for t in (call.query, call.key, call.value))
        and call.value.shape[-1] == call.query.shape[-1]
        and call.query.dtype in (torch.float32, torch.float64)
        and (not call.causal or call.offset == 0)
        and FLASH_FORWARD is not None
    )


def attend_with_lse(call: AttentionCall, request: ReductionRequest) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output (batch, head, query, value_width) and reductions of a call by the fused kernel."""
    assert FLASH_FORWARD is not None
    padding = None
    if call.key_mask is not None:
        padding = call.query.new_zeros(call.key_mask.shape).masked_fill_(~call.key_mask, -torch.inf)[:, None, None, :]
    output, lse = FLASH_FORWARD(call.query, call.key, call.value, 0.0, call.causal, attn_mask=padding, scale=call.scale)
    if call.key_mask is not None:
        lse = lse.masked_fill(_sees_no_key(call, call.key_mask), -torch.inf)
    reductions = {"lse": lse} if "lse" in request.names else {}
    if "first_mass" in request.names:
        reductions["first_mass"] = first_mass(call, lse, request.num_first_keys)
    return output, reductions


def _sees_no_key(call: AttentionCall, key_mask: Tensor) -> Bool[Tensor, "batch 1 #query"]:
    """Return which queries see no real key, for which the fused kernel reports a log-normalizer of 0."""
    has_key = key_mask.cumsum(-1) > 0
    if not call.causal:
        return ~has_key[:, None, -1:]
    last = torch.arange(call.query.shape[2], device=key_mask.device).clamp(max=key_mask.shape[1] - 1)
    return ~has_key[:, None, last]


def first_mass(
    call: AttentionCall, lse: Float[Tensor, "batch head query"], num_first_keys: int
) -> Float[Tensor, "batch head query first"]:
    """Return exp(s_ij − lse_i) for the first keys j of each sample: keys as rows, in base 2, take half the time."""
    key, positions = _first_keys(call, num_first_keys)
    key = call.expand_groups(key) if call.num_key_value_groups > 1 else key
    mass = lse.new_empty(*lse.shape[:2], num_first_keys, lse.shape[2])
    for q, k, row, out in zip(call.query.mT, key, lse[:, :, None], mass, strict=True):
        torch.baddbmm(row, k.to(lse.dtype), q.to(lse.dtype), beta=-LOG2_E, alpha=call.scale * LOG2_E, out=out)
    mass = mass.exp2_().mT
    keys = call.key.shape[2]
    if call.key_mask is not None:
        valid = call.key_mask.gather(1, positions.clamp(0, keys - 1).expand(lse.shape[0], -1))
        mass.masked_fill_(~(valid[:, None, None] & (lse != -torch.inf)[..., None]), 0.0)
    if call.starts or num_first_keys > keys:
        mass.masked_fill_(((positions < 0) | (positions >= keys))[:, None, None], 0.0)
    if call.causal:
        early = max(max(call.starts or (0,)) + num_first_keys - call.offset, 0)
        queries = torch.arange(min(early, lse.shape[2]), device=lse.device)[:, None] + call.offset
        mass[:, :, :early].masked_fill_(queries < positions[:, None, None], 0.0)
    return mass


def _first_keys(
    call: AttentionCall, num_first_keys: int
) -> tuple[Float[Tensor, "batch group first width"], Int[Tensor, "#batch first"]]:
    """Return the first keys of each sample, and their positions."""
    groups, keys, width = call.key.shape[1:]
    positions = torch.arange(num_first_keys, device=call.key.device)[None]
    if not any(call.starts or ()) and num_first_keys <= keys:
        return call.key[:, :, :num_first_keys], positions
    if call.starts:
        positions = positions + torch.tensor(call.starts, device=call.key.device)[:, None]
    index = positions.clamp(0, keys - 1)[:, None, :, None].expand(call.key.shape[0], groups, -1, width)
    return call.key.gather(2, index), positions
