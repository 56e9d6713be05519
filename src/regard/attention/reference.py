"""Attention with its whole matrix: the definition that every other backend is tested against."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation, relative_positions, visible_mask
from regard.attention.constant import constant_weights, has_whole_rows
from regard.attention.tracing import is_exported
from regard.attention.weightings import NORMALISATIONS, WEIGHTINGS, proxy_distribution
from regard.errors import UserError

WeightsAndColumn = tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query 1"] | None]
"""Weights of the keys, and of the column beside them if there is one."""


def scores(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """Return the logits before the softmax, −inf where a query may not see a key."""
    logits, operation = unmasked_scores(call), call.operation
    keep = visible_mask(call)
    return logits.masked_fill(~(keep if operation is None else _keep_largest(logits, keep, operation)), float("-inf"))


def _keep_largest(logits: Tensor, keep: Tensor, operation: Operation) -> Tensor:
    """Return the mask without the keys that are not among the `top_k` largest scores of their query.

    Scores that are no numbers stay: a key would be left out in silence.
    """
    if operation.top_k is None:
        return keep
    hidden = longer = logits.detach().masked_fill(~keep, float("-inf"))
    if is_exported():  # the graph serves fewer keys, too
        longer = torch.nn.functional.pad(hidden, (0, operation.top_k), value=float("-inf"))
    elif operation.top_k >= logits.shape[-1]:
        return keep
    return keep & ~(hidden < longer.topk(operation.top_k, dim=-1).values[..., -1:])


def unmasked_scores(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """Return the logits of every pair, visible or not."""
    logits = call.query @ call.expand_groups(call.key).mT * call.scale
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    operation = call.operation
    if operation is not None:
        bias = call.query.new_full((1, 1, 1, 1), operation.shift)
        distances = relative_positions(call).clamp(min=0)
        if operation.distance is not None:
            bias = bias + operation.distance.to(bias.dtype)[:, distances]
        if operation.slopes is not None:
            bias = bias - operation.slopes.to(bias.dtype)[:, None, None] * distances
        logits = logits + bias
    if call.bias is not None:
        logits = logits + call.bias.masked_fill(call.bias <= torch.finfo(call.bias.dtype).min / 2, float("-inf"))
    return logits


def operation_weights(call: AttentionCall, operation: Operation) -> WeightsAndColumn:
    """Return the weights of an operation, as if no head were constant."""
    call = replace(call, operation=operation)
    keep, logits = visible_mask(call), unmasked_scores(call)
    if call.bias is not None:
        keep = keep & (logits > float("-inf"))
    return weigh(call, operation, logits, _keep_largest(logits, keep, operation))


def weigh(
    call: AttentionCall,
    operation: Operation,
    logits: Float[Tensor, "batch head query key"],
    keep: Bool[Tensor, "#batch #head #query key"],
) -> WeightsAndColumn:
    """Return the weights of scores, of pairs that meet, with a column beside the keys if there is one."""
    column = _extra_scores(call, operation)
    if column is not None:
        logits = torch.cat([column, logits], dim=-1)
        keep = torch.nn.functional.pad(keep, (1, 0), value=True)
    if operation.function is not None:
        return _own_weights(operation.function, logits, keep, column is not None)
    matrix = WEIGHTINGS[operation.weighting].weigh(logits, keep)
    matrix = NORMALISATIONS[operation.normalisation](matrix)
    return (matrix, None) if column is None else (matrix[..., 1:], matrix[..., :1])


def _own_weights(function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, keep: Tensor, column: bool) -> Any:
    """Return the weights of a function, zero in rows that see no key. UserError if it weighs what is hidden."""
    keep = keep.expand_as(logits)
    matrix = function(logits, keep)
    if not isinstance(matrix, Tensor) or matrix.shape != logits.shape:
        got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise UserError(f"attention: expected weights of the shape of the scores, {tuple(logits.shape)}; got {got}")
    matrix = matrix.masked_fill(~keep.any(-1, keepdim=True), 0.0).to(logits.dtype)
    if bool((matrix.detach().masked_fill(keep, 0.0) != 0).any()):
        raise UserError("attention: expected weights of zero where keep is False; the function weighs hidden keys")
    return (matrix[..., 1:], matrix[..., :1]) if column else (matrix, None)


def _extra_scores(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query 1"] | None:
    """Return the scores of the column beside the keys, of a learned key or a learned logit."""
    if operation.extra_key is not None:
        key = operation.extra_key.to(call.query.dtype).expand(call.query.shape[1], -1)
        return (call.query * key[:, None]).sum(-1, keepdim=True) * call.scale + operation.shift
    logits = call.sink_logits
    return None if logits is None else logits.to(call.query.dtype)[..., None].expand(*call.query.shape[:3], 1)


def mixed_weights(call: AttentionCall, operation: Operation) -> WeightsAndColumn:
    """Return the weights of an operation with those of constant heads in place."""
    matrix, column = operation_weights(replace(call, constant=None), operation)
    if call.constant is None:
        return matrix, column
    matrix = _insert_constant(call, call.constant, matrix)
    if column is None:
        return matrix, None
    column = column * _attention_share(call, column)
    if has_whole_rows(operation):
        column = column + constant_column(call, call.constant, column)
    return matrix, column


def operation_output(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of an operation, with the dropout of the call."""
    matrix, column = mixed_weights(call, operation)
    output = torch.nn.functional.dropout(matrix, call.dropout) @ call.expand_groups(call.value)
    return add_extra_value(call, operation, output, column)


