"""Attention that ignores its input: constant matrices instead of softmax weights (PAPA, arXiv 2211.03495).

The weights of a constant head are `L1-row-normalize(C ∘ visible)`, times its row sums if it has some; a row of zeros
stays zero. All samples share C, so that C·V is one product with the samples side by side as columns; padding takes a
second, thin product.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation, as_slice, visible_mask
from regard.attention.tracing import always, is_traced
from regard.errors import UserError

MAX_LOOKUP_QUERIES = 8
"""Most queries of a call for which the rows of shifted samples are looked up one by one: more repay moving them."""


def has_whole_rows(operation: Operation) -> bool:
    """Return whether the weights of a row and its column sum to one, so that a constant's column is what it lacks."""
    is_own = operation.function is not None
    return not is_own and (operation.weighting == "softmax" or operation.normalisation == "sum")


def check_extra_value(call: AttentionCall) -> None:
    """Raise a UserError where a value stands beside those of the keys whose weight in constant heads is not known."""
    operation = call.operation
    if operation is None or operation.extra_value is None or operation.extra_key is None:
        return
    if not has_whole_rows(operation):
        raise UserError(
            "constants beside a learned key and value (kv-bias): expected weights whose rows sum to 1, which tell how "
            f"much the value gets; got {operation.weighting}, normalisation {operation.normalisation}"
        )


def constant_weights(call: AttentionCall) -> Float[Tensor, "batch constant query key"]:
    """Return the weights of the constant heads entry by entry, without the gate: the definition."""
    assert call.constant is not None
    constant = call.constant
    visible = visible_mask(call)
    if visible.shape[1] > 1:
        visible = visible[:, list(constant.heads)]
    if call.query_mask is not None:
        visible = visible & call.query_mask[:, None, :, None]
    matrix = _align_matrices(call, constant) * visible
    total = matrix.abs().sum(-1, keepdim=True)
    weights = matrix / total.masked_fill(total == 0, 1)
    if constant.row_sums is not None:
        weights = weights * _align_row_sums(call, constant, constant.row_sums)
    return weights.expand(call.value.shape[0], -1, -1, -1)


def row_weights(call: AttentionCall) -> Float[Tensor, "batch constant query key"]:
    """Return the same without sums, where every row is normalised already and nothing is hidden."""
    constant = call.constant
    assert constant is not None
    is_masked = call.key_mask is not None or call.query_mask is not None or call.hides_pairs
    if constant.normalised and not is_masked and not constant.is_shifted:
        weights = _crop(call, constant)[None]
        return weights if constant.row_sums is None else weights * _crop_row_sums(call, constant.row_sums)
    return constant_weights(call)


