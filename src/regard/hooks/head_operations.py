"""Another operation or a constant matrix in single heads, several of them in one layer: for one text, not for speed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from regard.attention import reference
from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation
from regard.attention.spec import AttentionSpec
from regard.constants import Head
from regard.errors import UserError
from regard.hooks.attention_function import OVERRIDE
from regard.hooks.layers import find_attention_layers
from regard.hooks.modules import AttentionLayer
from regard.hooks.operation import CurrentPass, LayerOperation, check_computes_softmax, parse_attention
from regard.hooks.routing import routed

HeadOperation = AttentionSpec | str | Tensor
"""An operation, or its name as in `regard.replacing`; or constant weights (query, key), whose rows are normalized."""


@dataclass(frozen=True)
class HeadOperations:
    """What some heads of a layer compute; it stands where a `LayerOperation` does. Holds T×T weights of all heads."""

    operations: Mapping[int, AttentionSpec | Tensor]
    causal: bool

    def apply_to(self, call: AttentionCall) -> AttentionCall:
        """Return the call with its weights computed: those of the model's own attention in the other heads."""
        exact = call.to_acc_dtype()
        matrix = reference.weights(exact).expand(len(call.query), call.query.shape[1], -1, -1).clone()
        for head, operation in self.operations.items():
            own = exact.select_heads([head])
            if isinstance(operation, Tensor):
                changed = _with_constant(own, operation)
            else:
                changed = LayerOperation(operation, self.causal, CurrentPass()).apply_to(own)
            matrix[:, head] = reference.weights(changed)[:, 0].to(matrix.dtype)
        function = Operation(function=lambda scores, keep: matrix.to(scores.dtype), backend="materialised")
        return replace(call, sink=None, operation=function)


def _with_constant(call: AttentionCall, matrix: Tensor) -> AttentionCall:
    tokens = max(call.query.shape[2], call.key.shape[2])
    if tokens > len(matrix):
        raise UserError(f"constants: expected an input of at most {len(matrix)} tokens, got {tokens}")
    constant = matrix.to(call.query.device, call.query.dtype)[None]
    return replace(call, constant=ConstantHeadsInput(matrices=constant, heads=(0,), signed=True))


@contextmanager
def replacing_heads(
    model: nn.Module, heads: Mapping[Head, HeadOperation], layers: Sequence[AttentionLayer] | None = None
) -> Iterator[None]:
    """Let heads (site, layer, head) compute something else inside the block; others stay, to rounding.

    `layers` are those of `find_attention_layers`, if they are known.

    Raises:
        UserError: There is no such head, or it shares its module with another layer, reads another sequence, or cannot
            be given the operation.
    """
    by_layer: dict[tuple[str, int], dict[int, AttentionSpec | Tensor]] = {}
    for (site, layer, head), operation in heads.items():
        spec = operation if isinstance(operation, Tensor) else parse_attention(operation)
        by_layer.setdefault((site, layer), {})[head] = spec
    if not by_layer:
        yield
        return
    layers = find_attention_layers(model) if layers is None else layers
    check_computes_softmax(model, layers)
    selected = [(_check_layer(key, layers, operations), operations) for key, operations in by_layer.items()]
    with routed(model, []):
        try:
            for found, operations in selected:
                setattr(found.module, OVERRIDE, HeadOperations(operations, found.causal))
            yield
        finally:
            for found, _ in selected:
                vars(found.module).pop(OVERRIDE, None)


def _check_layer(
    key: tuple[str, int], layers: Sequence[AttentionLayer], operations: Mapping[int, AttentionSpec | Tensor]
) -> AttentionLayer:
    layer = next((layer for layer in layers if layer.key == key), None)
    if layer is None or not all(0 <= head < layer.heads for head in operations):
        raise UserError(f"heads: this model has no head {max(operations)} in layer {key[1]} ({key[0]})")
    if layer.site.startswith("cross") or layer.calls > 1 or sum(one.module is layer.module for one in layers) > 1:
        expected = "self-attention of a module that no other layer shares and that attends once in a forward"
        raise UserError(f"heads: expected {expected}; layer {key[1]} ({key[0]}) is other")
    prefix = any(isinstance(operation, AttentionSpec) and operation.prefix for operation in operations.values())
    if prefix and not layer.causal:
        raise UserError("attention: a prefix beside a window needs layers that see no later key")
    return layer


def list_heads(layers: Sequence[AttentionLayer]) -> dict[tuple[str, int], int]:
    """Return the number of heads of each layer (site, layer) whose heads `replacing_heads` replaces."""
    modules = [layer.module for layer in layers]
    return {
        layer.key: layer.heads
        for layer in layers
        if not layer.site.startswith("cross") and layer.calls == 1 and modules.count(layer.module) == 1
    }