def add_extra_value(
    call: AttentionCall,
    operation: Operation,
    output: Float[Tensor, "batch head query value_width"],
    column: Float[Tensor, "batch head query 1"] | None,
) -> Float[Tensor, "batch head query value_width"]:
    """Return an output with the value beside those of the keys, if there is one, times the weight of its column."""
    if operation.extra_value is None:
        return output
    value = operation.extra_value.to(output.dtype)[:, None]
    return output + (value if operation.extra_key is None or column is None else column * value)


def _attention_share(call: AttentionCall, like: Tensor) -> Float[Tensor, "head 1 1"]:
    """Return how much of each head is attention: 1, or of a constant head its gate, else 0."""
    share = like.new_ones(call.query.shape[1])
    if call.constant is not None:
        heads, gate = torch.tensor(call.constant.heads, device=like.device), call.constant.gate
        share = share.index_copy(0, heads, share.new_zeros(len(heads)) if gate is None else gate.to(share.dtype))
    return share[:, None, None]


def log_normalizer(call: AttentionCall) -> Float[Tensor, "batch head query"]:
    """Return log Σ_j exp(s_ij) of softmax with a column beside the keys; −inf for no key, 0 for constant heads."""
    lse = scores(call).logsumexp(-1)
    column = _extra_scores(call, call.operation or Operation())
    if column is not None:
        lse = torch.logaddexp(lse, column[..., 0])
    if call.constant is not None and call.constant.gate is None:
        is_empty = (constant_weights(call) == 0).all(-1)
        lse[:, list(call.constant.heads)] = lse.new_zeros(is_empty.shape).masked_fill(is_empty, float("-inf"))
    return lse


