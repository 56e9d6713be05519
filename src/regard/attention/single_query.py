"""Attention of one query a row that sees every key, as in writing with a cache: a handful of operations on its row."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.reduction import ReductionRequest

REDUCTIONS = frozenset(
    {"column_mass", "column_sum", "column_square", "entropy", "distance", "lse", "row_sum", "virtual_sink_mass"}
)


def supports_single_query(call: AttentionCall, request: ReductionRequest) -> bool:
    """Return whether a call is one query that sees all keys, and all reductions are known of its row."""
    options = (call.keep, call.bias, call.key_mask, call.softcap, call.sink, call.operation, call.constant)
    is_plain = all(option is None for option in options)
    sees_all = not call.causal or call.offset + 1 >= call.key.shape[2]
    return is_plain and sees_all and call.query.shape[2] == 1 and request.names <= REDUCTIONS


def single_query(
    call: AttentionCall, request: ReductionRequest
) -> tuple[Float[Tensor, "batch head 1 value_width"], dict[str, Tensor]]:
    """Return the output of a call (of float32 or float64) and reductions by name."""
    batch, heads, _, width = call.query.shape
    groups, keys = call.key.shape[1:3]
    scores = call.query.reshape(batch, groups, heads // groups, width) @ call.key.mT * call.scale
    lse = scores.logsumexp(-1, keepdim=True)
    logs = scores - lse
    weights = logs.exp()
    output = (weights @ call.value).view(batch, heads, 1, -1)
    of_row = (batch, heads, 1)
    reductions: dict[str, Tensor] = {}
    for name in request.by_axis("query"):
        if name == "entropy":
            reductions[name] = (weights * logs).sum(-1).neg_().view(of_row)
        elif name == "distance":
            distances = torch.arange(keys, device=weights.device).sub_(call.offset).abs_()
            reductions[name] = (weights @ distances.to(weights.dtype)).view(of_row)
        elif name == "lse":
            reductions[name] = lse.view(of_row)
        else:
            reductions[name] = weights.new_full(of_row, float(name == "row_sum"))
    mass = weights.view(batch, heads, keys)
    if call.query_mask is not None:
        mass = mass * call.query_mask[:, None]
    for name in request.by_axis("key"):
        sums = mass if name == "column_mass" else mass.double()
        reductions[name] = sums.square() if name == "column_square" else sums
    return output, reductions
