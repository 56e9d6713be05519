"""Softmax attention with any mask, soft cap and sink, whose backward pass computes the tiles of the matrix again.

Of a forward pass the output is kept, no query × key entries. With weights a_ij of a tile, the gradient g_i of an output
and D_i = g_i·o_i, the gradient of a score is a_ij (g_i·v_j − D_i), and that of a sink's logit −a_i D_i.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from regard.attention.call import QKV, AttentionCall
from regard.attention.gradients import first_order
from regard.attention.one_token import EXACT
from regard.attention.onepass import one_pass
from regard.attention.reduction import ReductionRequest
from regard.attention.spans import key_spans, union
from regard.attention.tiles import LOG2_E, Tile, max_rows, sink_scores, tiles
from regard.attention.tracing import has_transforms, is_mapped, is_traced

MASKS = ("keep", "bias", "key_mask")
OPTIONS = ("scale", "causal", "offset", "softcap")
MOST_SEEN = 0.5
"""Tiles are quicker than PyTorch's attention if the ranges that a mask shows are at most this share of the matrix."""


def supports_retiled(call: AttentionCall) -> bool:
    """Return whether a call of softmax is on a CPU, of plain tensors; elsewhere nobody has measured it."""
    if call.dropout or not is_plain_on_cpu(call):
        return False
    return call.bias is None or not (call.bias.requires_grad or call.softcap is not None)


def is_plain_on_cpu(call: AttentionCall) -> bool:
    """Return whether a call has tensors of PyTorch's own on a CPU, none empty, in no graph and no transform."""
    if call.query.device.type != "cpu" or is_traced() or has_transforms():
        return False
    tensors = [tensor for name in (*QKV, *MASKS, "sink") if (tensor := getattr(call, name)) is not None]
    return 0 not in (*call.query.shape, *call.value.shape) and all(type(t) in (Tensor, Parameter) for t in tensors)


def is_mostly_hidden(call: AttentionCall) -> bool:
    """Return whether a mask hides so many keys from whole blocks of queries that tiles without them are quicker.

    That is measured in full precision alone (`python -m benchmarks.attention_function`, `attention_backend`).
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.keep is None or call.query.dtype not in EXACT or not supports_retiled(call):
        return False
    num_rows = min(queries, max_rows(call))
    if num_rows == queries or torch.is_autocast_enabled("cpu") or (spans := key_spans(call, num_rows)) is None:
        return False
    seen = [union(block) for block in spans]
    return sum(span.stop - span.start for span in seen) <= MOST_SEEN * len(seen) * keys


def retiled(call: AttentionCall) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of a call, in the dtype of its queries; computed in float32 at least."""
    with torch.autocast(call.query.device.type, enabled=False):
        wide = call.to_acc_dtype()
        sink = None if wide.sink is None else wide.sink.to(wide.query.dtype)
        masks = {name: _savable(getattr(wide, name)) for name in MASKS}
        options = {name: getattr(wide, name) for name in OPTIONS}
        output: Tensor = _Retiled.apply(wide.query, wide.key, wide.value, sink, options, *masks.values())
        return output.to(call.query.dtype)


def _savable(mask: Tensor | None) -> Tensor | None:
    """Return a mask that may be kept for a backward pass, as one of inference mode may not."""
    return mask.clone() if mask is not None and mask.is_inference() else mask


class _Retiled(torch.autograd.Function):
    """The output of queries, keys, values and logits of a sink, under options and masks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        call = _make_call(*inputs)
        output, _ = one_pass(call, ReductionRequest(), output=True)
        assert output is not None
        query, key, value, sink, ctx.options, *masks = inputs
        ctx.save_for_backward(query, key, value, sink, *masks, output)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, *masks, output = ctx.saved_tensors
        call = _make_call(query, key, value, sink, ctx.options, *masks)
        less = (grad * output).sum(-1, keepdim=True)
        grads = _zeros(query, grad), _zeros(key, grad), _zeros(value, grad)
        sink_grad = None if sink is None else torch.zeros_like(less)
        with torch.autocast(grad.device.type, enabled=False):
            for tile in tiles(call):
                if sink is not None and sink_grad is not None:
                    shares = torch.exp2(sink_scores(sink, tile.at_queries, sink.dtype) - tile.base) / tile.total
                    sink_grad[tile.at_queries] = -shares * less[tile.at_queries]
                _add_gradients(call, tile, grad, less, grads)
        if sink is not None and sink_grad is not None:
            sink_grad = sink_grad.sum((0, 2, 3)) if sink.ndim == 1 else sink_grad[..., 0]
        return (*grads, sink_grad, None, *(None for _ in masks))


def _zeros(like: Tensor, grad: Tensor) -> Tensor:
    """Return zeros in the shape of a tensor, for each of the gradients that a map hands over as one."""
    return grad.new_zeros(like.shape) if is_mapped(grad) else torch.zeros_like(like)


def _make_call(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, options: dict[str, Any], *masks: Tensor | None
) -> AttentionCall:
    fields: dict[str, Any] = {**options, **dict(zip(MASKS, masks, strict=True))}
    return AttentionCall(query=query, key=key, value=value, sink=sink, **fields)


def _add_gradients(
    call: AttentionCall, tile: Tile, grad: Tensor, less: Tensor, grads: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add a tile's part of the gradients of queries, keys and values. Overwrites the tile."""
    per_group = call.num_key_value_groups
    groups = slice(tile.heads.start // per_group, tile.heads.stop // per_group)
    at_keys = tile.samples, groups, tile.keys
    query_grad, key_grad, value_grad = grads
    weights = _by_group(tile.exps.div_(tile.total), per_group)
    query, grad, less = (_by_group(rows[tile.at_queries], per_group) for rows in (call.query, grad, less))
    key, value = (keys[at_keys].flatten(0, 1) for keys in (call.key, call.value))
    value_grad[at_keys] += torch.bmm(weights.mT, grad).view(value_grad[at_keys].shape)
    score_grad = torch.bmm(grad, value.mT).sub_(less).mul_(weights)
    if call.softcap is not None:  # tanh(x)' = 1 − tanh(x)², where −1 stands for pairs that are hidden
        capped = tile.scores.add_(tile.base).div_(call.softcap * LOG2_E).clamp_(min=-1.0)
        score_grad.mul_(_by_group(capped.square_().neg_().add_(1.0), per_group))
    score_grad.mul_(call.scale)
    query_grad[tile.at_queries] = torch.bmm(score_grad, key).view(query_grad[tile.at_queries].shape)
    key_grad[at_keys] += torch.bmm(score_grad.mT, query).view(key_grad[at_keys].shape)


def _by_group(rows: Tensor, per_group: int) -> Tensor:
    """Put the rows of heads that share keys below each other: (sample and group, row, width)."""
    return rows.reshape(-1, per_group * rows.shape[2], rows.shape[3])
