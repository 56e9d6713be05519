"""The attention operator: which backend computes the output of a call, and which its reductions."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import float64, kernels, reference
from regard.attention.blockwise import blockwise, reduce_by_rows
from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation, as_slice, visible_mask
from regard.attention.chunked import chunked
from regard.attention.constant import constant_output, row_weights
from regard.attention.flex import flex, supports_flex
from regard.attention.fused import fused, sdpa
from regard.attention.gradients import no_grad
from regard.attention.lse import ROWS_WITH_WEIGHTS, attend_with_lse, first_mass, output_and_lse, supports_lse
from regard.attention.lse_kernels import select_kernel
from regard.attention.one_token import EXACT, attend_beside_rows
from regard.attention.onepass import one_pass
from regard.attention.recomputed import recomputed
from regard.attention.reduction import BY_POSITION, ReductionRequest, reduce_dense
from regard.attention.retiled import is_mostly_hidden, retiled, supports_retiled
from regard.attention.single_query import single_query, supports_single_query
from regard.attention.sparse import sparse, supports_sparse
from regard.attention.spectral import spectral_bound
from regard.attention.tracing import always, is_exported, is_traced

BACKENDS: dict[str, Callable[[AttentionCall, Operation], Tensor]] = {
    "materialised": reference.operation_output,
    "blockwise": blockwise,
    "pointwise": recomputed,
    "rowwise": recomputed,
    "chunked": chunked,
    "fused": fused,
    "flex": flex,
    "sparse": sparse,
}
"""What computes the output of an operation, by `AttentionSpec.backend`."""


def attend(call: AttentionCall, request: ReductionRequest) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of a call and reductions of its weights.

    Returns:
        The output (batch, head, query, value_width) in the dtype of the call, differentiable and with its dropout, and
        the requested reductions by name, shaped as `Reduction.axis` says, without gradient or dropout; float32, or
        float64 for float64 inputs, unless `Reduction.dtype` says otherwise.
    """
    if not float64.has_float64(call.query) and (exact := request.in_float64):
        output, reductions = attend(call, request.without(exact))
        return output, reductions | _reduce_on_cpu(call, request.select(exact))
    if call.constant is not None:
        reductions = reduce_dense(expand_bias(call).detach().to_acc_dtype(), request) if request.names else {}
        return _constant_heads_output(call), reductions
    if call.key_positions is not None:
        by_position = _reduce_by_position(call, request)
        output, reductions = attend(_without_positions(call), request.without(by_position))
        return output, reductions | by_position
    call, extra_value = simplify(call)
    if extra_value is not None:
        output, reductions = attend(call, request)
        return output + extra_value.to(output.dtype), reductions
    needs_graph = torch.is_grad_enabled() and call.requires_grad
    if not request.names or call.dropout or needs_graph or call.operation is not None:
        return compute_output(call), reduce(call, request)
    if supports_lse(call, request):
        return attend_with_lse(call, request)
    if kernels.is_on_gpu(call.query):
        return _attend_on_gpu(call, request)
    tiled_output, reductions = _reduce(call, request, output=True)
    assert tiled_output is not None
    return tiled_output.to(call.query.dtype), reductions


