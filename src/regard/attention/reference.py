"""Attention written out with its whole matrix: the definition that every other form is tested against."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention.call import (
    AttentionCall,
    ConstantHeadsInput,
    Operation,
    ReductionRequest,
    relative_positions,
    visible_mask,
)
from regard.attention.constant import constant_weights
from regard.attention.weightings import NORMALISATIONS, WEIGHTINGS, proxy_distribution


def scores(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """The logits before the softmax, −inf where a query may not see a key."""
    return unmasked_scores(call).masked_fill(~visible_mask(call), float("-inf"))


def unmasked_scores(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """The logits of every pair, also of those that may not meet."""
    key = call.key.repeat_interleave(call.num_key_value_groups, dim=1)
    result = call.query @ key.mT * call.scale
    if call.softcap is not None:
        result = torch.tanh(result / call.softcap) * call.softcap
    if call.operation is not None:
        result = result + score_bias(call, call.operation)
    if call.bias is not None:
        floor = torch.finfo(call.bias.dtype).min / 2
        result = result + call.bias.masked_fill(call.bias <= floor, float("-inf"))
    return result


def score_bias(call: AttentionCall, operation: Operation) -> Float[Tensor, "#batch #head #query #key"]:
    """What an operation adds to its scores: a constant, and what depends on how far a key stands from its query."""
    result = call.query.new_full((1, 1, 1, 1), operation.shift)
    distances = relative_positions(call).clamp(min=0)
    if operation.distance is not None:
        result = result + operation.distance.to(result.dtype)[:, distances]
    if operation.slopes is not None:
        result = result - operation.slopes.to(result.dtype)[:, None, None] * distances
    return result


def operation_weights(
    call: AttentionCall, operation: Operation
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query 1"] | None]:
    """The weights on the keys, and that on the extra column if there is one."""
    call = replace(call, operation=operation)
    keep, found = visible_mask(call), unmasked_scores(call)
    if call.bias is not None:
        keep = keep & (found > float("-inf"))
    columns = _extra_scores(call, operation)
    if columns is not None:
        found = torch.cat([columns, found], dim=-1)
        keep = torch.nn.functional.pad(keep, (1, 0), value=True)
    found = WEIGHTINGS[operation.weighting].weigh(found, keep)
    found = NORMALISATIONS[operation.normalisation](found)
    return (found, None) if columns is None else (found[..., 1:], found[..., :1])


def _extra_scores(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query 1"] | None:
    """The score of the column beside the keys, a learned key's or a learned logit's."""
    if operation.extra_key is not None:
        key = operation.extra_key.to(call.query.dtype).expand(call.query.shape[1], -1)
        return (call.query * key[:, None]).sum(-1, keepdim=True) * call.scale + operation.shift
    if call.sink is not None:
        return call.sink.to(call.query.dtype)[:, None, None].expand(*call.query.shape[:3], 1)
    return None


def mixed_weights(
    call: AttentionCall, operation: Operation
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query 1"] | None]:
    """Those of an operation, where constant heads have their own; these give the column what they leave it."""
    found, column = operation_weights(replace(call, constant=None), operation)
    if call.constant is None:
        return found, column
    return _with_constant(call, call.constant, found), None if column is None else column * _free_share(call, column)


def operation_output(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """The output of an operation, with the dropout of the call."""
    matrix, column = mixed_weights(call, operation)
    result = torch.nn.functional.dropout(matrix, call.dropout) @ call.value.repeat_interleave(
        call.num_key_value_groups, dim=1
    )
    if operation.extra_value is None:
        return result
    value = operation.extra_value.to(result.dtype)[:, None]
    share = column if operation.extra_key is not None and column is not None else _free_share(call, result)
    return result + share * value


def _free_share(call: AttentionCall, like: Tensor) -> Float[Tensor, "head 1 1"]:
    """How much of each head is its own attention: 1, but 0 of a constant one, or its gate."""
    share = like.new_ones(call.query.shape[1])
    if call.constant is not None:
        heads, gate = torch.tensor(call.constant.heads, device=like.device), call.constant.gate
        share = share.index_copy(0, heads, share.new_zeros(len(heads)) if gate is None else gate.to(share.dtype))
    return share[:, None, None]


def log_normalizer(call: AttentionCall) -> Float[Tensor, "batch head query"]:
    """The log-normaliser log Σ_j exp(s_ij) of softmax, a column beside the keys included; −inf where nothing is seen.

    The weights of constant heads come normalised: theirs is 0.
    """
    lse = scores(call).logsumexp(-1)
    column = _extra_scores(call, call.operation or Operation())
    if column is not None:
        lse = torch.logaddexp(lse, column[..., 0])
    if call.constant is not None and call.constant.gate is None:
        empty = (constant_weights(call) == 0).all(-1)
        lse[:, list(call.constant.heads)] = lse.new_zeros(empty.shape).masked_fill(empty, float("-inf"))
    return lse


def weights(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """The attention matrix A; rows of queries that see nothing are zero. Constant heads have theirs in its place."""
    if call.operation is not None:
        return mixed_weights(call, call.operation)[0]
    free = replace(call, constant=None)
    lse = log_normalizer(free)[..., None]
    found = torch.where(lse.isinf(), 0.0, (scores(free) - lse.masked_fill(lse.isinf(), 0.0)).exp())
    return found if call.constant is None else _with_constant(call, call.constant, found)


def _with_constant(call: AttentionCall, constant: ConstantHeadsInput, found: Tensor) -> Tensor:
    """The weights, with those of constant heads in the place of their own, or mixed with them."""
    heads, gate = list(constant.heads), constant.gate
    fixed = constant_weights(call).to(found.dtype)
    if gate is not None:
        fixed = gate[:, None, None] * found[:, heads] + (1 - gate[:, None, None]) * fixed
    return found.index_copy(1, torch.tensor(heads, device=found.device), fixed)


def attend(call: AttentionCall) -> Float[Tensor, "batch head query value_width"]:
    """The output A·V, with the dropout of the call."""
    if call.operation is not None:
        return operation_output(call, call.operation)
    matrix = torch.nn.functional.dropout(weights(call), call.dropout)
    return matrix @ call.value.repeat_interleave(call.num_key_value_groups, dim=1)


def spectral_bound(matrix: Float[Tensor, "*lead query key"]) -> Float[Tensor, "*lead"]:
    """λ_max of Aᵀ(I − 11ᵀ/n)A, by all singular values of the column-centred matrix."""
    centred = matrix - matrix.mean(-2, keepdim=True)
    return torch.linalg.matrix_norm(centred, ord=2).square()


def unpadded_samples(call: AttentionCall) -> Bool[Tensor, " batch"]:
    """Which samples of the batch have no padding, so that their matrices may be averaged entry by entry."""
    batch = call.query.shape[0]
    result = torch.ones(batch, dtype=torch.bool, device=call.query.device)
    for real in (call.query_mask, call.key_mask):
        if real is not None:
            result = result & real.all(-1)
    return result


def distribution(
    call: AttentionCall,
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query"]]:
    """The weights that are measured, and how much of each row went to no key: a sink of its own.

    Of an operation whose weights are no distribution it is |A| / Σ|A|, the extra column in the sum; else A.
    """
    operation = call.operation
    if operation is None:
        a = weights(call)
        return a, (1 - a.sum(-1)) * (log_normalizer(call) > float("-inf"))
    a, column = mixed_weights(call, operation)
    both = a if column is None else torch.cat([column, a], dim=-1)
    if WEIGHTINGS[operation.weighting].proxy:
        both = proxy_distribution(both)
    return (both, torch.zeros_like(both[..., 0])) if column is None else (both[..., 1:], both[..., 0])


def reduce(call: AttentionCall, wanted: ReductionRequest) -> dict[str, Tensor]:
    """Every wanted reduction, taken from the whole matrix; of an operation from its `distribution`.

    Its `row_sum` is of the weights themselves; its `lse`, but that of softmax, the logarithm of the sum of their sizes.
    """
    a, missing = distribution(call)
    real = call.query_mask[:, None, :] if call.query_mask is not None else a.new_ones(1, 1, 1, dtype=torch.bool)
    counted = a * real[..., None]
    keys = torch.arange(a.shape[-1], device=a.device)
    queries = torch.arange(a.shape[-2], device=a.device)[:, None] + call.offset
    every = {
        "column_mass": lambda: counted.sum(-2),
        "column_square": lambda: counted.square().sum(-2),
        "lse": lambda: log_normalizer(call) if _is_softmax(call) else weights(call).abs().sum(-1).log(),
        "entropy": lambda: -torch.special.xlogy(a, a).sum(-1),
        "distance": lambda: (a * (queries - keys).abs()).sum(-1),
        "row_sum": lambda: weights(call).sum(-1),
        "virtual_sink_mass": lambda: missing,
        "first_mass": lambda: _first_mass(call, a, wanted.num_first_keys),
        "weights": lambda: counted[unpadded_samples(call)].sum(0),
        "spectral_bound": lambda: _spectral_by_sample(call, a),
    }
    return {name: every[name]() for name in wanted.names}


def _is_softmax(call: AttentionCall) -> bool:
    return call.operation is None or call.operation.weighting == "softmax"


def _first_mass(call: AttentionCall, a: Tensor, first: int) -> Tensor:
    starts = call.starts or (0,) * a.shape[0]
    before = max(0, -min(starts))
    padded = torch.nn.functional.pad(a, (before, first))
    return torch.stack([padded[b, ..., before + s : before + s + first] for b, s in enumerate(starts)])


def _spectral_by_sample(call: AttentionCall, a: Tensor) -> Tensor:
    bounds = []
    for b, matrix in enumerate(a):
        rows = slice(None) if call.query_mask is None else call.query_mask[b]
        bounds.append(spectral_bound(matrix[:, rows]))
    return torch.stack(bounds)