def weights(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """Return the attention matrix, constant heads in place; rows of queries that see no key are zero."""
    if call.operation is not None:
        return mixed_weights(call, call.operation)[0]
    attention = replace(call, constant=None)
    lse = log_normalizer(attention)[..., None]
    matrix = torch.where(lse.isinf(), 0.0, (scores(attention) - lse.masked_fill(lse.isinf(), 0.0)).exp())
    return matrix if call.constant is None else _insert_constant(call, call.constant, matrix)


def _insert_constant(call: AttentionCall, constant: ConstantHeadsInput, matrix: Tensor) -> Tensor:
    """Write the weights of constant heads over their attention, or mix the two by the gate."""
    heads, gate = list(constant.heads), constant.gate
    fixed = constant_weights(call).to(matrix.dtype)
    if gate is not None:
        fixed = gate[:, None, None] * matrix[:, heads] + (1 - gate[:, None, None]) * fixed
    return matrix.index_copy(1, torch.tensor(heads, device=matrix.device), fixed)


def attend(call: AttentionCall) -> Float[Tensor, "batch head query value_width"]:
    """Return the output A·V, with the dropout of the call."""
    if call.operation is not None:
        return operation_output(call, call.operation)
    return torch.nn.functional.dropout(weights(call), call.dropout) @ call.expand_groups(call.value)


def _without_sign(
    matrix: Float[Tensor, "batch head query key"], constant: ConstantHeadsInput
) -> Float[Tensor, "batch head query key"]:
    """Return |A| / Σ |A| of the rows with negative weights, as constants may have that were trained.

    Where constant rows have sums of their own, these are of |A|, which is returned.
    """
    if constant.row_sums is not None and constant.gate is None:
        return matrix.abs()
    return torch.where((matrix < 0).any(-1, keepdim=True), proxy_distribution(matrix), matrix)


def constant_lack(call: AttentionCall) -> Float[Tensor, "batch constant query 1"]:
    """Return what the rows of constant heads lack to one; 0 of rows of zeros."""
    sums = constant_weights(call).abs().sum(-1, keepdim=True)
    return (1 - sums).clamp(min=0) * (sums != 0)


def constant_column(call: AttentionCall, constant: ConstantHeadsInput, like: Tensor) -> Tensor:
    """Return what constant heads give to no token: (batch, head, query, 1), 0 of the other heads."""
    share = constant_lack(call).to(like.dtype)
    if constant.gate is not None:
        share = share * (1 - constant.gate[:, None, None])
    return torch.zeros_like(like).index_copy(1, torch.tensor(constant.heads, device=like.device), share)


def _blank_share(call: AttentionCall, constant: ConstantHeadsInput, like: Tensor) -> Tensor:
    """Return the share of rows of zeros in mixtures, which goes nowhere: (batch, head, query), 0 of other heads."""
    if constant.gate is None:
        return torch.zeros_like(like)
    share = (constant_weights(call) == 0).all(-1).to(like.dtype) * (1 - constant.gate[:, None])
    return torch.zeros_like(like).index_copy(1, torch.tensor(constant.heads, device=like.device), share)


def _mixed_distribution(call: AttentionCall, constant: ConstantHeadsInput) -> tuple[Tensor, Tensor]:
    """Return |A| / Σ |A| of a layer whose heads mix attention with constants of both signs, which cancel in some rows.

    What either gives to no key stands beside the weights and is in the sum.
    """
    attention, matrix = replace(call, constant=None), weights(call)
    sees = (log_normalizer(attention) > float("-inf"))[..., None]
    column = (1 - weights(attention).sum(-1, keepdim=True)) * sees * _attention_share(call, matrix)
    column = column + constant_column(call, constant, column)
    columns = proxy_distribution(torch.cat([column, matrix], dim=-1))
    return columns[..., 1:], columns[..., 0]


def distribution(
    call: AttentionCall,
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query"]]:
    """Return the weights that are measured (|A| / Σ|A| if they are no distribution), and each row's share of no key."""
    operation = call.operation
    if operation is None:
        if call.constant is not None and call.constant.signed and call.constant.gate is not None:
            return _mixed_distribution(call, call.constant)
        matrix = weights(call) if call.constant is None else _without_sign(weights(call), call.constant)
        missing = 1 - matrix.sum(-1)
        if call.constant is not None:  # rows of constants may sum to more, or be zero
            missing = (missing - _blank_share(call, call.constant, missing)).clamp(min=0)
        return matrix, missing * (log_normalizer(call) > float("-inf"))
    matrix, column = mixed_weights(call, operation)
    columns = matrix if column is None else torch.cat([column, matrix], dim=-1)
    if operation.function is not None or WEIGHTINGS[operation.weighting].proxy:
        columns = proxy_distribution(columns)
    elif call.constant is not None:
        columns = _without_sign(columns, call.constant)
    return (columns, torch.zeros_like(columns[..., 0])) if column is None else (columns[..., 1:], columns[..., 0])
