"""Another operation or a constant matrix in single heads, several of them in one layer: exact, not fast."""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation
from regard.attention.spec import AttentionSpec
from regard.attention.weightings import WEIGHTINGS
from regard.constants import SOURCES, Head
from regard.errors import UserError
from regard.hooks.attention_function import OVERRIDE
from regard.hooks.constant_heads import NAME
from regard.hooks.fidelity import verify_own_attention
from regard.hooks.layers import Inputs, find_attention_layers
from regard.hooks.modules import AttentionLayer
from regard.hooks.operation import (
    CurrentPass,
    LayerOperation,
    check_computes_softmax,
    follow_forwards,
    longest_sequence,
    parse_attention,
)
from regard.hooks.recomputed import Passes
from regard.hooks.routing import routed


class ConstantHead(NamedTuple):
    """Constant weights (query, key) of a head, whose rows are normalized, and the sums (query) that they then get."""

    weights: Tensor
    row_sums: Tensor | None = None


HeadOperation = AttentionSpec | str | Tensor | ConstantHead
"""An operation, or its name as in `regard.replacing`; or constant weights (query, key), whose rows are normalized, or
their name in `regard.constants.SOURCES`."""
HeadNames = Collection[tuple[int, int] | Head]
"""Heads as (layer, head), where layers have one site, or (site, layer, head)."""


_Parsed = AttentionSpec | ConstantHead | Callable[[int, int], Tensor]


@dataclass(frozen=True)
class HeadOperations:
    """What some heads of a layer compute; it stands where a `LayerOperation` does. Holds T×T weights of all heads."""

    operations: Mapping[int, _Parsed]
    causal: bool
    passes: Passes[CurrentPass]
    longest: int | None = None

    def apply_to(self, call: AttentionCall) -> AttentionCall:
        """Return the call with its weights computed: those of the model's own attention in the other heads."""
        exact = call.to_acc_dtype()
        shape = len(call.query), call.query.shape[1], -1, -1
        matrix, column = (part.expand(shape).clone() for part in _weights_and_column(exact))
        has_constants = any(not isinstance(operation, AttentionSpec) for operation in self.operations.values())
        starts = self.passes.state.starts(exact) if has_constants else None
        for head, operation in self.operations.items():
            if isinstance(operation, AttentionSpec):
                whole = LayerOperation(operation, self.causal, self.passes, longest=self.longest).apply_to(exact)
                changed = whole.select_heads([head])
            else:
                assert starts is not None
                own = exact.select_heads([head])
                changed = _with_constant(own, operation, self.passes.state.forward.offset, starts)
            weights, beside = _weights_and_column(changed)
            matrix[:, head], column[:, head] = weights[:, 0].to(matrix.dtype), beside[:, 0].to(matrix.dtype)
        columns = torch.cat([column, matrix], dim=-1)
        function = Operation(function=lambda scores, keep: columns.to(scores.dtype), backend="materialised")
        return replace(call, sink=call.query.new_zeros(call.query.shape[1]), operation=function)


