"""Softmax operations through PyTorch's fused attention, without a mask of query × key entries.

Three devices do it. A column beside the keys that has the score c_i joins the normaliser after the fact: with the
log-normaliser L_i of the keys, o'_i = σ(L_i − c_i) o_i + σ(c_i − L_i) v*; and the fused backward pass, given o' and the
new normaliser, yields the right gradients as it stands. It is there on CPUs; elsewhere the column is a key in front of
the others, with a query in front of the others so that causality is kept, and its score an entry more in each query.
A slope is a bias that depends on the key alone, as adding slope · i to a row changes nothing. A window folds the
sequence into blocks of queries, each with its own keys and those before them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.attention.blockwise import blockwise
from regard.attention.call import AttentionCall, Operation

LEAST_BLOCK, LARGEST_BLOCK = 64, 128
"""Queries in a block of a window: at least so many; windows larger than the last go block by block, unfolded."""
ALIGNED = 8
"""Widths that fused kernels like are multiples of this."""


def fused(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """The output of a whole causal sequence under a softmax operation, in the dtype of its queries."""
    call, operation = _autocast(replace(call, operation=None)), _without_idle(call, operation)
    assert operation.weighting == "softmax", "only softmax goes through the fused kernels"
    assert operation.distance is None, "a table of distances goes block by block"
    window = operation.window
    output = _causal(call, operation) if window is None else _windowed(call, window)
    if operation.prefix:
        output = torch.cat([_of_prefix(call, operation), output[:, :, operation.prefix :]], dim=2)
    if operation.extra_value is not None and operation.extra_key is None:
        output = output + operation.extra_value.to(output.dtype)[:, None]
    return output


def _autocast(call: AttentionCall) -> AttentionCall:
    """The call in the dtype that autocast gives to fused attention."""
    kind = call.query.device.type
    if not torch.is_autocast_enabled(kind):
        return call
    dtype = torch.get_autocast_dtype(kind)
    return replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))


def _without_idle(call: AttentionCall, operation: Operation) -> Operation:
    """The operation without a window that hides nothing, and with a prefix no longer than the sequence."""
    queries, window = call.query.shape[2], operation.window
    idle = window is not None and window >= queries
    return replace(operation, window=None if idle else window, prefix=min(operation.prefix, queries))


def _of_prefix(call: AttentionCall, operation: Operation) -> Tensor:
    """The output of the first tokens, which see each other."""
    cut = {name: getattr(call, name)[:, :, : operation.prefix] for name in ("query", "key", "value")}
    value = operation.extra_value if operation.extra_key is not None else None
    return blockwise(replace(call, **cut), replace(operation, extra_value=value))


def _causal(call: AttentionCall, operation: Operation) -> Tensor:
    """The output without window and prefix."""
    column = column_score(call, operation)
    value = operation.extra_value if operation.extra_key is not None else None
    if column is None and operation.slopes is None:
        return _plain(call)
    learned_slopes = operation.slopes is not None and operation.slopes.requires_grad and torch.is_grad_enabled()
    if FLASH is not None and call.query.device.type == "cpu" and not learned_slopes:
        return _by_normaliser(call, operation.slopes, column, value)
    if operation.slopes is None and operation.extra_key is not None and _same_for_groups(call, operation):
        return _in_front(call, operation.extra_key, value)
    return _by_entries(call, operation.slopes, column, value)


def column_score(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query"] | None:
    """The score of the column beside the keys in float32 at least, less what the operation adds to every key's."""
    wide = torch.promote_types(call.query.dtype, torch.float32)
    if operation.extra_key is not None:
        with torch.autocast(call.query.device.type, enabled=False):
            key = operation.extra_key.to(wide).expand(call.query.shape[1], -1)
            return (call.query.to(wide) @ key[:, :, None])[..., 0] * call.scale
    if call.sink is not None:
        return (call.sink.to(wide) - operation.shift)[:, None].expand(*call.query.shape[:3])
    return None


def _plain(call: AttentionCall) -> Tensor:
    return scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=call.num_key_value_groups > 1
    )


# -- through the log-normaliser -------------------------------------------------------------------------


