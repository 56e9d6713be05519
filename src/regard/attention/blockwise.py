"""Any operation by blocks of query rows, each through the definition: memory is linear in the number of keys.

Under gradients a block keeps what it was made of, and is computed again on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.attention import reference
from regard.attention.call import PER_CALL, PER_KEY, PER_QUERY, PER_SAMPLE, AttentionCall, Operation, ReductionRequest

ENTRIES = 1 << 22
"""How many entries a block of the matrix may have, as long as it has `ROWS` rows at least and at most."""
ROWS = (32, 128)


def blockwise(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """The output of an operation, with the dropout of the call; computed in float32 at least."""
    kind = call.query.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return blockwise(call, operation)
    found = [_output(part) for part, _ in blocks(to_acc_dtype(replace(call, operation=operation)))]
    output = found[0] if len(found) == 1 else torch.cat(found, dim=2)
    return output.to(call.query.dtype)


def _output(part: AttentionCall) -> Tensor:
    assert part.operation is not None
    if not (torch.is_grad_enabled() and part.differentiable):
        return reference.operate(part, part.operation)
    random = part.dropout > 0
    output: Tensor = checkpoint(reference.operate, part, part.operation, use_reentrant=False, preserve_rng_state=random)
    return output


@torch.no_grad()
def reduce_by_rows(call: AttentionCall, wanted: ReductionRequest) -> dict[str, Tensor]:
    """Every wanted reduction, as `reference.reduce` defines it, without the whole matrix.

    Where the spectral bound is asked for, one sample's matrix of one head is whole at a time.
    """
    call = to_acc_dtype(call)
    found = _reduce_blocks(call, replace(wanted, names=wanted.names & (PER_KEY | PER_QUERY)))
    if wanted.names & PER_CALL:
        found["weights"] = _weights(call)
    if wanted.names & PER_SAMPLE:
        found["spectral_bound"] = _spectral_bound(call)
    return found


def _reduce_blocks(call: AttentionCall, wanted: ReductionRequest) -> dict[str, Tensor]:
    if not wanted.names:
        return {}
    batch, heads, _, _ = call.query.shape
    keys = call.key.shape[2]
    columns = {name: call.query.new_zeros(batch, heads, keys) for name in wanted.names & PER_KEY}
    rows: dict[str, list[Tensor]] = {name: [] for name in wanted.names & PER_QUERY}
    for part, seen in blocks(call):
        for name, tensor in reference.reduce(part, wanted).items():
            if name in columns:
                columns[name][..., seen] += tensor
            else:
                rows[name].append(tensor)
    return columns | {name: torch.cat(parts, dim=2) for name, parts in rows.items()}


def _weights(call: AttentionCall) -> Tensor:
    """The matrices summed over the unpadded samples, (head, query, key)."""
    samples = reference.reference_matrix(call)
    heads, queries = call.query.shape[1:3]
    room = call.query.new_zeros(heads, queries, call.key.shape[2])
    row = 0
    for part, seen in blocks(call):
        matrix = reference.distribution(part)[0][samples].sum(0)
        room[:, row : row + matrix.shape[1], seen] = matrix
        row += matrix.shape[1]
    return room


def _spectral_bound(call: AttentionCall) -> Tensor:
    wanted = ReductionRequest(names=PER_SAMPLE)
    batch, heads = call.query.shape[:2]
    samples = [of_sample(call, sample) for sample in range(batch)]
    bounds = [
        [reference.reduce(s.of_heads([head]), wanted)["spectral_bound"] for head in range(heads)] for s in samples
    ]
    return torch.stack([torch.cat(row, dim=1)[0] for row in bounds])


def blocks(call: AttentionCall) -> Iterator[tuple[AttentionCall, slice]]:
    """The calls of some query rows each, with the keys that these can see, and where those stand."""
    batch, heads, queries, _ = call.query.shape
    least, most = ROWS
    count = min(max(ENTRIES // max(batch * heads * call.key.shape[2], 1), least), most)
    for start in range(0, max(queries, 1), count):
        rows = slice(start, min(start + count, queries))
        seen = _seen(call, rows)
        yield _cut(call, rows, seen), seen


def _seen(call: AttentionCall, rows: slice) -> slice:
    """The keys outside which no row sees any: those before the window, and those to come, but for the prefix."""
    window, prefix, keys = None, 0, call.key.shape[2]
    if call.operation is not None:
        window, prefix = call.operation.window, call.operation.prefix
    first, last = 0, keys
    if window is not None and not prefix:
        first = rows.start + call.offset - window + 1
    if call.causal and (not prefix or call.key_mask is None):
        last = max(rows.stop + call.offset, prefix)
    last = min(max(last, 1), keys)
    return slice(min(max(first, 0), max(last - 1, 0)), last)


def _cut(call: AttentionCall, rows: slice, seen: slice) -> AttentionCall:
    """The call of some rows and keys alone."""
    parts: dict[str, Any] = {"query": call.query[:, :, rows], "offset": call.offset + rows.start - seen.start}
    parts |= {"key": call.key[:, :, seen], "value": call.value[:, :, seen]}
    for name in ("keep", "bias"):
        tensor = getattr(call, name)
        if tensor is not None:
            tensor = tensor if tensor.shape[2] == 1 else tensor[:, :, rows]
            parts[name] = tensor if tensor.shape[3] == 1 else tensor[..., seen]
    if call.query_mask is not None:
        parts["query_mask"] = call.query_mask[:, rows]
    if call.key_mask is not None:
        parts["key_mask"] = call.key_mask[:, seen]
    if seen.start:
        parts["starts"] = tuple(start - seen.start for start in call.starts or (0,) * call.query.shape[0])
    return replace(call, **parts)


def of_sample(call: AttentionCall, sample: int) -> AttentionCall:
    """The call of one sample alone."""
    one = slice(sample, sample + 1)
    parts: dict[str, Any] = {name: getattr(call, name)[one] for name in ("query", "key", "value")}
    for name in ("keep", "bias", "query_mask", "key_mask"):
        tensor = getattr(call, name)
        if tensor is not None and len(tensor) > 1:
            parts[name] = tensor[one]
    if call.starts is not None:
        parts["starts"] = call.starts[one]
    return replace(call, **parts)


def to_acc_dtype(call: AttentionCall) -> AttentionCall:
    """The call with operands of at least float32."""
    if call.query.dtype in (torch.float32, torch.float64):
        return call
    return replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())