def constant_output(call: AttentionCall) -> Float[Tensor, "batch query constant value_width"]:
    """Return the output of the constant heads, laid out as the host wants it next; differentiable, with dropout."""
    assert call.constant is not None
    constant, value = call.constant, call.value
    is_few = always(call.query.shape[2] <= MAX_LOOKUP_QUERIES)
    is_shared = call.num_key_value_groups > 1 and len(constant.heads) == call.query.shape[1]
    if is_few and (is_shared or always(value.shape[0] > 1)) and not call.dropout:
        return _few_queries_output(call, value)
    groups = [head // call.num_key_value_groups for head in constant.heads]
    if groups != list(range(value.shape[1])):
        value = value[:, groups]
    can_move = always(call.query.shape[2] > MAX_LOOKUP_QUERIES) and constant.first_query == constant.first_key == 0
    if call.hides_pairs or call.dropout or (constant.is_shifted and not can_move):
        weights = torch.nn.functional.dropout(constant_weights(call), call.dropout)
        return torch.einsum("bhqk,bhkd->bqhd", weights.to(value.dtype), value)
    if constant.is_shifted:
        return _moved_output(call, constant, value)
    return _product(call, _crop(call, constant), value, constant)


def _few_queries_output(call: AttentionCall, value: Tensor) -> Tensor:
    """Return the output of few queries, as when decoding, without a copy of the values of all heads."""
    assert call.constant is not None
    weights, shares = row_weights(call).to(value.dtype), call.num_key_value_groups
    if len(call.constant.heads) < call.query.shape[1]:
        value, shares = value[:, as_slice([head // shares for head in call.constant.heads])], 1
    queries = weights.shape[2]  # those of the heads of a group are one matrix
    product = weights.unflatten(1, (-1, shares)).flatten(2, 3) @ value
    return product.unflatten(2, (shares, queries)).flatten(1, 2).transpose(1, 2)


def _align_matrices(call: AttentionCall, constant: ConstantHeadsInput) -> Tensor:
    """Return the matrices with a row a query and a column a key: (1 or batch, constant, query, key)."""
    if not constant.is_shifted:
        return _crop(call, constant)[None]
    rows, columns = constant.matrices.shape[1:]
    query = _positions(constant.first_query, call.query.shape[2], constant.query_shift, call)
    key = _positions(constant.first_key, call.value.shape[2], constant.key_shift, call)
    is_inside = ((query >= 0) & (query < rows))[:, :, None] & ((key >= 0) & (key < columns))[:, None]
    index = query.clamp(0, rows - 1)[:, :, None] * columns + key.clamp(0, columns - 1)[:, None]
    return (constant.matrices.flatten(1)[:, index] * is_inside).transpose(0, 1)


def _align_row_sums(call: AttentionCall, constant: ConstantHeadsInput, row_sums: Tensor) -> Tensor:
    """Return the row sum of each query: (1 or batch, constant, query, 1)."""
    if not constant.is_shifted:
        return _crop_row_sums(call, row_sums)
    query = _positions(constant.first_query, call.query.shape[2], constant.query_shift, call)
    return row_sums[:, query.clamp(0, row_sums.shape[1] - 1)].transpose(0, 1)[..., None]


def _crop_row_sums(call: AttentionCall, row_sums: Tensor) -> Tensor:
    """Return the row sums of the queries: (1, constant, query, 1); queries outside the matrices have rows of zeros."""
    assert call.constant is not None
    first = call.constant.first_query
    rows = torch.arange(first, first + call.query.shape[2], device=row_sums.device)
    return row_sums[None, :, rows.clamp(0, row_sums.shape[1] - 1), None]


def _positions(first: int, count: int, shift: Tensor | None, call: AttentionCall) -> Tensor:
    """Return the position of each column, counted from the first real one of its sequence: (batch, column)."""
    columns = torch.arange(first, first + count, device=call.value.device).expand(call.value.shape[0], -1)
    return columns if shift is None else columns - (shift[:, None] if shift.ndim == 1 else shift)


def _crop(call: AttentionCall, constant: ConstantHeadsInput) -> Tensor:
    """Return the rows of the queries and the columns of the keys; zero outside the matrices."""
    first, left = constant.first_query, constant.first_key
    rows, columns = constant.matrices.shape[1:]
    last, right = first + call.query.shape[2], left + call.value.shape[2]
    if is_traced():  # views would bind the graph to sizes by their strides
        index = [torch.arange(max(a, 0), b, device=call.value.device) for a, b in ((first, last), (left, right))]
        crop = constant.matrices.index_select(1, index[0]).index_select(2, index[1])
    else:
        crop = constant.matrices[:, max(first, 0) : max(last, 0), max(left, 0) : max(right, 0)]
    outside = (max(-left, 0), max(right - columns, 0), max(-first, 0), max(last - rows, 0))
    return torch.nn.functional.pad(crop, outside) if any(outside) else crop


def _moved_output(call: AttentionCall, constant: ConstantHeadsInput, value: Tensor) -> Tensor:
    """Return the output of samples that begin late: move their keys to the beginning, and the output back."""
    batch, _, keys, _ = value.shape
    queries = call.query.shape[2]
    sample = torch.arange(batch, device=value.device)[:, None]
    query, key = (
        _positions(0, count, None if shift is None else -shift, call)
        for count, shift in ((queries, constant.query_shift), (keys, constant.key_shift))
    )
    key_mask = call.key_mask if call.key_mask is not None else torch.ones_like(key, dtype=torch.bool)
    query_mask = None if call.query_mask is None else call.query_mask[sample, query % queries]
    moved = replace(call, key_mask=key_mask[sample, key % keys] & (key < keys), query_mask=query_mask)
    moved_value = value.transpose(1, 2)[sample, key % keys].transpose(1, 2)
    output = _product(moved, _crop(call, constant), moved_value, constant)
    return output[sample, _positions(0, queries, constant.query_shift, call) % queries]


def _product(call: AttentionCall, matrices: Tensor, value: Tensor, constant: ConstantHeadsInput) -> Tensor:
    """Return C·V for the whole batch: one product a head, with the values of all samples side by side."""
    batch, heads, keys, width = value.shape
    queries, by_key = matrices.shape[1], value.permute(1, 2, 0, 3)
    if call.key_mask is not None:
        by_key = by_key * call.key_mask.mT[None, :, :, None]
    product = torch.bmm(matrices, by_key.reshape(heads, keys, -1)).view(heads, queries, batch, width)
    output = product.permute(2, 1, 0, 3)
    factor = _row_factor(call, matrices, constant)
    if factor is None:
        return output.contiguous()
    if is_traced() or (torch.is_grad_enabled() and (output.requires_grad or factor.requires_grad)):
        return (output * factor).contiguous()
    return torch.mul(output, factor, out=value.new_empty(batch, queries, heads, width))


def _row_factor(call: AttentionCall, matrices: Tensor, constant: ConstantHeadsInput) -> Tensor | None:
    """Return the factor of each row, (1 or batch, query, constant, 1), that gives it its sum; None if all are one."""
    factor = None
    if call.key_mask is not None or not constant.normalised:
        absolute = matrices.abs() if constant.signed else matrices
        if call.key_mask is None:
            total = absolute.sum(-1)[..., None]
        else:
            heads, queries, keys = matrices.shape
            total = (absolute.reshape(-1, keys) @ call.key_mask.mT.to(matrices.dtype)).view(heads, queries, -1)
        factor = total.masked_fill(total == 0, 1).reciprocal().permute(2, 1, 0)[..., None]
    if constant.row_sums is not None:
        sums = _crop_row_sums(call, constant.row_sums).transpose(1, 2)
        factor = sums if factor is None else factor * sums
    if call.query_mask is not None:
        valid = call.query_mask[:, :, None, None].to(matrices.dtype)
        factor = valid if factor is None else factor * valid
    return factor
