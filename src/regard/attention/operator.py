"""Attention with statistics: the one function behind the slot. Which form runs is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.attention import kernels, reference
from regard.attention.blockwise import blockwise, reduce_by_rows, to_acc_dtype
from regard.attention.call import PER_KEY, AttentionCall, Operation, ReductionRequest, run, visible
from regard.attention.chunked import chunked
from regard.attention.constant import constant_output
from regard.attention.flex import flex, flex_serves
from regard.attention.fused import fused
from regard.attention.onepass import one_pass
from regard.attention.pointwise import pointwise
from regard.attention.rowwise import rowwise
from regard.attention.spectrum import spectral_bound
from regard.attention.tiles import LOG2_E

ROWS_BY_KERNEL = frozenset({"lse", "first_mass", "entropy", "distance", "row_sum", "virtual_sink_mass"})
FORMS: dict[str, Callable[[AttentionCall, Operation], Tensor]] = {
    "materialised": reference.operate,
    "blockwise": blockwise,
    "pointwise": pointwise,
    "rowwise": rowwise,
    "chunked": chunked,
    "fused": fused,
    "flex": flex,
}


def attend(call: AttentionCall, wanted: ReductionRequest) -> tuple[Tensor, dict[str, Tensor]]:
    """The output (batch, head, query, value_width) and the wanted reductions of the weights, by name.

    Reductions are float32 (float64 for float64 inputs): per key (batch, head, key), per query (batch, head, query[,
    first]), per sample (batch, head), or, for `weights`, summed over the unpadded samples (head, query, key). None is
    differentiable. The output is, carries the dropout of the call, and has its dtype.
    """
    if call.constant is not None:
        found = reference.reduce(to_acc_dtype(_biased(call).detached()), wanted) if wanted.names else {}
        return partly_constant(call), found
    call, added = simplified(call)
    if added is not None:
        bare, found = attend(call, wanted)
        return bare + added.to(bare.dtype), found
    graph = torch.is_grad_enabled() and call.differentiable
    if not wanted.names or call.dropout or graph or call.operation is not None:
        output = plain_output(call)
        return output, reduce(call, wanted)
    if fused_lse_serves(call, wanted):
        return _with_lse(call, wanted)
    if call.query.is_cuda:
        return plain_output(call), reduce(call, wanted)
    result, reductions = _reductions(call, wanted, output=True)
    assert result is not None
    return result.to(call.query.dtype), reductions


@torch.no_grad()
def reduce(call: AttentionCall, wanted: ReductionRequest) -> dict[str, Tensor]:
    """The wanted reductions alone."""
    if not wanted.names:
        return {}
    return _reductions(call.detached(), wanted, output=False)[1]


def plain_output(call: AttentionCall) -> Tensor:
    """The output alone, through PyTorch's fused attention where that can express the call."""
    call, added = simplified(call)
    if added is not None:
        bare = plain_output(call)
        return bare + added.to(bare.dtype)
    if call.operation is not None:
        return FORMS[form_of(call, call.operation)](call, call.operation)
    if call.softcap is None and call.sink is None:
        return _fused(call)
    if _unbroken(call):
        return fused(call, Operation())
    if (torch.is_grad_enabled() and call.differentiable) or call.dropout:
        return blockwise(call, Operation())
    output, _ = one_pass(to_acc_dtype(call), ReductionRequest(), output=True)
    assert output is not None
    return output.to(call.query.dtype)


def simplified(call: AttentionCall) -> tuple[AttentionCall, Tensor | None]:
    """The call, without an operation where that is softmax and no more, and what is added to its output beside."""
    operation = call.operation
    if operation is None:
        return call, None
    added = None
    if operation.extra_value is not None and operation.extra_key is None:
        added = operation.extra_value[:, None]
        operation = replace(operation, extra_value=None)
    queries, reach = call.query.shape[2], call.offset + call.query.shape[2]
    whole = call.causal and call.offset == 0 and queries == call.key.shape[2]
    if operation.window is not None and operation.window >= reach and (whole or not operation.prefix):
        operation = replace(operation, window=None)
    if replace(operation, form="") == Operation(form=""):
        return replace(call, operation=None), added
    return replace(call, operation=operation), added


def form_of(call: AttentionCall, operation: Operation) -> str:
    """How the output of a call is computed: as its operation says for a whole sequence, on CUDA by FlexAttention.

    That replaces tiles, and the blocks of what else it can do.
    """
    if operation.form == "materialised":
        return "materialised"
    if not _unbroken(call):
        return "blockwise"
    if operation.form in ("pointwise", "rowwise", "blockwise", "flex"):
        if flex_serves(call, operation):
            return "flex"
        return "blockwise" if operation.form == "flex" else operation.form
    return operation.form


