"""Reductions of queries, keys, values and outputs, computed in time and memory linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall, relative_positions, visible_mask
from regard.attention.reduction import Reduction

ROWS = 256
"""Queries whose mask is multiplied at once."""


@dataclass(frozen=True)
class AttentionIO:
    """One finished attention call.

    Attributes:
        call: The call.
        output: Its output.
        projection: Returns W_O, or raises a UserError if the model has none that is recognized.
    """

    call: AttentionCall
    output: Float[Tensor, "batch head query value_width"]
    projection: Callable[[], Float[Tensor, "width heads_times_value_width"]]


def to_acc_dtype(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 if that is their dtype."""
    return values if values.dtype == torch.float64 else values.float()


def _by_head(values: Tensor, call: AttentionCall) -> Tensor:
    """Repeat what key/value heads have for each of their query heads."""
    return values.repeat_interleave(call.num_key_value_groups, 1)


def _counted_mask(call: AttentionCall) -> Bool[Tensor, "*batch_and_head query key"]:
    """Return the pairs that meet, of real queries: the definition."""
    mask = visible_mask(call).expand(len(call.query), -1, -1, -1)
    return mask if call.query_mask is None else mask & call.query_mask[:, None, :, None]


def _key_norm(io: AttentionIO) -> Float[Tensor, "batch group key"]:
    return to_acc_dtype(io.call.key).norm(dim=-1)


def _value_norm(io: AttentionIO) -> Float[Tensor, "batch group key"]:
    return to_acc_dtype(io.call.value).norm(dim=-1)