def _weights_and_column(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the weights of a call, and what rows that sum to less than one give to no key.

    It stands beside the weights of a function, so that they are measured as they are and not divided by their sum. Of
    weights that are no distribution it is the column that the operation has itself, if any.
    """
    operation = call.operation
    if operation is None:
        return reference.weights(call), reference.distribution(call)[1][..., None].clamp(min=0)
    matrix, column = reference.mixed_weights(call, operation)
    if column is not None or WEIGHTINGS[operation.weighting].proxy:
        return matrix, torch.zeros_like(matrix[..., :1]) if column is None else column
    total = matrix.sum(-1, keepdim=True)
    return matrix, (1 - total).clamp(min=0) * (total != 0)


def _with_constant(
    call: AttentionCall, operation: ConstantHead | Callable[[int, int], Tensor], offset: int, starts: Tensor
) -> AttentionCall:
    """Return the call of one head with a constant in it, whose row 0 is the first real query of each sequence."""
    queries = call.query.shape[2]
    positions = torch.arange(offset, offset + queries, device=starts.device) - starts
    tokens = int(positions.max()) + 1
    matrix, row_sums = operation if isinstance(operation, ConstantHead) else (operation(tokens, tokens), None)
    if tokens > len(matrix):
        raise UserError(f"constants: expected an input of at most {len(matrix)} tokens, got {tokens}")
    shift = None if not bool(starts.any()) else starts.squeeze(-1) if starts.shape[-1] == 1 else starts
    constant = ConstantHeadsInput(
        matrices=matrix.to(call.query)[None],
        row_sums=None if row_sums is None else row_sums.to(call.query)[None],
        heads=(0,),
        first_query=offset,
        first_key=max(offset + queries - call.key.shape[2], 0),
        query_shift=shift,
        key_shift=shift,
    )
    return replace(call, constant=constant)


def _parse_operation(operation: HeadOperation) -> _Parsed:
    if isinstance(operation, str) and operation in SOURCES:
        return SOURCES[operation]
    if isinstance(operation, ConstantHead):
        return operation
    if not isinstance(operation, Tensor):
        return parse_attention(operation)
    if operation.ndim != 2 or len(operation) != operation.shape[-1]:
        raise UserError(f"constants: expected a matrix (token, token), got one of shape {tuple(operation.shape)}")
    if not bool(operation.isfinite().all()):
        raise UserError("constants: expected finite weights, got NaN or infinite ones")
    return ConstantHead(operation)


@contextmanager
def replacing_heads(
    model: nn.Module, operation: HeadOperation, heads: HeadNames | None, example_inputs: Inputs = None
) -> Iterator[tuple[Head, ...]]:
    """Let heads compute something else inside the block, all of them by default: see `regard.replacing`."""
    layers = find_attention_layers(model, example_inputs)
    counts = list_heads(layers).items()
    all_heads = [(*key, head) for key, count in counts for head in range(count)]
    selected = tuple(all_heads) if heads is None else resolve_heads(heads, all_heads, "this model has")
    with replacing_each_head(model, dict.fromkeys(selected, operation), layers):
        yield selected


@contextmanager
def replacing_each_head(
    model: nn.Module, heads: Mapping[Head, HeadOperation], layers: Sequence[AttentionLayer] | None = None
) -> Iterator[None]:
    """Let heads (site, layer, head) compute something else inside the block, each its own; others stay, to rounding.

    `layers` are those of `find_attention_layers`, if they are known.

    Raises:
        UserError: There is no such head, or it shares its module with another layer, reads another sequence, or cannot
            be given the operation.
    """
    by_layer: dict[tuple[str, int], dict[int, _Parsed]] = {}
    different = {id(operation): operation for operation in heads.values()}
    parsed = {key: _parse_operation(operation) for key, operation in different.items()}
    for (site, layer, head), operation in heads.items():
        by_layer.setdefault((site, layer), {})[head] = parsed[id(operation)]
    if not by_layer:
        yield
        return
    layers = find_attention_layers(model) if layers is None else layers
    verify_own_attention(model)
    check_computes_softmax(model, layers)
    selected = [(_check_layer(key, layers, operations), operations) for key, operations in by_layer.items()]
    passes, hooks = follow_forwards([found for found, _ in selected])
    with routed(model, hooks):
        try:
            for found, operations in selected:
                current = passes[found.stack.module]
                longest = [
                    longest_sequence(one, found) for one in operations.values() if isinstance(one, AttentionSpec)
                ]
                override = HeadOperations(operations, found.causal, current, max(filter(None, longest), default=None))
                setattr(found.module, OVERRIDE, override)
            yield
        finally:
            for found, _ in selected:
                vars(found.module).pop(OVERRIDE, None)
                passes[found.stack.module].end_in(found.stack.module)


def _check_layer(
    key: tuple[str, int], layers: Sequence[AttentionLayer], operations: Mapping[int, _Parsed]
) -> AttentionLayer:
    layer = next((layer for layer in layers if layer.key == key), None)
    unknown = [head for head in operations if layer is None or not 0 <= head < layer.heads]
    if layer is None or unknown:
        raise UserError(f"heads: this model has no head {unknown[0]} in layer {key[1]} ({key[0]})")
    if layer.site.startswith("cross") or layer.calls > 1 or sum(one.module is layer.module for one in layers) > 1:
        expected = "self-attention of a module that no other layer shares and that attends once in a forward"
        raise UserError(f"heads: expected {expected}; layer {key[1]} ({key[0]}) is other")
    if NAME in layer.module._modules:
        expected = "a layer without constants, beside which single heads cannot compute something else"
        raise UserError(f"heads: expected {expected}; layer {key[1]} ({key[0]}) has some")
    prefix = any(isinstance(operation, AttentionSpec) and operation.prefix for operation in operations.values())
    if prefix and not layer.causal:
        raise UserError("attention: a prefix beside a window needs layers that see no later key")
    return layer


def resolve_heads(heads: HeadNames, all_heads: Sequence[Head], owner: str) -> tuple[Head, ...]:
    """Return the site, layer and head of each named head, in order. Raise a UserError for what names none."""
    if isinstance(heads, (str, float, int)) or not isinstance(heads, Iterable):
        raise UserError(f"heads: expected pairs (layer, head), or (site, layer, head); got {heads!r}")
    sites = sorted({site for site, _, _ in all_heads})
    selected = set()
    for head in heads:
        if not isinstance(head, (tuple, list)) or len(head) not in (2, 3):
            raise UserError(f"heads: expected pairs (layer, head), or (site, layer, head); got {head!r}")
        full: Any = tuple(part if isinstance(part, str) else _parse_index(part) for part in head)
        if len(full) == 2 and len(sites) > 1:
            raise UserError(f"heads: {head} names no site; pass (site, layer, head), site one of {', '.join(sites)}")
        full = (sites[0], *full) if len(full) == 2 else full
        if full not in all_heads:
            raise UserError(f"heads: {owner} no head {head}; choose heads such as {all_heads[-1]}")
        selected.add(full)
    return tuple(sorted(selected))


def _parse_index(value: Any) -> int:
    """Return the index of a layer or head, also one of NumPy or PyTorch."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"heads: expected whole numbers for layer and head, got {value!r}") from None


def list_heads(layers: Sequence[AttentionLayer]) -> dict[tuple[str, int], int]:
    """Return the number of heads of each layer (site, layer) whose heads `replacing_heads` replaces."""
    modules = [layer.module for layer in layers]
    return {
        layer.key: layer.heads
        for layer in layers
        if not layer.site.startswith("cross") and layer.calls == 1 and modules.count(layer.module) == 1
    }
