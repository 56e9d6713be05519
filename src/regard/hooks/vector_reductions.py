"""What queries, keys, values and outputs tell beside the weights; everything linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall, relative_positions, visible_mask

ROWS = 256


@dataclass(frozen=True)
class AttentionIO:
    """One finished attention call."""

    call: AttentionCall
    output: Float[Tensor, "batch head query value_width"]
    projection: Callable[[], Float[Tensor, "width heads_times_value_width"]]
    """Gives W_O, or raises a UserError if the model keeps it where nobody would look."""


def key_norm(seen: AttentionIO) -> Float[Tensor, "batch group key"]:
    """L2 norm of every key, positions (RoPE) applied."""
    return to_acc_dtype(seen.call.key).norm(dim=-1)


def value_norm(seen: AttentionIO) -> Float[Tensor, "batch group key"]:
    """L2 norm of every value."""
    return to_acc_dtype(seen.call.value).norm(dim=-1)


def cosine_sum(seen: AttentionIO) -> Float[Tensor, "batch head key"]:
    """Σ cos(q_i, k_j) over the real queries i that may see key j."""
    call = seen.call
    direction = torch.nn.functional.normalize(to_acc_dtype(call.key), dim=-1).repeat_interleave(
        call.num_key_value_groups, 1
    )
    return (visible_sums(torch.nn.functional.normalize(to_acc_dtype(call.query), dim=-1), call) * direction).sum(-1)


def norm_sum(seen: AttentionIO) -> Float[Tensor, "batch head key"]:
    """Σ |q_i||k_j| over the real queries i that may see key j."""
    call = seen.call
    norms = key_norm(seen).repeat_interleave(call.num_key_value_groups, 1)
    return visible_sums(to_acc_dtype(call.query).norm(dim=-1, keepdim=True), call)[..., 0] * norms


def pair_count(seen: AttentionIO) -> Float[Tensor, "batch head key"]:
    """How many real queries may see key j."""
    return visible_sums(torch.ones_like(to_acc_dtype(seen.call.query)[..., :1]), seen.call)[..., 0]


def early_count(call: AttentionCall) -> Float[Tensor, "batch one key"]:
    """How many real queries before key j see it, in any head: the prefix of an operation lets them."""
    count = to_acc_dtype(call.query).new_zeros(len(call.query), 1, call.key.shape[2])
    for part, keys in blocks(call):
        early = (
            (visible_mask(part) & (relative_positions(part) < 0)).any(1, keepdim=True).expand(len(count), -1, -1, -1)
        )
        if part.query_mask is not None:
            early = early & part.query_mask[:, None, :, None]
        count[..., keys] += early.sum(2)
    return count


def value_output_norm(seen: AttentionIO) -> Float[Tensor, "batch head key"]:
    """‖W_O v_j‖ of every value through its head's part of the output projection."""
    value = seen.call.value.repeat_interleave(seen.call.num_key_value_groups, 1)
    return _projected_norm(value, seen.projection())


def output_norm(seen: AttentionIO) -> Float[Tensor, "batch head query"]:
    """‖W_O o_i‖ of every head's output, as it enters the residual stream."""
    return _projected_norm(seen.output, seen.projection())


VECTORS: dict[str, Callable[[AttentionIO], Tensor]] = {
    "key_norm": key_norm,
    "value_norm": value_norm,
    "cosine_sum": cosine_sum,
    "norm_sum": norm_sum,
    "pair_count": pair_count,
    "value_output_norm": value_output_norm,
    "output_norm": output_norm,
}


def to_acc_dtype(values: Tensor) -> Tensor:
    """The values in float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def _projected_norm(vectors: Tensor, projection: Tensor) -> Tensor:
    """‖W_h x‖ by xᵀ(W_hᵀW_h)x, which never leaves the head's width."""
    heads, width = vectors.shape[1], vectors.shape[-1]
    parts = to_acc_dtype(projection).unflatten(1, (heads, width))
    gram = torch.einsum("mhd,mhe->hde", parts, parts)
    vectors = to_acc_dtype(vectors)
    return (vectors @ gram * vectors).sum(-1).clamp(min=0).sqrt()


def visible_sums(
    values: Float[Tensor, "batch head query width"], call: AttentionCall
) -> Float[Tensor, "batch head key width"]:
    """Sum of `values` over the real queries that may see each key, padding of keys apart."""
    if call.query_mask is not None:
        values = values * call.query_mask[:, None, :, None]
    keys = call.key.shape[2]
    if call.keep is not None or (call.operation is not None and call.operation.limits_keys):
        return _masked_sums(values, visible_mask(call), keys)
    if not call.causal:
        return values.sum(2, keepdim=True).expand(-1, -1, keys, -1)
    suffix = torch.nn.functional.pad(values.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    first = (torch.arange(keys, device=values.device) - call.offset).clamp(0, values.shape[2])
    return suffix.index_select(2, first)


def _masked_sums(values: Tensor, see: Tensor, keys: int) -> Tensor:
    """The sums under a mask that is written out, some queries at a time."""
    total = values.new_zeros(*values.shape[:2], keys, values.shape[-1])
    see = see.expand(-1, -1, values.shape[2], -1)
    for start in range(0, values.shape[2], ROWS):
        part = slice(start, start + ROWS)
        total += see[:, :, part].mT.to(values.dtype) @ values[:, :, part]
    return total
