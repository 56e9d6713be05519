"""Attention of each query to the keys of its largest scores alone: no other pair is weighed or has a gradient.

Which pairs those are is found first, without gradients, by blocks of rows. A sum over the pairs of a query, or of a
key, is an embedding bag: rows of a table, each times its weight.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import dropout, embedding_bag, pad

from regard.attention import reference
from regard.attention.blockwise import blocks, blockwise
from regard.attention.call import AttentionCall, Operation, visible_mask
from regard.attention.gradients import first_order
from regard.attention.retiled import is_plain_on_cpu
from regard.attention.tracing import has_transforms

MOST_PAIRS = 1 / 8
"""Largest `top_k`, as a share of the keys, at which pairs one by one are quicker than the whole matrix."""
MOST_TIES = 2
"""Times `top_k` pairs of a query that are weighed one by one, where equal scores make them more."""

FOLD = 8
SCORES_A_NUMBER = 64
"""`torch.topk` is quick itself for rows of at least so many scores for each that it returns."""

_WEIGHT_GRADIENT = torch.ops.aten._embedding_bag_per_sample_weights_backward
"""Called as it is: a nested backward pass fails in inference mode, and starts what checkpointing recomputes."""
_SUM = 0
"""The number of the mode `sum` of an embedding bag."""


def supports_sparse(call: AttentionCall, operation: Operation) -> bool:
    """Return whether a call of several queries weighs few pairs, and nothing shifts its scores.

    On a CPU; elsewhere nobody has measured it. A graph is left for it in training alone.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    few = queries > 1 and operation.top_k is not None and operation.top_k <= MOST_PAIRS * keys
    is_shifted = call.bias is not None or operation.distance is not None or operation.slopes is not None
    keeps_order = not is_shifted and call.softcap is None and call.scale > 0
    return few and keeps_order and (is_plain_on_cpu(call) or _is_compiled_step(call))


