"""Softmax operations through PyTorch's fused attention, without a mask of query × key entries.

* A column beside the keys with the score c_i joins the normalizer afterwards: with the log-normalizer L_i of the keys,
  o'_i = σ(L_i − c_i) o_i + σ(c_i − L_i) v*. The fused backward pass gives the right gradients of o' and the new
  normalizer. Only kernels for CPUs allow that; elsewhere the column is a key in front of the others (with a query in
  front of the others, which keeps causality), and its score one more entry of each query.
* A slope is a bias by key alone, as adding slope · i to a row changes nothing.
* A window folds the sequence into blocks of queries, each with its own keys and those before.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.attention.blockwise import blockwise
from regard.attention.call import QKV, AttentionCall, Operation, map_fields, slices
from regard.attention.gradients import first_order, refuse_second_order
from regard.attention.lse_kernels import FLASH_FORWARD

MIN_BLOCK, MAX_BLOCK = 64, 128
"""Fewest queries in a block of a window, and the largest window that is folded."""
ALIGNMENT = 8
"""Fused kernels like widths that are multiples of this."""
FLASH_BACKWARD: Any | None = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def fused(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of a whole causal sequence under a softmax operation, in the dtype of its queries."""
    call, queries, window = replace(call, operation=None), call.query.shape[2], operation.window
    if torch.is_autocast_enabled(call.query.device.type):
        dtype = torch.get_autocast_dtype(call.query.device.type)
        call = map_fields(call, **dict.fromkeys(QKV, lambda tensor: tensor.to(dtype)))
    assert operation.weighting == "softmax", "only softmax goes through the fused kernels"
    assert operation.distance is None, "a bias by distance goes block by block"
    if window is None or window >= queries:
        output = _causal(call, operation)
    else:
        output = _folded(call, window) if window <= MAX_BLOCK else _in_blocks(call, window)
    if operation.prefix:
        prefix = slice(0, min(operation.prefix, queries))
        start = _prefix(call.select_tokens(prefix, prefix), replace(operation, window=None))
        output = torch.cat([start, output[:, :, prefix.stop :]], dim=2)
    if operation.extra_value is not None and operation.extra_key is None:
        output = output + operation.extra_value.to(output.dtype)[:, None]
    return output


def _prefix(call: AttentionCall, operation: Operation) -> Tensor:
    """Return the output of tokens that all see each other."""
    if operation.extra_key is None and call.sink is None and operation.slopes is None:
        return sdpa(call)
    value = operation.extra_value if operation.extra_key is not None else None
    return blockwise(call, replace(operation, extra_value=value))


def _causal(call: AttentionCall, operation: Operation) -> Tensor:
    """Return the output of an operation without window and prefix."""
    column = column_score(call, operation)
    value = operation.extra_value if operation.extra_key is not None else None
    if column is None and operation.slopes is None:
        return sdpa(call, is_causal=True)
    learns_slopes = operation.slopes is not None and operation.slopes.requires_grad and torch.is_grad_enabled()
    if FLASH_FORWARD and FLASH_BACKWARD and call.query.device.type == "cpu" and not learns_slopes:
        return _by_normalizer(call, operation.slopes, column, value)
    if operation.slopes is None and operation.extra_key is not None and _shares_column(call, operation):
        return _with_front_key(call, operation.extra_key, value)
    return _by_entries(call, operation.slopes, column, value)