@torch.no_grad()
def _reduce_on_cpu(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Return reductions whose sums are in float64, for a device without: rounded to float32 once."""
    _, reductions = attend(float64.to_cpu(call.detach()), replace(request, visitors=()))
    return {name: tensor.float().to(call.query.device) for name, tensor in reductions.items()}


def _attend_on_gpu(call: AttentionCall, request: ReductionRequest) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and reductions; the output's kernel gives the log-normalizer where that is all rows are for."""
    if request.names & ROWS_WITH_WEIGHTS or not supports_triton(call, request) or select_kernel(call) is None:
        return compute_output(call), reduce(call, request)
    output, lse = output_and_lse(call)
    return output, reduce_by_triton(call, request, lse)


@no_grad
def reduce(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Return the requested reductions alone, by name."""
    if call.key_positions is not None:
        by_position = _reduce_by_position(call, request)
        return reduce(_without_positions(call), request.without(by_position)) | by_position
    if not request.names:
        return {}
    if not float64.has_float64(call.query) and (exact := request.in_float64):
        return reduce(call, request.without(exact)) | _reduce_on_cpu(call, request.select(exact))
    return _reduce(call.detach(), request, output=False)[1]


def _reduce_by_position(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Return what counts positions, of a call with padding between its tokens."""
    request = request.select(BY_POSITION)
    if not request.names:
        return {}
    call = simplify(call.detach())[0]
    if call.operation is not None and call.operation.function is not None:  # it may look at all rows
        return reduce_dense(call.to_acc_dtype(), request)
    return reduce_by_rows(call, request)


def _without_positions(call: AttentionCall) -> AttentionCall:
    return replace(call, query_positions=None, key_positions=None)


def compute_output(call: AttentionCall) -> Float[Tensor, "batch head query value_width"]:
    """Return the output alone, by PyTorch's fused attention where that can express the call."""
    call, extra_value = simplify(call)
    if extra_value is not None:
        output = compute_output(call)
        return output + extra_value.to(output.dtype)
    if call.operation is not None:
        return BACKENDS[select_backend(call, call.operation)](call, call.operation)
    if call.softcap is None and call.sink is None and not is_mostly_hidden(call):
        mask = _sdpa_mask(call)
        is_causal = mask is None and call.causal and call.offset == 0 and bool(call.query.shape[2] > 1)
        if mask is None and call.causal and not is_causal:
            mask = visible_mask(call)
        output = sdpa(call, mask, is_causal=is_causal)
        return output if call.bias is None or mask is None else _without_blind_rows(output, mask)
    if is_exported():
        return reference.operation_output(call, Operation())
    if _is_whole_sequence(call):
        return fused(call, Operation())
    if (torch.is_grad_enabled() and call.requires_grad) or call.dropout or is_traced():
        return retiled(call) if supports_retiled(call) else blockwise(call, Operation())
    tiled_output, _ = one_pass(call.to_acc_dtype(), ReductionRequest(), output=True)
    assert tiled_output is not None
    return tiled_output.to(call.query.dtype)


def simplify(call: AttentionCall) -> tuple[AttentionCall, Float[Tensor, "#head 1 value_width"] | None]:
    """Return the call without what its operation leaves idle (all, if it is plain softmax), and a value to add."""
    operation = call.operation
    if operation is None:
        return call, None
    extra_value = None
    if operation.extra_value is not None and operation.extra_key is None:
        extra_value = operation.extra_value[:, None]
        operation = replace(operation, extra_value=None)
    queries, last = call.query.shape[2], call.offset + call.query.shape[2]
    is_whole = call.causal and call.offset == 0 and queries == call.key.shape[2]
    if operation.window is not None and always(operation.window >= last) and (is_whole or not operation.prefix):
        operation = replace(operation, window=None)
    is_softmax = replace(operation, backend="") == Operation(backend="")
    return replace(call, operation=None if is_softmax else operation), extra_value


def select_backend(call: AttentionCall, operation: Operation) -> str:
    """Return the name in `BACKENDS` of what computes the output; on CUDA FlexAttention replaces tiles and blocks."""
    if operation.backend == "materialised" or is_exported():  # loops over blocks would bind the graph to sizes
        return "materialised"
    if operation.backend == "sparse":
        return "sparse" if supports_sparse(call, operation) else "blockwise"
    if not _is_whole_sequence(call):
        return "blockwise"
    if operation.backend in ("pointwise", "rowwise", "blockwise", "flex"):
        if supports_flex(call, operation):
            return "flex"
        return "blockwise" if operation.backend == "flex" else operation.backend
    return operation.backend


def _is_whole_sequence(call: AttentionCall) -> bool:
    """Return whether a call is causal, from the first token to the last, and nothing else hides or shifts a score."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    is_masked = call.keep is not None or call.bias is not None or call.key_mask is not None or call.softcap is not None
    return call.causal and call.offset == 0 and queries == keys > 1 and not is_masked and not call.dropout


def _constant_heads_output(call: AttentionCall) -> Tensor:
    """Return the output of a call some heads of which are constant, or mixed with constants."""
    assert call.constant is not None
    if _is_one_query(call):
        return _one_query_output(call, call.constant)
    dtype, heads = call.value.dtype, list(call.constant.heads)  # autocast gives the parts types of their own
    fixed = _with_extra_value(call, call.constant, constant_output(call).to(dtype))
    if call.constant.gate is not None:
        if call.dropout:  # of the mixed weights, which are needed for it
            return reference.attend(expand_bias(call)).to(dtype)
        attention = compute_output(replace(call, constant=None)).transpose(1, 2).to(dtype)
        gate = call.constant.gate.to(attention.dtype)[:, None]
        fixed = gate * attention[:, :, heads] + (1 - gate) * fixed
        if len(heads) == attention.shape[2]:
            return fixed.transpose(1, 2)
        return attention.index_copy(2, torch.tensor(heads, device=attention.device), fixed).transpose(1, 2)
    others = _dynamic_heads(call)
    if not others:
        return fixed.transpose(1, 2)
    attention = compute_output(call.select_heads(others)).transpose(1, 2).to(dtype)
    if torch.is_grad_enabled() and (attention.requires_grad or fixed.requires_grad):
        order = torch.tensor([*others, *heads], device=attention.device).argsort()
        return torch.cat([attention, fixed], dim=2).index_select(2, order).transpose(1, 2)
    output = attention.new_empty(*attention.shape[:2], len(heads) + len(others), attention.shape[-1])
    for part, indices in ((attention, others), (fixed, heads)):
        output[:, :, as_slice(indices)] = part
    return output.transpose(1, 2)


def _with_extra_value(call: AttentionCall, constant: ConstantHeadsInput, output: Tensor) -> Tensor:
    """Return the output (batch, query, constant, value_width) of constant heads with the value beside the others.

    Without a key it is added as it is; beside a key it is multiplied by what their rows give to no token.
    """
    operation = call.operation
    if operation is None or operation.extra_value is None:
        return output
    heads = list(constant.heads)
    value = operation.extra_value.to(output.dtype).expand(call.query.shape[1], -1)[heads]
    if operation.extra_key is None:
        return output + value
    lack = reference.constant_lack(call).to(output.dtype).transpose(1, 2)
    return output + lack * value


def _is_one_query(call: AttentionCall) -> bool:
    """Return whether a call decodes one token with some heads constant, and nothing but masks and biases beside."""
    constant = call.constant
    return (
        constant is not None
        and always(call.query.shape[2] == 1)
        and len(constant.heads) < call.query.shape[1]
        and constant.gate is None
        and call.query.dtype in EXACT
        and call.operation is None
        and call.softcap is None
        and call.sink is None
        and not call.dropout
        and not (torch.is_grad_enabled() and (call.requires_grad or constant.matrices.requires_grad))
        and not torch.is_autocast_enabled(call.query.device.type)
    )


def _one_query_output(call: AttentionCall, constant: ConstantHeadsInput) -> Tensor:
    """Return the output of one query a row, some heads of which are constant."""
    mask = _sdpa_mask(expand_bias(call))
    if mask is None and call.causal and not always(call.offset + 1 >= call.key.shape[2]):
        mask = visible_mask(call)  # a static cache has room for later tokens
    rows = row_weights(call).expand(call.query.shape[0], -1, -1, -1)
    return attend_beside_rows(
        call.query, call.key, call.value, rows, constant.heads, constant.key_heads, scale=call.scale, mask=mask
    )


def _dynamic_heads(call: AttentionCall) -> list[int]:
    constant = set() if call.constant is None else set(call.constant.heads)
    return [head for head in range(call.query.shape[1]) if head not in constant]


def expand_bias(call: AttentionCall) -> AttentionCall:
    """Return the call with a bias for every head, zero for constant ones if it has none for them."""
    bias, heads = call.bias, call.query.shape[1]
    if bias is None or call.constant is None or bias.shape[1] in (1, heads):
        return call
    others = torch.tensor(_dynamic_heads(call), device=bias.device)
    return replace(call, bias=bias.new_zeros(bias.shape[0], heads, *bias.shape[2:]).index_copy(1, others, bias))


def _reduce(call: AttentionCall, request: ReductionRequest, *, output: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the requested reductions, each by the fastest backend that computes it; on CPUs the output if asked."""
    call, _ = simplify(call)
    reductions: dict[str, Tensor] = {}
    by_kernel = request.select(request.by_backend("triton"))
    if supports_triton(call, by_kernel):
        reductions = reduce_by_triton(call, by_kernel)
        request = request.without(by_kernel.names)
        if not request.names:
            return None, reductions
    if call.operation is not None:
        by_rows = call.operation.function is None  # a function may look at all rows
        others = reduce_by_rows(call, request) if by_rows else reduce_dense(call.to_acc_dtype(), request)
        return None, reductions | others
    exact = call.to_acc_dtype()
    if "spectral_bound" in request.names:
        reductions["spectral_bound"] = spectral_bound(exact, request.max_iterations)
        request = request.without(reductions)
    if supports_single_query(call, request):
        row_output, by_row = single_query(exact, request)
        return row_output, reductions | by_row
    result = None
    tiled = request.select(request.by_backend("tiles"))
    if tiled.names or output:
        result, by_tile = one_pass(exact, tiled, output=output)
        reductions |= by_tile
    request = request.without(tiled.names)
    return result, reductions | (reduce_by_rows(call, request) if request.names else {})


def _sdpa_mask(call: AttentionCall) -> Tensor | None:
    """Return one mask for all that hides or shifts a score; None where causality is all there is."""
    keep = call.keep
    if call.causal and not (keep is None and call.key_mask is None and call.bias is None):
        keep = visible_mask(call)
    elif call.key_mask is not None:
        padding = call.key_mask[:, None, None, :]
        keep = padding if keep is None else keep & padding
    if call.bias is None:
        return keep
    bias = call.bias.to(call.query.dtype)
    return bias if keep is None else bias.masked_fill(~keep, torch.finfo(bias.dtype).min)


def _without_blind_rows(output: Tensor, mask: Tensor) -> Tensor:
    """Return the output beside a bias with zeros for queries that see no key, for which it is a mean of all values."""
    is_blind = mask.detach().amax(-1, keepdim=True) <= torch.finfo(mask.dtype).min / 2
    if output.device.type == "cpu" and not is_traced() and not bool(is_blind.any()):  # a GPU would wait for it
        return output
    return output.masked_fill(is_blind, 0.0)


def supports_triton(call: AttentionCall, request: ReductionRequest) -> bool:
    """Return whether the GPU kernels can compute a request; they lack biases, sums beside a sink, sinks of queries,
    and capped first keys, and of operations they have softmax in a window.
    """
    operation = call.operation
    is_window = operation is None or replace(operation, window=None, backend="") == Operation(backend="")
    return (
        kernels.is_on_gpu(call.query)
        and call.query.dtype in kernels.DTYPES
        and kernels.is_available()
        and is_window
        and call.bias is None
        and bool(request.names)
        and request.names == request.by_backend("triton")
        and (call.sink is None or (call.sink.ndim == 1 and not request.names & {"row_sum", "virtual_sink_mass"}))
        and (call.softcap is None or "first_mass" not in request.names)
    )


def reduce_by_triton(
    call: AttentionCall, request: ReductionRequest, lse: Float[Tensor, "batch head query"] | None = None
) -> dict[str, Tensor]:
    """Return the requested reductions from the GPU kernels, by name, in float32.

    With the log-normalizers `lse` no pass over rows is needed; entropy and distance cannot be asked for then.
    """
    names = request.names
    names_of_options = ("scale", "causal", "offset", "key_mask", "softcap", "keep")
    options = {name: getattr(call, name) for name in names_of_options}
    options["window"] = None if call.operation is None else call.operation.window
    reductions: dict[str, Tensor | None] = {}
    if lse is None:
        rows = kernels.row_statistics(call.query, call.key, sink=call.sink, distance="distance" in names, **options)
        lse = rows.lse.masked_fill(rows.lse == torch.inf, -torch.inf)
        reductions = {"entropy": rows.entropy, "distance": rows.distance}
    reductions |= {"lse": lse, "row_sum": (lse != -torch.inf).to(lse.dtype), "virtual_sink_mass": torch.zeros_like(lse)}
    if "first_mass" in names:
        reductions["first_mass"] = first_mass(call, lse, request.num_first_keys)
    if request.by_axis("key"):
        mass, square = kernels.column_statistics(
            call.query, call.key, lse, query_mask=call.query_mask, square="column_square" in names, **options
        )
        reductions |= {"column_mass": mass, "column_sum": mass.double(), "column_square": square}
    return {name: tensor for name, tensor in reductions.items() if name in names and tensor is not None}