def _unbroken(call: AttentionCall) -> bool:
    """Whether a call is a sequence from its first token to its last, causal, with nothing that hides or shifts more."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    masked = call.keep is not None or call.bias is not None or call.key_mask is not None or call.softcap is not None
    return call.causal and call.offset == 0 and queries == keys > 1 and not masked and not call.dropout


def partly_constant(call: AttentionCall) -> Tensor:
    """The output where some heads are constant: their C·V beside the attention of the others, or mixed with it."""
    assert call.constant is not None
    constant = call.constant
    fixed = constant_output(call)
    heads = list(constant.heads)
    if constant.gate is not None:
        free = plain_output(replace(call, constant=None)).transpose(1, 2)
        gate = constant.gate.to(free.dtype)[:, None]
        fixed = gate * free[:, :, heads] + (1 - gate) * fixed
        if len(heads) == free.shape[2]:
            return fixed.transpose(1, 2)
        return free.index_copy(2, torch.tensor(heads, device=free.device), fixed).transpose(1, 2)
    others = [head for head in range(call.query.shape[1]) if head not in set(heads)]
    if not others:
        return fixed.transpose(1, 2)
    free = plain_output(call.of_heads(others)).transpose(1, 2)
    if torch.is_grad_enabled() and (free.requires_grad or fixed.requires_grad):
        back = torch.tensor([*others, *heads], device=free.device).argsort()
        return torch.cat([free, fixed], dim=2).index_select(2, back).transpose(1, 2)
    room = free.new_empty(*free.shape[:2], len(heads) + len(others), free.shape[-1])
    for part, numbers in ((free, others), (fixed, heads)):
        room[:, :, run(numbers)] = part
    return room.transpose(1, 2)


def _biased(call: AttentionCall) -> AttentionCall:
    """The call with a bias for every head, where that of constant ones was left away."""
    bias, heads = call.bias, call.query.shape[1]
    if bias is None or call.constant is None or bias.shape[1] in (1, heads):
        return call
    others = [head for head in range(heads) if head not in set(call.constant.heads)]
    whole = bias.new_zeros(bias.shape[0], heads, *bias.shape[2:])
    return replace(call, bias=whole.index_copy(1, torch.tensor(others, device=bias.device), bias))


def _reductions(
    call: AttentionCall, wanted: ReductionRequest, *, output: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    call, _ = simplified(call)
    if call.operation is not None:
        return None, reduce_by_rows(call, wanted)
    full = to_acc_dtype(call)
    found: dict[str, Tensor] = {}
    if "spectral_bound" in wanted.names:
        found["spectral_bound"] = spectral_bound(full, wanted.iterations)
    rest = replace(wanted, names=wanted.names.difference(found))
    if kernels_serve(call, rest):
        return None, found | _by_kernels(call, rest)
    result = None
    if rest.names or output:
        result, more = one_pass(full, rest, output=output)
        found |= more
    return result, found


def _fused(call: AttentionCall) -> Tensor:
    mask = _mask(call)
    simple = mask is None and call.causal and call.offset == 0 and call.query.shape[2] > 1
    if mask is None and call.causal and not simple:
        mask = visible(call)
    return torch.nn.functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=None if simple else mask,
        dropout_p=call.dropout,
        is_causal=simple,
        scale=call.scale,
        enable_gqa=call.num_key_value_groups > 1,
    )


def _mask(call: AttentionCall) -> Tensor | None:
    """Everything that hides or shifts a score, as one mask for the fused call; None where causality is all there is."""
    see = call.keep
    if call.key_mask is not None:
        padding = call.key_mask[:, None, None, :]
        see = padding if see is None else see & padding
    if call.causal and (see is not None or call.bias is not None):
        future = visible(replace(call, keep=None, key_mask=None))
        see = future if see is None else see & future
    if call.bias is None:
        return see
    bias = call.bias.to(call.query.dtype)
    return bias if see is None else bias.masked_fill(~see, torch.finfo(bias.dtype).min)


def fused_lse_serves(call: AttentionCall, wanted: ReductionRequest) -> bool:
    """Whether the fused CPU kernel's own log-sum-exp is enough: attention to the first keys needs nothing else."""
    return (
        wanted.names <= {"first_mass", "lse"}
        and call.plain
        and call.query.device.type == "cpu"
        and all(t.stride(-1) == 1 for t in (call.query, call.key, call.value))
        and call.value.shape[-1] == call.query.shape[-1]
        and call.query.dtype in (torch.float32, torch.float64)
        and (not call.causal or call.offset == 0)
        and FUSED_CPU is not None
    )


def _fused_cpu() -> Any | None:
    """PyTorch's flash attention for CPUs as an operator that returns the log-sum-exp, where this release has it."""
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


FUSED_CPU = _fused_cpu()


