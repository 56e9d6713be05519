"""Attention that does not look at its input: constant matrices in the place of softmax weights (PAPA, 2211.03495).

The weights of a constant head are `L1-row-normalise(C ∘ keep)`: the matrix where a query may see a key, each row
divided by its own sum; a row of nothing but zeros stays zero. C is shared by all samples, so that C·V is one product
for the whole batch, with the samples side by side as columns; only padding is told apart, by a second, thin product.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall, ConstantHeadsInput, visible_mask

FEW = 8
"""Queries a call, up to which the rows of shifted samples are looked up one by one."""


def constant_weights(call: AttentionCall) -> Float[Tensor, "batch constant query key"]:
    """The weights of the constant heads entry by entry, without the gate: the definition."""
    constant = _constant(call)
    see = visible_mask(call)
    if see.shape[1] > 1:
        see = see[:, list(constant.heads)]
    if call.query_mask is not None:
        see = see & call.query_mask[:, None, :, None]
    matrix = _aligned(call, constant) * see
    total = matrix.abs().sum(-1, keepdim=True)
    return (matrix / total.masked_fill(total == 0, 1)).expand(len(call.value), -1, -1, -1)


def constant_output(call: AttentionCall) -> Float[Tensor, "batch query constant value_width"]:
    """The output of the constant heads alone, laid out as the host wants it next; differentiable."""
    constant = _constant(call)
    value = _value(call, constant)
    masked = call.keep is not None or (call.operation is not None and call.operation.limits_keys)
    if masked or (constant.is_shifted and not _begins(call, constant)):
        return torch.einsum("bhqk,bhkd->bqhd", constant_weights(call).to(value.dtype), value)
    if constant.is_shifted:
        return _moved(call, constant, value)
    return _product(call, _crop(call, constant), value, constant)


def _constant(call: AttentionCall) -> ConstantHeadsInput:
    assert call.constant is not None
    return call.constant


def _value(call: AttentionCall, constant: ConstantHeadsInput) -> Tensor:
    """The values of the constant heads, (batch, constant, key, width)."""
    shares = call.num_key_value_groups
    groups = [head // shares for head in constant.heads]
    if groups == list(range(call.value.shape[1])):
        return call.value
    return call.value[:, groups]


def _begins(call: AttentionCall, constant: ConstantHeadsInput) -> bool:
    """Whether the call holds its samples from their first query and key on, and enough of them to move them about."""
    return call.query.shape[2] > FEW and constant.first_query == constant.first_key == 0


def _aligned(call: AttentionCall, constant: ConstantHeadsInput) -> Tensor:
    """The matrices with a row for each query and a column for each key: (1 or batch, constant, query, key)."""
    if not constant.is_shifted:
        return _crop(call, constant)[None]
    rows, columns = constant.matrices.shape[1:]
    query = _positions(constant.first_query, call.query.shape[2], constant.query_shift, call)
    key = _positions(constant.first_key, call.value.shape[2], constant.key_shift, call)
    inside = ((query >= 0) & (query < rows))[:, :, None] & ((key >= 0) & (key < columns))[:, None]
    at = query.clamp(0, rows - 1)[:, :, None] * columns + key.clamp(0, columns - 1)[:, None]
    return (constant.matrices.flatten(1)[:, at] * inside).transpose(0, 1)


def _positions(first: int, count: int, shift: Tensor | None, call: AttentionCall) -> Tensor:
    """Where the columns of each sample stand, counted from its first real one: (batch, column)."""
    columns = torch.arange(first, first + count, device=call.value.device).expand(call.value.shape[0], -1)
    return columns if shift is None else columns - shift[:, None]


def _crop(call: AttentionCall, constant: ConstantHeadsInput) -> Tensor:
    """The rows of the queries and the columns of the keys; zero where a key stands outside the matrices."""
    first, left = constant.first_query, constant.first_key
    rows, columns = constant.matrices.shape[1:]
    last, right = first + call.query.shape[2], left + call.value.shape[2]
    crop = constant.matrices[:, max(first, 0) : max(last, 0), max(left, 0) : max(right, 0)]
    outside = (max(-left, 0), max(right - columns, 0), max(-first, 0), max(last - rows, 0))
    return torch.nn.functional.pad(crop, outside) if any(outside) else crop


def _moved(call: AttentionCall, constant: ConstantHeadsInput, value: Tensor) -> Tensor:
    """The output where samples begin late: their keys are moved to the beginning, and their output back."""
    batch, _, keys, _ = value.shape
    queries = call.query.shape[2]
    sample = torch.arange(batch, device=value.device)[:, None]
    query, key = (
        _positions(0, count, None if shift is None else -shift, call)
        for count, shift in ((queries, constant.query_shift), (keys, constant.key_shift))
    )
    real = call.key_mask if call.key_mask is not None else torch.ones_like(key, dtype=torch.bool)
    here = call.query_mask
    moved = replace(
        call,
        key_mask=real[sample, key % keys] & (key < keys),
        query_mask=None if here is None else here[sample, query % queries],
    )
    first = value.transpose(1, 2)[sample, key % keys].transpose(1, 2)
    output = _product(moved, _crop(call, constant), first, constant)
    return output[sample, _positions(0, queries, constant.query_shift, call) % queries]


def _product(call: AttentionCall, matrices: Tensor, value: Tensor, constant: ConstantHeadsInput) -> Tensor:
    """C·V for the whole batch: one product per head, of C with the values of all samples side by side."""
    batch, heads, _, width = value.shape
    queries = matrices.shape[1]
    product = torch.bmm(matrices, _side_by_side(value, call.key_mask))
    found = product.view(heads, queries, batch, width).permute(2, 1, 0, 3)
    share = _share(call, matrices, constant)
    if share is None:
        return found.contiguous()
    if torch.is_grad_enabled() and (found.requires_grad or share.requires_grad):
        return (found * share).contiguous()
    return torch.mul(found, share, out=value.new_empty(batch, queries, heads, width))


def _side_by_side(value: Tensor, real: Tensor | None) -> Tensor:
    """The values as (constant, key, batch × width), zero at keys that are padding."""
    heads, keys = value.shape[1:3]
    apart = value.permute(1, 2, 0, 3)
    if real is not None:
        apart = apart * real.mT[None, :, :, None]
    return apart.reshape(heads, keys, -1)


def _share(call: AttentionCall, matrices: Tensor, constant: ConstantHeadsInput) -> Tensor | None:
    """What each row is to be multiplied by, (1 or batch, query, constant, 1); None where that is one everywhere."""
    share = None
    if call.key_mask is not None or not constant.normalised:
        absolute = matrices.abs() if constant.signed else matrices
        if call.key_mask is None:
            total = absolute.sum(-1)[..., None]
        else:
            heads, queries, keys = matrices.shape
            total = (absolute.reshape(-1, keys) @ call.key_mask.mT.to(matrices.dtype)).view(heads, queries, -1)
        share = total.masked_fill(total == 0, 1).reciprocal().permute(2, 1, 0)[..., None]
    if call.query_mask is not None:
        real = call.query_mask[:, :, None, None].to(matrices.dtype)
        share = real if share is None else share * real
    return share