def column_score(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query"] | None:
    """Return the score of the column beside the keys, without the shift of the operation; in float32 at least."""
    acc_dtype = torch.promote_types(call.query.dtype, torch.float32)
    if operation.extra_key is not None:
        with torch.autocast(call.query.device.type, enabled=False):
            key = operation.extra_key.to(acc_dtype).expand(call.query.shape[1], -1)
            scores = torch.bmm(_rows_by_head(call.query.to(acc_dtype)), key[:, :, None] * call.scale)
            return scores.view(len(key), *call.query.shape[::2]).transpose(0, 1)
    logits = call.sink_logits
    return None if logits is None else (logits.to(acc_dtype) - operation.shift).expand(*call.query.shape[:3])


def _rows_by_head(rows: Float[Tensor, "batch head query width"]) -> Float[Tensor, "head rows width"]:
    """Put the rows of all samples below each other; a view where heads stand beside each other in memory."""
    return rows.transpose(1, 2).reshape(-1, rows.shape[1], rows.shape[-1]).transpose(0, 1)


def sdpa(call: AttentionCall, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Return the output of queries, keys and values by PyTorch's fused attention, with the dropout of the call."""
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.num_key_value_groups > 1}
    return refuse_second_order(
        scaled_dot_product_attention(
            call.query, call.key, call.value, mask, dropout_p=call.dropout, is_causal=is_causal, **options
        )
    )


# -- through the log-normalizer -------------------------------------------------------------------------


class _FlashAttention(torch.autograd.Function):
    """Causal attention with a bias per key and a column, by the fused kernels for CPUs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, bias, column, extra, scale = inputs
        assert FLASH_FORWARD is not None
        output, lse = FLASH_FORWARD(query, key, value, 0.0, True, attn_mask=bias, scale=scale)
        if column is not None:
            share = torch.sigmoid(lse - column)[..., None]
            output.mul_(share)
            if extra is not None:
                output.addcmul_(1 - share, extra[:, None])
            lse = torch.logaddexp(lse, column)
        ctx.save_for_backward(query, key, value, bias, column, extra, output, lse)
        ctx.scale = scale
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert FLASH_BACKWARD is not None
        (grad,) = grads
        query, key, value, bias, column, extra, output, lse = ctx.saved_tensors
        input_grads = FLASH_BACKWARD(grad, query, key, value, output, lse, 0.0, True, attn_mask=bias, scale=ctx.scale)
        if column is None:
            return (*input_grads, None, None, None, None)
        grad, share, extra_grad = grad.to(lse.dtype), (column - lse).exp(), None
        if extra is None:
            column_grad = (grad * output).sum(-1).neg_()
        else:
            column_grad = ((extra[:, None] - output) * grad).sum(-1)
            extra_grad = torch.bmm(share.transpose(0, 1).reshape(len(extra), 1, -1), _rows_by_head(grad))[:, 0]
        return (*input_grads, None, column_grad.mul_(share), extra_grad, None)


def _by_normalizer(call: AttentionCall, slopes: Tensor | None, column: Tensor | None, value: Tensor | None) -> Tensor:
    bias, width, value_width = None, call.query.shape[-1], call.value.shape[-1]
    acc_dtype = torch.promote_types(call.query.dtype, torch.float32)
    if slopes is not None:
        positions = torch.arange(call.query.shape[2], device=slopes.device, dtype=acc_dtype)
        bias = (slopes.to(acc_dtype)[:, None] * positions)[None, :, None]
        column = column if column is None else column + bias[:, :, 0]
    if value is not None:
        value = value.to(acc_dtype).expand(call.query.shape[1], -1)
    query, key, values = call.query, call.key, call.value
    if value_width != width:
        widest = max(width, value_width)
        query, key = pad(query, (0, widest - width)), pad(key, (0, widest - width))
        values = pad(values, (0, widest - value_width))
        value = value if value is None else pad(value, (0, widest - value_width))
    query, key, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, values))
    return _FlashAttention.apply(query, key, values, bias, column, value, call.scale)[..., :value_width]


# -- with a key in front --------------------------------------------------------------------------------


def _shares_column(call: AttentionCall, operation: Operation) -> bool:
    """Return whether heads that share their keys share the column as well."""
    return call.num_key_value_groups == 1 or all(
        tensor is None or len(tensor) == 1 for tensor in (operation.extra_key, operation.extra_value)
    )


def _with_front_key(call: AttentionCall, key: Tensor, value: Tensor | None) -> Tensor:
    """Return the output with one more key for all queries, and one query before them, so that each sees itself."""
    batch, groups, _, _ = call.key.shape
    value = call.value.new_zeros(1, call.value.shape[-1]) if value is None else value
    front = [t[None, :, None].expand(batch, groups, 1, -1).to(call.query.dtype) for t in (key, value)]
    changes: dict[str, Any] = {"query": pad(call.query, (0, 0, 1, 0)), "key": torch.cat([front[0], call.key], dim=2)}
    extended = replace(call, **changes, value=torch.cat([front[1], call.value], dim=2))
    return sdpa(extended, is_causal=True)[:, :, 1:]


def _by_entries(call: AttentionCall, slopes: Tensor | None, column: Tensor | None, value: Tensor | None) -> Tensor:
    """Return the output with biases as products of more entries, split into parts that a 16-bit float can hold."""
    heads, queries = call.query.shape[1:3]
    query_entries, key_entries, front_entries = [], [], []
    positions = torch.arange(queries, device=call.query.device)
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(call.query.dtype, torch.float32))
        for slope in _split_numbers(slopes / call.scale, call.query.dtype):
            for position in _split_positions(positions, call.query.dtype):
                query_entries.append(slope[None, :, None].expand(call.query.shape[:3]))
                key_entries.append(position.expand(call.key.shape[:3]))
                front_entries.append(0.0)
        column = column if column is None else column + slopes[:, None] * positions
    if column is not None:
        for score in _split_numbers(column / call.scale, call.query.dtype):
            query_entries.append(score)
            key_entries.append(call.key.new_zeros(1).expand(call.key.shape[:3]))
            front_entries.append(1.0)
    query, key = (
        _align(torch.cat([t, torch.stack([entry.to(t.dtype) for entry in entries], dim=-1)], dim=-1))
        for t, entries in ((call.query, query_entries), (call.key, key_entries))
    )
    values = pad(call.value, (0, 1)) if value is not None else call.value
    extended = replace(call, query=query, key=key, value=_align(values))
    if column is None:
        return sdpa(extended, is_causal=True)[..., : call.value.shape[-1]]
    front = query.new_tensor(front_entries)
    front = pad(front, (call.query.shape[-1], query.shape[-1] - call.query.shape[-1] - len(front_entries)))
    mark = values.new_zeros(values.shape[-1])
    if value is not None:
        mark[-1] = 1
    output = _with_front_key(extended, front[None], _align(mark)[None])
    if value is None:
        return output[..., : call.value.shape[-1]]
    width = call.value.shape[-1]
    return output[..., :width] + output[..., width : width + 1] * value.to(output.dtype).expand(heads, -1)[:, None]


def _split_numbers(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return numbers of a dtype that add up to those of a wider one: three of 16 bits, or one."""
    if dtype == x.dtype:
        return [x]
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(x.dtype)
    return parts


def _split_positions(positions: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return numbers that add up to positions, each exact in the dtype."""
    if dtype in (torch.float32, torch.float64):
        return [positions.to(dtype)]
    return [(positions // 256 * 256).to(dtype), (positions % 256).to(dtype)]


def _align(x: Tensor) -> Tensor:
    """Pad the last axis with zeros to a width that kernels like."""
    return pad(x, (0, -x.shape[-1] % ALIGNMENT))


# -- a window -------------------------------------------------------------------------------------------


def _folded(call: AttentionCall, window: int) -> Tensor:
    """Compute blocks of queries as samples, each with the keys of its block and of the one before."""
    batch, _, queries, _ = call.query.shape
    size = min(max(window, MIN_BLOCK), queries)
    band = _band(size, size, window, call.query.device)
    first_block = slice(0, size)
    output = sdpa(call.select_tokens(first_block, first_block), band[:, size:])
    count = -(-queries // size)
    if count == 1:
        return output
    query, key, value = (
        pad(t, (0, 0, 0, count * size - queries)).unflatten(2, (count, size)).transpose(1, 2)
        for t in (call.query, call.key, call.value)
    )
    pairs = [torch.cat([t[:, :-1], t[:, 1:]], dim=3).flatten(0, 1) for t in (key, value)]
    rest = sdpa(replace(call, query=query[:, 1:].flatten(0, 1), key=pairs[0], value=pairs[1]), band)
    rest = rest.unflatten(0, (batch, count - 1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([output, rest[:, :, : queries - size]], dim=2)


def _in_blocks(call: AttentionCall, window: int) -> Tensor:
    """Compute block after block of queries, each with the keys that it sees."""
    queries, size = call.query.shape[2], MIN_BLOCK * 2
    band = _band(size, window - 1, window, call.query.device)
    outputs = []
    for rows in slices(queries, size):
        keys = slice(max(rows.start - window + 1, 0), rows.stop)
        stop = window - 1 + rows.stop - rows.start
        mask = band[: rows.stop - rows.start, stop - (keys.stop - keys.start) : stop]
        outputs.append(sdpa(call.select_tokens(rows, keys), mask))
    return torch.cat(outputs, dim=2)


def _band(queries: int, before: int, window: int, device: torch.device) -> Tensor:
    """Return which keys a block of queries sees: its own, which stand last, and so many before them."""
    distance = torch.arange(queries, device=device)[:, None] + before - torch.arange(before + queries, device=device)
    return (distance >= 0) & (distance < window)