def _with_lse(call: AttentionCall, wanted: ReductionRequest) -> tuple[Tensor, dict[str, Tensor]]:
    assert FUSED_CPU is not None
    padding = None
    if call.key_mask is not None:
        padding = call.query.new_zeros(call.key_mask.shape).masked_fill_(~call.key_mask, -torch.inf)[:, None, None, :]
    output, lse = FUSED_CPU(call.query, call.key, call.value, 0.0, call.causal, attn_mask=padding, scale=call.scale)
    if call.key_mask is not None:
        lse = lse.masked_fill(_blind(call, call.key_mask), -torch.inf)
    found = {"lse": lse} if "lse" in wanted.names else {}
    if "first_mass" in wanted.names:
        found["first_mass"] = _first_mass(call, lse, wanted.first)
    return output, found


def _blind(call: AttentionCall, key_mask: Tensor) -> Tensor:
    """Which queries see no real key, (batch, 1, query or 1): the fused kernel reports a log-sum-exp of 0 for them."""
    seen = key_mask.cumsum(-1) > 0
    if not call.causal:
        return ~seen[:, None, -1:]
    last = torch.arange(call.query.shape[2], device=key_mask.device).clamp(max=key_mask.shape[1] - 1)
    return ~seen[:, None, last]


def _first_mass(call: AttentionCall, lse: Tensor, first: int) -> Tensor:
    """exp(s_ij − lse_i) for the first keys j: as many products a query as there are keys asked for.

    Computed with the keys as rows, in base 2: half the time of the more obvious order.
    """
    key, where = _first_keys(call, first)
    key = key.repeat_interleave(call.num_key_value_groups, 1) if call.num_key_value_groups > 1 else key
    mass = lse.new_empty(*lse.shape[:2], first, lse.shape[2])
    for q, k, row, out in zip(call.query.mT, key, lse[:, :, None], mass, strict=True):
        torch.baddbmm(row, k.to(lse.dtype), q.to(lse.dtype), beta=-LOG2_E, alpha=call.scale * LOG2_E, out=out)
    mass = mass.exp2_().mT
    keys = call.key.shape[2]
    if call.key_mask is not None:
        real = call.key_mask.gather(1, where.clamp(0, keys - 1).expand(lse.shape[0], -1))
        mass.masked_fill_(~(real[:, None, None] & (lse != -torch.inf)[..., None]), 0.0)
    if call.starts or first > keys:
        mass.masked_fill_(((where < 0) | (where >= keys))[:, None, None], 0.0)
    if call.causal:
        early = max(max(call.starts or (0,)) + first - call.offset, 0)
        positions = torch.arange(min(early, lse.shape[2]), device=lse.device)[:, None] + call.offset
        mass[:, :, :early].masked_fill_(positions < where[:, None, None], 0.0)
    return mass


def _first_keys(call: AttentionCall, first: int) -> tuple[Tensor, Tensor]:
    """The first keys of each sample, (batch, group, first, width), and where they stand, (batch or 1, first)."""
    groups, keys, width = call.key.shape[1:]
    where = torch.arange(first, device=call.key.device)[None]
    if not any(call.starts or ()) and first <= keys:
        return call.key[:, :, :first], where
    if call.starts:
        where = where + torch.tensor(call.starts, device=call.key.device)[:, None]
    inside = where.clamp(0, keys - 1)[:, None, :, None].expand(call.key.shape[0], groups, -1, width)
    return call.key.gather(2, inside), where


def kernels_serve(call: AttentionCall, wanted: ReductionRequest) -> bool:
    """Whether the GPU kernels can take everything that is wanted."""
    return (
        call.query.is_cuda
        and call.query.dtype in kernels.DTYPES
        and kernels.available()
        and call.keep is None
        and call.bias is None
        and bool(wanted.names)
        and wanted.names <= ROWS_BY_KERNEL | PER_KEY
        and (call.sink is None or not wanted.names & {"row_sum", "virtual_sink_mass"})
        and (call.softcap is None or "first_mass" not in wanted.names)
    )


def _by_kernels(call: AttentionCall, wanted: ReductionRequest) -> dict[str, Tensor]:
    shared: dict[str, Any] = {
        "scale": call.scale,
        "causal": call.causal,
        "offset": call.offset,
        "key_mask": call.key_mask,
        "softcap": call.softcap,
    }
    names = wanted.names
    rows = kernels.row_statistics(call.query, call.key, sink=call.sink, distance="distance" in names, **shared)
    sees = rows.lse != torch.inf
    lse = rows.lse.masked_fill(~sees, -torch.inf)
    found: dict[str, Tensor | None] = {"entropy": rows.entropy, "distance": rows.distance, "lse": lse}
    found |= {"row_sum": sees.to(rows.lse.dtype), "virtual_sink_mass": torch.zeros_like(rows.lse)}
    if "first_mass" in names:
        found["first_mass"] = _first_mass(call, lse, wanted.first)
    if names & PER_KEY:
        mass, square = kernels.column_statistics(
            call.query, call.key, rows.lse, query_mask=call.query_mask, square="column_square" in names, **shared
        )
        found |= {"column_mass": mass, "column_square": square}
    return {name: tensor for name, tensor in found.items() if name in names and tensor is not None}