def _cosine_sum(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    call = io.call
    directions = _by_head(normalize(to_acc_dtype(call.key), dim=-1), call)
    return (_sum_over_queries(normalize(to_acc_dtype(call.query), dim=-1), call) * directions).sum(-1)


def _dense_cosine_sum(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    query, key = (normalize(to_acc_dtype(t), dim=-1) for t in (io.call.query, io.call.key))
    return (query @ _by_head(key, io.call).mT * _counted_mask(io.call)).sum(-2)


def _norm_sum(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    call = io.call
    query_norms = to_acc_dtype(call.query).norm(dim=-1, keepdim=True)
    return _sum_over_queries(query_norms, call)[..., 0] * _by_head(_key_norm(io), call)


def _dense_norm_sum(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    query, key = (to_acc_dtype(t).norm(dim=-1) for t in (io.call.query, io.call.key))
    return (query[..., None] * _by_head(key, io.call)[:, :, None] * _counted_mask(io.call)).sum(-2)


def _pair_count(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    return _sum_over_queries(torch.ones_like(to_acc_dtype(io.call.query)[..., :1]), io.call)[..., 0]


def _dense_pair_count(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    query = to_acc_dtype(io.call.query)
    return _counted_mask(io.call).to(query.dtype).sum(-2).expand(-1, query.shape[1], -1)


def _prefix_query_count(io: AttentionIO) -> Float[Tensor, "batch 1 key"] | None:
    """Count early queries block by block; None if the call has no prefix."""
    call = io.call
    if call.operation is None or not call.operation.prefix:
        return None
    count = to_acc_dtype(call.query).new_zeros(len(call.query), 1, call.key.shape[2])
    for block, columns in blocks(call):
        count[..., columns] += _dense_prefix_query_count(AttentionIO(block, io.output, io.projection))
    return count


def _dense_prefix_query_count(io: AttentionIO) -> Float[Tensor, "batch 1 key"]:
    early = (_counted_mask(io.call) & (relative_positions(io.call) < 0)).any(1, keepdim=True)
    return early.sum(2).to(to_acc_dtype(io.call.query).dtype)


def _value_output_norm(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    return _projected_norm(_by_head(io.call.value, io.call), io.projection())


def _dense_value_output_norm(io: AttentionIO) -> Float[Tensor, "batch head key"]:
    return _dense_projected_norm(_by_head(io.call.value, io.call), io.projection())


def _output_norm(io: AttentionIO) -> Float[Tensor, "batch head query"]:
    return _projected_norm(io.output, io.projection())


def _dense_output_norm(io: AttentionIO) -> Float[Tensor, "batch head query"]:
    return _dense_projected_norm(io.output, io.projection())


def _projected_norm(vectors: Tensor, projection: Tensor) -> Tensor:
    """Return ‖W_h x‖ as √(xᵀ(W_hᵀW_h)x), which never leaves the width of the head."""
    parts = to_acc_dtype(projection).unflatten(1, (vectors.shape[1], vectors.shape[-1]))
    gram = torch.einsum("mhd,mhe->hde", parts, parts)
    vectors = to_acc_dtype(vectors)
    return (vectors @ gram * vectors).sum(-1).clamp(min=0).sqrt()


def _dense_projected_norm(vectors: Tensor, projection: Tensor) -> Tensor:
    parts = to_acc_dtype(projection).unflatten(1, (vectors.shape[1], vectors.shape[-1]))
    return torch.einsum("mhd,bhtd->bhtm", parts, to_acc_dtype(vectors)).norm(dim=-1)


def _sum_over_queries(
    values: Float[Tensor, "batch head query width"], call: AttentionCall
) -> Float[Tensor, "batch head key width"]:
    """Sum values over the real queries that see each key; of padded keys any sum."""
    if call.query_mask is not None:
        values = values * call.query_mask[:, None, :, None]
    keys = call.key.shape[2]
    if call.keep is not None or (call.operation is not None and call.operation.limits_keys):
        return _masked_sum_over_queries(values, visible_mask(call), keys)
    if not call.causal:
        return values.sum(2, keepdim=True).expand(-1, -1, keys, -1)
    suffix = torch.nn.functional.pad(values.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    first = (torch.arange(keys, device=values.device) - call.offset).clamp(0, values.shape[2])
    return suffix.index_select(2, first)


def _masked_sum_over_queries(values: Tensor, visible: Tensor, keys: int) -> Tensor:
    """Sum values under a mask of all pairs, some queries at a time."""
    total = values.new_zeros(*values.shape[:2], keys, values.shape[-1])
    visible = visible.expand(-1, -1, values.shape[2], -1)
    for start in range(0, values.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        total += visible[:, :, rows].mT.to(values.dtype) @ values[:, :, rows]
    return total


def _vector(name: str, reference: Callable[[AttentionIO], Tensor], **options: Any) -> Reduction:
    return Reduction(name=name, source="vectors", reference=reference, **({"axis": "key", "steps": "add"} | options))


_PAIRS = "T · width, of masks of all pairs T² · width"
_PROJECTED = "T · width² a head, once W_Oᵀ W_O is known"

_REDUCTIONS = (
    _vector("key_norm", _key_norm, steps="write", cost="T · width"),
    _vector("value_norm", _value_norm, steps="write", cost="T · width"),
    _vector("cosine_sum", _dense_cosine_sum, compute=_cosine_sum, cost=_PAIRS),
    _vector("norm_sum", _dense_norm_sum, compute=_norm_sum, cost=_PAIRS),
    _vector("pair_count", _dense_pair_count, compute=_pair_count, cost=_PAIRS),
    _vector("prefix_query_count", _dense_prefix_query_count, compute=_prefix_query_count, cost="T²"),
    _vector("value_output_norm", _dense_value_output_norm, compute=_value_output_norm, steps="write", cost=_PROJECTED),
    _vector("output_norm", _dense_output_norm, compute=_output_norm, axis="query", steps="concat", cost=_PROJECTED),
)
VECTOR_REDUCTIONS: dict[str, Reduction] = {reduction.name: reduction for reduction in _REDUCTIONS}
"""Reductions of an `AttentionIO`, by name.

* `key_norm`, `value_norm`: L2 norms of keys (positions applied) and values, by key/value head.
* `cosine_sum`, `norm_sum`: Σ cos(q_i, k_j) and Σ |q_i||k_j| over the real queries i that see key j.
* `pair_count`: number of these queries.
* `prefix_query_count`: number of real queries before key j that see it, in any head: the prefix lets them.
* `value_output_norm`, `output_norm`: ‖W_O v_j‖ and ‖W_O o_i‖ through the part of W_O of each head.
"""