class _Flash(torch.autograd.Function):
    """Causal attention with a bias per key and a column, by the fused kernels for CPUs."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        column: Tensor | None,
        extra: Tensor | None,
        scale: float,
    ) -> Tensor:
        assert FLASH is not None
        output, lse = FLASH[0](query, key, value, 0.0, True, attn_mask=bias, scale=scale)
        if column is not None:
            share = torch.sigmoid(lse - column)[..., None]
            output = output * share.to(output.dtype)
            if extra is not None:
                output = output + ((1 - share) * extra[:, None]).to(output.dtype)
            lse = torch.logaddexp(lse, column)
        ctx.save_for_backward(query, key, value, bias, column, extra, output, lse)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        assert FLASH is not None
        (gradient,) = gradients
        query, key, value, bias, column, extra, output, lse = ctx.saved_tensors
        parts = FLASH[1](gradient, query, key, value, output, lse, 0.0, True, attn_mask=bias, scale=ctx.scale)
        if column is None:
            return (*parts, None, None, None, None)
        share = (column - lse).exp()
        slope = -(gradient.to(lse.dtype) * output).sum(-1)
        more = None
        if extra is not None:
            slope = slope + (gradient.to(lse.dtype) @ extra[:, :, None])[..., 0]
            more = (share[..., None, :] @ gradient.to(lse.dtype))[..., 0, :].sum(0)
        return (*parts, None, share * slope, more, None)


def _by_normaliser(call: AttentionCall, slopes: Tensor | None, column: Tensor | None, value: Tensor | None) -> Tensor:
    bias, width, value_width = None, call.query.shape[-1], call.value.shape[-1]
    wide = torch.promote_types(call.query.dtype, torch.float32)
    if slopes is not None:
        at = torch.arange(call.query.shape[2], device=slopes.device, dtype=wide)
        bias = (slopes.to(wide)[:, None] * at)[None, :, None]
        column = column if column is None else column + bias[:, :, 0]
    if value is not None:
        value = value.to(wide).expand(call.query.shape[1], -1)
    query, key, values = call.query, call.key, call.value
    if value_width != width:
        most = max(width, value_width)
        query, key = pad(query, (0, most - width)), pad(key, (0, most - width))
        values = pad(values, (0, most - value_width))
        value = value if value is None else pad(value, (0, most - value_width))
    query, key, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, values))
    return _Flash.apply(query, key, values, bias, column, value, call.scale)[..., :value_width]


def _flash() -> tuple[Any, Any] | None:
    """PyTorch's flash attention for CPUs and its backward pass, as operators, where this release has them."""
    both = [
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{part}", None)
        for part in ("", "_backward")
    ]
    return (both[0], both[1]) if all(both) else None


FLASH = _flash()


# -- with a key in front --------------------------------------------------------------------------------


def _same_for_groups(call: AttentionCall, operation: Operation) -> bool:
    """Whether heads that share their keys share the column as well."""
    return call.num_key_value_groups == 1 or all(
        tensor is None or len(tensor) == 1 for tensor in (operation.extra_key, operation.extra_value)
    )


def _in_front(call: AttentionCall, key: Tensor, value: Tensor | None) -> Tensor:
    """The output with one more key for all queries, and one query for it, so that each still sees itself."""
    batch, groups, _, _ = call.key.shape
    value = call.value.new_zeros(1, call.value.shape[-1]) if value is None else value
    front = [t[None, :, None].expand(batch, groups, 1, -1).to(call.query.dtype) for t in (key, value)]
    parts: dict[str, Any] = {"query": pad(call.query, (0, 0, 1, 0)), "key": torch.cat([front[0], call.key], dim=2)}
    return _plain(replace(call, **parts, value=torch.cat([front[1], call.value], dim=2)))[:, :, 1:]


