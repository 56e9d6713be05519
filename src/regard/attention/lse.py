"""Reductions that need no more than the log-normalizer of each query, which fused kernels return beside the output."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention import kernels
from regard.attention.call import AttentionCall
from regard.attention.lse_kernels import sees_no_key, select_kernel
from regard.attention.reduction import ReductionRequest
from regard.attention.tiles import LOG2_E

ROWS_WITH_WEIGHTS = frozenset({"entropy", "distance"})
"""Reductions by query that no log-normalizer gives."""


def supports_lse(call: AttentionCall, request: ReductionRequest) -> bool:
    """Return whether a fused kernel takes a call, and its log-normalizer gives every reduction."""
    return request.names == request.by_backend("lse") and select_kernel(call) is not None


def attend_with_lse(call: AttentionCall, request: ReductionRequest) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output (batch, head, query, value_width) and reductions of a call by a fused kernel."""
    output, lse = output_and_lse(call)
    reductions = {"lse": lse} if "lse" in request.names else {}
    if "first_mass" in request.names:
        reductions["first_mass"] = first_mass(call, lse, request.num_first_keys)
    return output, reductions


def output_and_lse(call: AttentionCall) -> tuple[Tensor, Float[Tensor, "batch head query"]]:
    """Return the output and the log-normalizer of each query, −∞ where it sees no key, by a fused kernel."""
    kernel = select_kernel(call)
    assert kernel is not None
    output, lse = kernel(call)
    if call.key_mask is not None:
        lse = lse.masked_fill(sees_no_key(call, call.key_mask), -torch.inf)
    return output, lse


def first_mass(
    call: AttentionCall, lse: Float[Tensor, "batch head query"], num_first_keys: int
) -> Float[Tensor, "batch head query first"]:
    """Return exp(s_ij − lse_i) for the first keys j of each sample: keys as rows, in base 2, take half the time."""
    key, positions = _first_keys(call, num_first_keys)
    key = call.expand_groups(key) if call.num_key_value_groups > 1 else key
    mass = _first_logarithms(call, key, lse).exp2_().mT
    keys = call.key.shape[2]
    if call.key_mask is not None:
        valid = call.key_mask.gather(1, positions.clamp(0, keys - 1).expand(lse.shape[0], -1))
        mass.masked_fill_(~(valid[:, None, None] & (lse != -torch.inf)[..., None]), 0.0)
    if call.starts or num_first_keys > keys:
        mass.masked_fill_(((positions < 0) | (positions >= keys))[:, None, None], 0.0)
    if call.causal:
        early = max(max(call.starts or (0,)) + num_first_keys - call.offset, 0)
        queries = torch.arange(min(early, lse.shape[2]), device=lse.device)[:, None] + call.offset
        mass[:, :, :early].masked_fill_(queries < positions[:, None, None], 0.0)
    if call.hides_pairs:
        mass.masked_fill_(~_sees_first_keys(call, positions), 0.0)
    return mass


def _first_logarithms(
    call: AttentionCall, key: Float[Tensor, "batch head first width"], lse: Float[Tensor, "batch head query"]
) -> Float[Tensor, "batch head first query"]:
    """Return the logarithms to base 2 of the weights of some keys: sample by sample, or on a GPU in one product.

    There a copy takes less than the launches that it saves.
    """
    scale = call.scale * LOG2_E
    if kernels.is_on_gpu(call.query):
        query = call.query.new_empty(call.query.shape, dtype=lse.dtype).copy_(call.query).flatten(0, 1)
        rows, keys = lse.flatten(0, 1)[:, None], key.to(lse.dtype).flatten(0, 1)
        return torch.baddbmm(rows, keys, query.mT, beta=-LOG2_E, alpha=scale).unflatten(0, lse.shape[:2])
    logarithms = lse.new_empty(*lse.shape[:2], key.shape[2], lse.shape[2])
    for q, k, row, out in zip(call.query.mT, key, lse[:, :, None], logarithms, strict=True):
        torch.baddbmm(row, k.to(lse.dtype), q.to(lse.dtype), beta=-LOG2_E, alpha=scale, out=out)
    return logarithms


def _sees_first_keys(
    call: AttentionCall, positions: Int[Tensor, "#batch first"]
) -> Bool[Tensor, "#batch #head #query first"]:
    """Return which queries see the first keys by the mask of pairs and the window; keys outside count as the next."""
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=positions.device)
    if call.keep is not None:
        keep = call.keep.expand(max(len(call.keep), len(positions)), -1, -1, call.key.shape[2])
        index = positions.clamp(0, call.key.shape[2] - 1)[:, None, None].expand(len(keep), *keep.shape[1:3], -1)
        seen = keep.gather(3, index)
    operation = call.operation
    if operation is not None and operation.window is not None:
        queries = torch.arange(call.query.shape[2], device=positions.device)[:, None] + call.offset
        seen = seen & (queries - positions[:, None, None] < operation.window)
    return seen


def _first_keys(
    call: AttentionCall, num_first_keys: int
) -> tuple[Float[Tensor, "batch group first width"], Int[Tensor, "#batch first"]]:
    """Return the first keys of each sample, and their positions."""
    groups, keys, width = call.key.shape[1:]
    positions = torch.arange(num_first_keys, device=call.key.device)[None]
    if not any(call.starts or ()) and num_first_keys <= keys:
        return call.key[:, :, :num_first_keys], positions
    if call.starts:
        positions = positions + torch.tensor(call.starts, device=call.key.device)[:, None]
    index = positions.clamp(0, keys - 1)[:, None, :, None].expand(call.key.shape[0], groups, -1, width)
    return call.key.gather(2, index), positions
