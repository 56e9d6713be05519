"""One token behind a cache, some of whose heads are constant: what decoding computes in each layer.

A step of decoding takes about as long as what stands between its products, so that these are as few as can be.
"""

from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention.call import as_tensor, kept_pairs
from regard.attention.tracing import is_traced

EXACT = (torch.float32, torch.float64)
"""Types in which scores may be computed without those of PyTorch's attention: none is rounded."""


def attend_beside_rows(
    query: Float[Tensor, "batch head 1 width"],
    key: Float[Tensor, "batch held key width"],
    value: Float[Tensor, "batch group key value_width"],
    rows: Float[Tensor, "batch constant 1 key"],
    heads: tuple[int, ...],
    key_heads: tuple[int, ...] | None,
    *,
    scale: float,
    mask: Float[Tensor, "#batch #head 1 key"] | Bool[Tensor, "#batch #head 1 key"] | None = None,
) -> Float[Tensor, "batch head 1 value_width"]:
    """Return the output of all heads as one product: rows of constants beside softmax weights, times values.

    So no head's values are copied. Heads that share keys are scored together; what constant ones of them get is left
    out.

    Args:
        query: Of all heads.
        key: Of `key_heads`; None: of all.
        value: Of all.
        rows: The weights of the constant heads.
        heads: The constant heads.
        key_heads: The key heads that the other heads read, and others maybe.
        scale: Scores are products times this.
        mask: What is added to scores, or which keys are seen; a query that sees none gets zeros.
    """
    batch, num_heads, _, width = query.shape
    share = num_heads // value.shape[1]
    order = order_heads.__wrapped__ if is_traced() else order_heads
    scored, places = order(key_heads, heads, share, num_heads)
    if key_heads is not None:
        index = as_tensor(scored, query.device)
        query = query.index_select(1, index)
        mask = mask if mask is None or mask.shape[1] == 1 else mask.index_select(1, index)
    grouped, nothing = query.reshape(-1, share, width), query.new_empty(1)
    scores = torch.baddbmm(nothing, grouped, key.flatten(0, 1).mT, beta=0, alpha=scale)
    weights = scores.view(batch, len(scored), 1, -1)
    if mask is not None and mask.dtype != torch.bool:
        weights, mask = weights + mask, kept_pairs(mask)
    if mask is not None:
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    weights = weights.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    weights = torch.cat([weights, rows], dim=1).index_select(1, as_tensor(places, query.device))
    output = torch.bmm(weights.view(-1, share, weights.shape[-1]), value.flatten(0, 1))
    return output.view(batch, num_heads, 1, -1)


@cache
def order_heads(
    key_heads: tuple[int, ...] | None, constant: tuple[int, ...], share: int, heads: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the heads that read these key heads, and where each head stands if constant ones follow them."""
    groups: Sequence[int] = range(heads // share) if key_heads is None else key_heads
    scored = tuple(group * share + i for group in groups for i in range(share))
    places = {head: place for place, head in enumerate(scored)}
    places |= {head: len(scored) + place for place, head in enumerate(constant)}
    return scored, tuple(places[head] for head in range(heads))


def average_by_rows(
    rows: Float[Tensor, "head key"], value: Float[Tensor, "batch group key value_width"]
) -> Float[Tensor, "batch head 1 value_width"]:
    """Return the output of heads that are all constant: their rows times the values of the group of each."""
    groups = value.shape[1]
    by_group = rows.view(groups, -1, rows.shape[-1])
    product = torch.bmm(by_group, value[0]) if len(value) == 1 else by_group @ value
    return product.view(len(value), len(rows), 1, -1)
