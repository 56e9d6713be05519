"""Any operation and any reduction by blocks of query rows, each from its definition: memory is linear in the keys.

A block is computed again in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.attention import reference
from regard.attention.call import AttentionCall, Operation, slices
from regard.attention.device_choice import choose_for
from regard.attention.reduction import WEIGHT_REDUCTIONS, DenseWeights, ReductionRequest, reduce_dense, unpadded_samples
from regard.attention.spans import key_spans, union

ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Entries of the matrix in a block, as long as it has at least and at most `ROWS` rows."""
ROWS = {"cpu": (32, 128), "cuda": (32, 4096)}
"""A GPU computes small blocks faster than their operations are launched."""


def blockwise(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of an operation, with the dropout of the call; computed in float32 at least."""
    device_type = call.query.device.type
    if torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            return blockwise(call, operation)
    outputs = [_block_output(block) for block, _ in blocks(replace(call, operation=operation).to_acc_dtype())]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.to(call.query.dtype)


def _block_output(block: AttentionCall) -> Tensor:
    assert block.operation is not None
    compute = reference.operation_output
    if not (torch.is_grad_enabled() and block.requires_grad):
        return compute(block, block.operation)
    return checkpoint(compute, block, block.operation, use_reentrant=False, preserve_rng_state=block.dropout > 0)


@torch.no_grad()
def reduce_by_rows(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Return the requested reductions by name, holding a block of rows, or for those by sample one head's matrix."""
    call = call.to_acc_dtype()
    reductions = _reduce_blocks(call, request.select(request.by_axis("key", "query", "call")))
    by_sample = request.select(request.by_axis("sample"))
    return reductions | (_reduce_matrices(call, by_sample) if by_sample.names else {})


def _reduce_blocks(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Compute reductions by key, by query and by call, in one run over the blocks."""
    if not request.names:
        return {}
    batch, heads, queries, _ = call.query.shape
    keys = call.key.shape[2]
    dtypes = {name: WEIGHT_REDUCTIONS[name].dtype for name in request.by_axis("key")}
    by_key = {name: call.query.new_zeros(batch, heads, keys, dtype=dtype) for name, dtype in dtypes.items()}
    by_call = {name: call.query.new_zeros(heads, queries, keys) for name in request.by_axis("call")}
    by_query: dict[str, list[Tensor]] = {name: [] for name in request.by_axis("query")}
    whole_samples, row = unpadded_samples(call), 0
    for block, columns in blocks(call):
        dense = DenseWeights(block, request.num_first_keys, whole_samples)
        rows = slice(row, row + block.query.shape[2])
        row = rows.stop
        for name in request.names:
            tensor = WEIGHT_REDUCTIONS[name].compute(dense)
            if name in by_key:
                by_key[name][..., columns] += tensor
            elif name in by_call:
                by_call[name][:, rows, columns] = tensor
            else:
                by_query[name].append(tensor)
    return by_key | by_call | {name: torch.cat(parts, dim=2) for name, parts in by_query.items()}


def _reduce_matrices(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Compute reductions by sample from the matrix of one sample and head at a time."""
    batch, heads = call.query.shape[:2]
    parts: dict[str, list[Tensor]] = {name: [] for name in request.names}
    for sample in (call.select_samples(slice(index, index + 1)) for index in range(batch)):
        by_head = [reduce_dense(sample.select_heads([head]), request) for head in range(heads)]
        for name in request.names:
            parts[name].append(torch.cat([tensors[name] for tensors in by_head], dim=1))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def blocks(call: AttentionCall) -> Iterator[tuple[AttentionCall, slice]]:
    """Yield the calls of some query rows with the keys that they can see, and where those keys stand."""
    batch, heads, queries, _ = call.query.shape
    min_rows, max_rows = choose_for(call.query.device, ROWS)
    count = min(
        max(choose_for(call.query.device, ENTRIES) // max(batch * heads * call.key.shape[2], 1), min_rows), max_rows
    )
    spans = key_spans(call, count)
    for index, rows in enumerate(slices(queries, count) if queries else [slice(0, 0)]):
        columns = _visible_keys(call, rows, None if spans is None else union(spans[index]))
        yield call.select_tokens(rows, columns), columns


def _visible_keys(call: AttentionCall, rows: slice, shown: slice | None) -> slice:
    """Return a range outside which no row sees a key, from the first key if some are a prefix.

    `shown` is what the mask of pairs leaves of them.
    """
    window, prefix, keys = None, 0, call.key.shape[2]
    if call.operation is not None:
        window, prefix = call.operation.window, call.operation.prefix
    first, last = 0, keys
    if window is not None and not prefix:
        first = rows.start + call.offset - window + 1
    if call.causal and (not prefix or call.key_mask is None):
        last = max(rows.stop + call.offset, prefix)
    if shown is not None:
        first, last = first if prefix else max(first, shown.start), min(last, shown.stop)
    last = min(max(last, 1), keys)
    return slice(min(max(first, 0), max(last - 1, 0)), last)