def _by_entries(call: AttentionCall, slopes: Tensor | None, column: Tensor | None, value: Tensor | None) -> Tensor:
    """The output with biases as products of more entries of queries and keys.

    Entries that a 16-bit float cannot hold are cut into parts that it can.
    """
    heads, queries = call.query.shape[1:3]
    query_entries, key_entries, front_entries = [], [], []
    at = torch.arange(queries, device=call.query.device)
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(call.query.dtype, torch.float32))
        for part in _parts(slopes / call.scale, call.query.dtype):
            for place in _places(at, call.query.dtype):
                query_entries.append(part[None, :, None].expand(call.query.shape[:3]))
                key_entries.append(place.expand(call.key.shape[:3]))
                front_entries.append(0.0)
        column = column if column is None else column + slopes[:, None] * at
    if column is not None:
        for part in _parts(column / call.scale, call.query.dtype):
            query_entries.append(part)
            key_entries.append(call.key.new_zeros(1).expand(call.key.shape[:3]))
            front_entries.append(1.0)
    query, key = (_widened(t, e) for t, e in ((call.query, query_entries), (call.key, key_entries)))
    values = pad(call.value, (0, 1)) if value is not None else call.value
    more = replace(call, query=query, key=key, value=_even(values))
    if column is None:
        return _plain(more)[..., : call.value.shape[-1]]
    front = query.new_tensor(front_entries)
    front = pad(front, (call.query.shape[-1], query.shape[-1] - call.query.shape[-1] - len(front_entries)))
    mark = values.new_zeros(values.shape[-1])
    if value is not None:
        mark[-1] = 1
    output = _in_front(more, front[None], _even(mark)[None])
    if value is None:
        return output[..., : call.value.shape[-1]]
    width = call.value.shape[-1]
    share = output[..., width : width + 1]
    return output[..., :width] + share * value.to(output.dtype).expand(heads, -1)[:, None]


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a dtype that add up to those of a wider one: three of 16 bits, or one."""
    if dtype == x.dtype:
        return [x]
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(x.dtype)
    return parts


def _places(at: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Positions as numbers that add up to them, each exact in its dtype."""
    if dtype in (torch.float32, torch.float64):
        return [at.to(dtype)]
    return [(at // 256 * 256).to(dtype), (at % 256).to(dtype)]


def _widened(x: Tensor, entries: list[Tensor]) -> Tensor:
    return _even(torch.cat([x, torch.stack([e.to(x.dtype) for e in entries], dim=-1)], dim=-1))


def _even(x: Tensor) -> Tensor:
    """The tensor with zeros behind its last axis, up to a width that kernels like."""
    return pad(x, (0, -x.shape[-1] % ALIGNED))


# -- a window -------------------------------------------------------------------------------------------


def _windowed(call: AttentionCall, window: int) -> Tensor:
    """The output where each query sees the last keys alone; sequences are longer than their window."""
    return _folded(call, window) if window <= LARGEST_BLOCK else _in_blocks(call, window)


def _folded(call: AttentionCall, window: int) -> Tensor:
    """Blocks of queries as so many samples, each with the keys of its own block and of the one before."""
    batch, _, queries, _ = call.query.shape
    size = min(max(window, LEAST_BLOCK), queries)
    band = _band(size, size, window, call.query.device)
    first = {name: getattr(call, name)[:, :, :size] for name in ("query", "key", "value")}
    output = _masked(replace(call, **first), band[:, size:])
    count = -(-queries // size)
    if count == 1:
        return output
    query, key, value = (
        pad(t, (0, 0, 0, count * size - queries)).unflatten(2, (count, size)).transpose(1, 2)
        for t in (call.query, call.key, call.value)
    )
    both = [torch.cat([t[:, :-1], t[:, 1:]], dim=3).flatten(0, 1) for t in (key, value)]
    rest = _masked(replace(call, query=query[:, 1:].flatten(0, 1), key=both[0], value=both[1]), band)
    rest = rest.unflatten(0, (batch, count - 1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([output, rest[:, :, : queries - size]], dim=2)


def _in_blocks(call: AttentionCall, window: int) -> Tensor:
    """Block after block of queries, each with the keys that it sees."""
    queries, size = call.query.shape[2], LEAST_BLOCK * 2
    band = _band(size, window - 1, window, call.query.device)
    found = []
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        seen = slice(max(rows.start - window + 1, 0), rows.stop)
        part: dict[str, Any] = {
            "query": call.query[:, :, rows],
            "key": call.key[:, :, seen],
            "value": call.value[:, :, seen],
        }
        stop = window - 1 + rows.stop - rows.start
        mask = band[: rows.stop - rows.start, stop - (seen.stop - seen.start) : stop]
        found.append(_masked(replace(call, **part), mask))
    return torch.cat(found, dim=2)


def _band(queries: int, before: int, window: int, device: torch.device) -> Tensor:
    """Which keys a block of queries sees: its own, which stand last, and so many before them."""
    gap = torch.arange(queries, device=device)[:, None] + before - torch.arange(before + queries, device=device)
    return (gap >= 0) & (gap < window)


def _masked(call: AttentionCall, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=mask, scale=call.scale, enable_gqa=call.num_key_value_groups > 1
    )
