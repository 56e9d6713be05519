"""Operations by FlexAttention: one fused kernel on CUDA, compiled for each kind of score and mask.

A weighting f ≥ 0 goes through softmax: softmax of log f(s) times the sum of its exponentials is f(s), and that sum is
exp(log-normalizer), which has a gradient.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from regard.attention.call import AttentionCall, Operation
from regard.attention.fused import column_score
from regard.attention.tracing import is_eager
from regard.attention.weightings import EPSILON

BLOCK = 128
"""Queries, and keys, of a block of a mask."""
LOGARITHMS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda score: score,
    "sigmoid": torch.nn.functional.logsigmoid,
    "elu": lambda score: torch.where(score > 0, torch.log1p(score.clamp(min=0)), score),
}
"""Logarithm of each weighting, before any normalization."""
NORMALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda total: total,
    "sum": lambda total: total / (total + EPSILON),
    "clamped-sum": lambda total: total / total.clamp(min=1),
}
"""Factor of the softmax of log f, from Σ_j f(s_ij)."""


def flex(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of a whole causal sequence, in the dtype of its queries."""
    column = column_score(call, operation)
    assert column is None or operation.weighting == "softmax", "a column stands beside softmax alone"
    attention: Any = _compiled_flex_attention() if call.query.is_cuda else flex_attention
    key, value = (tensor.to(call.query.dtype) for tensor in (call.key, call.value))
    mask = _block_mask(call.query.shape[2], operation.window, operation.prefix, call.query.device)
    options = {"scale": call.scale, "enable_gqa": call.num_key_value_groups > 1, "return_aux": AuxRequest(lse=True)}
    output, aux = attention(call.query, key, value, score_mod=_score_mod(operation), block_mask=mask, **options)
    lse: Tensor = aux.lse
    if operation.weighting != "softmax":
        output = output * NORMALISERS[operation.normalisation](lse.exp())[..., None].to(output.dtype)
    if column is not None:
        share = torch.sigmoid(lse - column)[..., None]
        output = output * share.to(output.dtype)
    if operation.extra_value is None:
        return output
    value = operation.extra_value.to(output.dtype)[:, None]
    return output + (value if operation.extra_key is None or column is None else (1 - share).to(output.dtype) * value)


def supports_flex(call: AttentionCall, operation: Operation) -> bool:
    """Return whether the compiled kernel can take a whole causal sequence."""
    return (
        call.query.is_cuda
        and call.query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and min(call.query.shape[-1], call.value.shape[-1]) >= 16
        and operation.weighting in LOGARITHMS
        and operation.top_k is None
        and (operation.weighting == "softmax" or (operation.extra_key is None and call.sink is None))
        and not is_eager()  # not compiled, it holds the matrix of scores
    )


def _score_mod(operation: Operation) -> Callable[..., Tensor]:
    """Return the function of one score, of sample b, head h, query i and key j."""
    logarithm, slopes, distance = LOGARITHMS[operation.weighting], operation.slopes, operation.distance
    shift = operation.shift if operation.weighting != "softmax" else 0.0
    biases: list[Callable[[Tensor, Tensor], Tensor]] = []
    if distance is not None:
        biases.append(lambda h, gap: distance[h if len(distance) > 1 else 0, gap])
    if slopes is not None:
        biases.append(lambda h, gap: -slopes[h] * gap)
    return lambda score, b, h, i, j: logarithm(sum([bias(h, (i - j).clamp(min=0)) for bias in biases], score + shift))


@lru_cache(maxsize=32)
def _block_mask(length: int, window: int | None, prefix: int, device: torch.device) -> BlockMask:
    """Return which blocks of queries and keys meet, and in which of them all pairs do, without a mask of pairs."""
    distances = length if window is None else window
    first = torch.arange(0, length, BLOCK)
    last = first + BLOCK - 1
    least, most = (first[:, None] - last).clamp(min=0), last[:, None] - first
    meets = ((most >= 0) & (least < distances)) | (first < prefix)
    is_full = ((first[:, None] >= last) & (most < distances)) | (last < prefix)
    is_full &= (last < length)[:, None] & (last < length)
    return BlockMask.from_kv_blocks(
        *_block_indices(meets & ~is_full, device),
        *_block_indices(is_full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, i, j: ((i >= j) & (i - j < distances)) | (j < prefix),
        seq_lengths=(length, length),
    )


def _block_indices(
    meets: Bool[Tensor, "query_block key_block"], device: torch.device
) -> tuple[Int[Tensor, "1 1 query_block"], Int[Tensor, "1 1 query_block key_block"]]:
    """Return how many blocks of keys each block of queries meets, and which: these stand first."""
    indices = meets.int().argsort(dim=-1, descending=True, stable=True)
    count, order = meets.sum(-1).int(), indices.int()
    return count[None, None].to(device), order[None, None].to(device)


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)