def _is_compiled_step(call: AttentionCall) -> bool:
    """Return whether `torch.compile` traces a step of training on a CPU, whose graph may end here and go on behind."""
    if not torch.compiler.is_dynamo_compiling() or call.query.device.type != "cpu" or has_transforms():
        return False
    return torch.is_grad_enabled() and call.requires_grad


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sparse(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of an operation with `top_k`, with the dropout of the call; computed in float32 at least."""
    with torch.autocast(call.query.device.type, enabled=False):
        wide = replace(call, operation=operation).to_acc_dtype()
        found = _largest(wide, operation) if is_plain_on_cpu(call) else None
        if found is None:
            return blockwise(call, operation)
        pairs, keep = found
        queries, keys, values = (tensor.flatten(0, 2) for tensor in (wide.query, wide.key, wide.value))
        scores: Tensor = _Products.apply(queries, keys, pairs)
        scores = scores.view(keep.shape) * wide.scale + operation.shift
        weights, column = reference.weigh(wide, operation, scores, keep)
        output: Tensor = _WeightedValues.apply(dropout(weights, wide.dropout).flatten(0, 2), values, pairs)
        output = output.view(*wide.query.shape[:3], -1)
        return reference.add_extra_value(wide, operation, output, column).to(call.query.dtype)


class _Pairs:
    """Pairs of query and key, of all samples and heads: `keys[i]` are the rows of the keys that query i meets."""

    def __init__(self, keys: Int[Tensor, "query number"], num_keys: int) -> None:
        self.keys, self.num_keys = keys, num_keys

    def products(
        self, queries: Float[Tensor, "query width"], keys: Float[Tensor, "key width"]
    ) -> Float[Tensor, "query number"]:
        """Return q_i · k_j: the gradient by its weights of a sum of keys, where q_i is that of the sum."""
        count, number = self.keys.shape
        bags = torch.arange(count, device=self.keys.device)
        bag_of_pair = bags.repeat_interleave(number)
        products: Tensor = _WEIGHT_GRADIENT(queries, keys, self.keys.flatten(), bags * number, bag_of_pair, _SUM)
        return products.view_as(self.keys)

    def sum_keys(
        self, weights: Float[Tensor, "query number"], keys: Float[Tensor, "key width"]
    ) -> Float[Tensor, "query width"]:
        """Return Σ_j w_ij k_j of each query."""
        return embedding_bag(self.keys, keys, per_sample_weights=weights, mode="sum")

    def sum_queries(
        self, weights: Float[Tensor, "query number"], queries: Float[Tensor, "query width"]
    ) -> Float[Tensor, "key width"]:
        """Return Σ_i w_ij q_i of each key."""
        order, starts = self._by_key
        rows, weights = order.div(self.keys.shape[1], rounding_mode="floor"), weights.reshape(-1)[order]
        return embedding_bag(rows, queries, starts, per_sample_weights=weights, mode="sum")

    @cached_property
    def _by_key(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " key"]]:
        """The pairs in the order of their keys, and where those of each key begin."""
        keys, order = self.keys.flatten().sort(stable=True)
        return order, torch.searchsorted(keys, torch.arange(self.num_keys, device=keys.device))


def _largest(
    call: AttentionCall, operation: Operation
) -> tuple[_Pairs, Bool[Tensor, "batch head query number"]] | None:
    """Return the pairs of the `top_k` largest scores and equals of the least, and which of them meet.

    None: Too many scores are equal.
    """
    assert operation.top_k is not None
    parts: list[tuple[Tensor, Tensor]] = []
    for block, columns in blocks(call.detach()):
        scores = (block.query * block.scale) @ block.expand_groups(block.key).mT
        scores.masked_fill_(~visible_mask(block), float("-inf"))
        number = min(operation.top_k, scores.shape[-1])
        found, at = _topk(scores, min(number + 1, scores.shape[-1]))
        least = found[..., number - 1 : number]
        if bool(((found[..., number:] == least) & (least > float("-inf"))).any()):
            equals = int(((scores >= least) & (least > float("-inf"))).sum(-1).max())
            if equals > MOST_TIES * operation.top_k:
                return None
            found, at = scores.topk(equals, dim=-1)
        parts.append((at + columns.start, ~(found < least) & (found != float("-inf"))))  # what is no number stays
    width = max(at.shape[-1] for at, _ in parts)
    at, keep = (torch.cat([pad(t, (0, width - t.shape[-1])) for t in of], dim=2) for of in zip(*parts, strict=True))
    batch, groups, num_keys, _ = call.key.shape
    first = torch.arange(batch * groups, device=at.device).view(batch, groups) * num_keys
    first = first.repeat_interleave(call.num_key_value_groups, dim=1)
    return _Pairs((at + first[..., None, None]).flatten(0, 2), batch * groups * num_keys), keep


def _topk(scores: Float[Tensor, "*lead key"], number: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row and their indices: of every `FOLD` scores first the largest, if that pays.

    The largest of all stand among those that share their columns with the largest of these.
    """
    stride, rest = divmod(scores.shape[-1], FOLD)
    if rest or number > stride or number * SCORES_A_NUMBER <= scores.shape[-1]:
        return scores.topk(number, dim=-1)
    columns = scores.unflatten(-1, (FOLD, stride)).amax(-2).topk(number, dim=-1, sorted=False).indices
    candidates = (columns[..., None] + torch.arange(0, FOLD * stride, stride, device=scores.device)).flatten(-2)
    found, at = scores.gather(-1, candidates).topk(number, dim=-1)
    return found, candidates.gather(-1, at)


class _Products(torch.autograd.Function):
    """The products of queries and keys that meet, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, pairs: _Pairs) -> Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(queries, keys)
        return pairs.products(queries, keys)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        queries, keys = ctx.saved_tensors
        return ctx.pairs.sum_keys(grad, keys), ctx.pairs.sum_queries(grad, queries), None


class _WeightedValues(torch.autograd.Function):
    """The sum of the values that a query meets, with the gradients of weights and values."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, pairs: _Pairs) -> Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(weights, values)
        return pairs.sum_keys(weights, values)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values = ctx.saved_tensors
        return ctx.pairs.products(grad, values), ctx.pairs.sum_queries(weights, grad), None
