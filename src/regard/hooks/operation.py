"""Another operation instead of a trained model's softmax."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall, Operation, relative_positions, visible_mask
from regard.attention.positions import pseudo_logits
from regard.attention.spec import ATTENTIONS, AttentionSpec, split_changes, warn_of_idle
from regard.attention.tracing import is_traced
from regard.attention.weightings import FEATURE_MAPS
from regard.constants import SOURCES, Layer
from regard.errors import UserError
from regard.hooks.attention_function import OVERRIDE
from regard.hooks.fidelity import verify_own_attention
from regard.hooks.forward_pass import ForwardContext, keeps_apart, segment_starts
from regard.hooks.layers import Inputs, find_attention_layers
from regard.hooks.modules import AttentionLayer
from regard.hooks.recomputed import Passes, make_passes
from regard.hooks.routing import ModuleHook, routed

Layers = Collection[int | Layer] | int | None
Sites = Collection[str] | str | None
Weigh = Callable[[Tensor, Tensor], Tensor]
"""From scores (batch, head, query, key) and what may be seen, of that shape, to weights."""


@dataclass(frozen=True)
class OverriddenOperation:
    """The operation that layers compute instead of softmax, and these layers (site, layer).

    Of a function of the user's own the spec names only the backend.
    """

    spec: AttentionSpec
    layers: tuple[Layer, ...]


@contextmanager
def override_attention(
    model: nn.Module,
    attention: AttentionSpec | str | Weigh,
    layers: Layers = None,
    sites: Sites = None,
    example_inputs: Inputs = None,
) -> Iterator[OverriddenOperation]:
    """Let layers of a model compute another operation inside the block: see `regard.replacing`."""
    function = None if isinstance(attention, (AttentionSpec, str)) else attention
    if function is not None:
        _check_takes_scores_and_mask(function)
    spec = AttentionSpec(backend="materialised") if callable(attention) else parse_attention(attention)
    all_layers = find_attention_layers(model, example_inputs)
    verify_own_attention(model)
    check_computes_softmax(model, all_layers)
    selected = _select_layers(all_layers, spec, layers, sites)
    operations, hooks = make_operations(selected, spec, function)
    with routed(model, hooks):
        try:
            for module, operation in operations.items():
                setattr(module, OVERRIDE, operation)
            yield OverriddenOperation(spec, tuple(layer.key for layer in selected))
        finally:
            for module in operations:
                vars(module).pop(OVERRIDE, None)
            for layer in selected:
                operations[layer.module].passes.end_in(layer.stack.module)


def _check_takes_scores_and_mask(function: Weigh) -> None:
    """Raise a UserError for a function that cannot be called with scores and mask."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return  # of something built in, which does not say what it takes
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise UserError(
            f"attention: expected a function of scores and mask, (scores, keep) -> weights; got {name}{signature}"
        ) from None


def make_operations(
    layers: Sequence[AttentionLayer], spec: AttentionSpec, function: Weigh | None = None
) -> tuple[dict[nn.Module, LayerOperation], list[ModuleHook]]:
    """Return the operation of each attention module, for its attribute `OVERRIDE`, and the hooks that these need."""
    passes, hooks = follow_forwards(layers)
    operations = {
        layer.module: LayerOperation(
            spec, layer.causal, passes[layer.stack.module], function, longest_sequence(spec, layer)
        )
        for layer in layers
    }
    return operations, hooks if spec.window is not None or spec.extra == "pseudo-scores" else []


def longest_sequence(spec: AttentionSpec, layer: AttentionLayer) -> int | None:
    """Return how many positions a layer was trained on, for pseudo-scores; None if it need not be known.

    Raises:
        UserError: A layer cannot be given pseudo-scores: it sees later keys, or nothing says how many positions it has.
    """
    if spec.extra != "pseudo-scores":
        return None
    if not layer.causal:
        expected = "layers that see no later key, where pseudo-scores stand (choose them with sites=, in Python)"
        raise UserError(f"attention: expected {expected}; layer {layer.layer} ({layer.site}) sees later keys")
    longest = getattr(getattr(layer.stack.module, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        expected = "a model whose configuration has max_position_embeddings, over which pseudo-scores are summed"
        raise UserError(f"attention: expected {expected}; got {type(layer.stack.module).__name__}")
    return longest


def follow_forwards(layers: Sequence[AttentionLayer]) -> tuple[dict[nn.Module, Passes[CurrentPass]], list[ModuleHook]]:
    """Return the forward that each stack of these layers will be in, and the hooks that keep it."""
    passes = make_passes(layers, CurrentPass)
    return passes, [ModuleHook(stack, partial(_begin_forward, current)) for stack, current in passes.items()]


def parse_attention(attention: AttentionSpec | str, *others: str) -> AttentionSpec:
    """Return a spec, or that of a name, which may have changes behind it: `sigmoid+window=8`.

    Refusals name `others` as well, which the caller takes.

    Raises:
        UserError: The name is unknown, or a trained model has no weights for the operation.
    """
    if isinstance(attention, AttentionSpec):
        spec = attention
    else:
        name, changes = split_changes(attention)
        if name in SOURCES:
            raise UserError(
                f"attention: {attention!r} is of single heads, which are named: regard.replacing(model, {name!r}, "
                f"heads=…); of whole layers expected {_describe_allowed(others)}"
            )
        if name not in ATTENTIONS:
            raise UserError(f"attention: expected {_describe_allowed(others)}; got {attention!r}")
        spec = ATTENTIONS[name].changed(**changes)
    warn_of_idle(spec, attention if isinstance(attention, str) else "the attention")
    if obstacle := _obstacle(spec):
        raise UserError(f"attention: a trained model cannot be given {obstacle}; expected {_describe_allowed(others)}")
    return spec


def _obstacle(spec: AttentionSpec) -> str | None:
    """Return what of a spec does not fit a model that was trained with something else; None if all of it does."""
    if spec.learns:
        return f"{', '.join(spec.learns)}, which would have to be learned"
    if spec.positions != AttentionSpec().positions:
        return f"positions={spec.positions}, for it keeps its own"
    return f"prefix={spec.prefix} without a window, for its own masks stay" if spec.prefix and not spec.window else None


def _describe_allowed(others: Sequence[str] = ()) -> str:
    names = [*others, *(name for name, spec in ATTENTIONS.items() if not _obstacle(spec))]
    return f"one of {', '.join(names)}, or an AttentionSpec that changes weighting, normalisation or window"


def check_computes_softmax(model: nn.Module, layers: Sequence[AttentionLayer]) -> None:
    """Raise a UserError if a model computes another operation."""
    if any(OVERRIDE in vars(layer.module) for layer in layers):
        raise UserError(
            "the attention of this model is already replaced by another operation; expected the original: leave that "
            "block first, or load the model that was replaced"
        )
    if any(layer.operation for layer in layers):
        raise UserError(
            f"cannot replace the attention of {type(model).__name__}: expected a model that computes softmax, this one "
            "was trained with another operation"
        )


def _select_layers(
    all_layers: Sequence[AttentionLayer], spec: AttentionSpec, layers: Layers, sites: Sites
) -> list[AttentionLayer]:
    """Return the layers that are to compute an operation. Raise a UserError if they cannot."""
    chosen_sites = _resolve_sites(all_layers, sites)
    if spec.window is not None and any(site.startswith("cross") for site in chosen_sites):
        raise UserError("sites: a window needs queries and keys of one sequence; leave cross-attention out")
    selected = [layer for layer in all_layers if layer.site in chosen_sites]
    if layers is not None:
        selected = _filter_layers(selected, [layers] if isinstance(layers, int) else list(layers))
    modules = {layer.module for layer in selected}
    if sum(layer.module in modules for layer in all_layers) > len(selected):
        raise UserError("layers: layers of this model share their weights and their attention; choose all of them")
    if not selected:
        raise UserError("layers: expected one layer at least, got none")
    if spec.prefix and not all(layer.causal for layer in selected):
        raise UserError(
            "attention: a prefix beside a window needs layers that see no later key; choose others with sites= (Python)"
        )
    return selected


def _resolve_sites(layers: Sequence[AttentionLayer], sites: Sites) -> Collection[str]:
    """Return the names of sites; None is all but cross-attention."""
    names = list(dict.fromkeys(layer.site for layer in layers))
    if sites is None:
        return [site for site in names if not site.startswith("cross")]
    sites = [sites] if isinstance(sites, str) else sites
    if unknown := [site for site in sites if site not in names]:
        raise UserError(f"sites: this model has no {unknown[0]!r}; choose from {', '.join(names)}")
    return sites


def _filter_layers(layers: Sequence[AttentionLayer], selection: Sequence[Any]) -> list[AttentionLayer]:
    """Return the layers of these indices, in every site, or of these (site, layer)."""
    keys: set[Layer] = set()
    for value in selection:
        matching = [layer.key for layer in layers if _matches(layer, value)]
        if not matching:
            numbers = sorted({layer.layer for layer in layers})
            is_whole = numbers == list(range(len(numbers)))
            choices = f"0 to {numbers[-1]}" if is_whole else ", ".join(map(str, numbers))
            raise UserError(f"layers: this model has no {value!r}; choose from {choices}, or pairs (site, layer)")
        keys.update(matching)
    return [layer for layer in layers if layer.key in keys]


def _matches(layer: AttentionLayer, value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return tuple(value) == layer.key
    try:
        return operator.index(value) == layer.layer
    except TypeError:
        return False


@dataclass
class CurrentPass:
    """The forward that a stack is in."""

    forward: ForwardContext = field(default_factory=ForwardContext)
    block_starts: Tensor | None = None

    def copy(self) -> CurrentPass:
        """Return this: layers leave nothing in it."""
        return self

    def starts(self, call: AttentionCall) -> Tensor:
        """Return the position at which the sequence of each query begins, (batch or 1, query or 1)."""
        forward, device = self.forward, call.query.device
        if self.block_starts is not None:
            return self.block_starts.to(device)
        if forward.segments is not None and keeps_apart(call, forward.segments):
            return segment_starts(forward.segments).to(device)
        if forward.token_mask is None:
            return torch.zeros(1, 1, dtype=torch.long, device=device)
        return forward.token_mask.int().argmax(-1, keepdim=True).to(device)


def _begin_forward(
    passes: Passes[CurrentPass], stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    forward = ForwardContext.from_arguments(stack, args, kwargs, passes.previous.forward)
    passes.begin_in(stack, CurrentPass(forward, forward.find_block_starts()))


@dataclass(frozen=True)
class LayerOperation:
    """The operation of one attention layer, which goes into each of its calls.

    The rest of a call stays: its scale, masks, biases, soft-cap, and the logit of its sink.

    Attributes:
        spec: The operation.
        causal: A query sees no later key; where it does, a window reaches both ways.
        passes: The forward that each thread is in.
        function: Makes the weights instead of the operation.
        longest: Positions of the longest sequence, for pseudo-scores.
    """

    spec: AttentionSpec
    causal: bool
    passes: Passes[CurrentPass]
    function: Weigh | None = None
    longest: int | None = None

    def apply_to(self, call: AttentionCall) -> AttentionCall:
        """Return the call with the operation in it; its feature map takes the model's queries and keys."""
        spec, feature_map = self.spec, FEATURE_MAPS[self.spec.feature_map]
        if not call.scale and spec.feature_map != AttentionSpec().feature_map:
            raise UserError(
                f"attention: expected one without a feature map, for this model computes its scores by itself; got "
                f"feature_map={spec.feature_map}"
            )
        sink = call.query.new_zeros(call.query.shape[1]) if spec.extra == "zero" else call.sink
        if spec.extra == "pseudo-scores":
            assert self.longest is not None
            sink = self._pseudo_logits(call, self.longest)
        operation = Operation.from_spec(spec, function=self.function)
        if sink is not None and (spec.weighting != "softmax" or spec.window) and operation.backend != "materialised":
            operation = replace(operation, backend="blockwise")
        query, key = feature_map(call.query), feature_map(call.key)
        call = replace(call, query=query, key=key, sink=sink, operation=operation)
        if spec.window is not None:
            call = self._apply_window(call, operation, spec.window)
        return _lower_by_log_length(call) if spec.log_length else call

    def _pseudo_logits(self, call: AttentionCall, longest: int) -> Tensor:
        """Return the logits of pseudo-scores beside the keys of each query, by its position in its sequence.

        Raises:
            UserError: The sequence is longer than rows in training, or a mask shows later keys, as in a prefix or an
                image.
        """
        batch, heads, queries, _ = call.query.shape
        state = self.passes.state
        last = state.forward.offset + queries
        positions = torch.arange(last - queries, last, device=call.query.device) - state.starts(call)
        if last > longest and not is_traced() and (got := int(positions.max()) + 1) > longest:
            raise UserError(f"sequence: expected at most {longest} tokens beside pseudo-scores, got {got}")
        if not call.causal and queries > 1 and not is_traced():
            placed, real = replace(call, offset=min(last, call.key.shape[2]) - queries), positions >= 0
            real = real if (mask := state.forward.query_mask(queries)) is None else mask.to(real.device)
            if bool((visible_mask(placed) & (relative_positions(placed) < 0) & real[:, None, :, None]).any()):
                raise UserError("attention: expected masks that hide later keys, in whose place pseudo-scores stand")
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        return pseudo_logits(positions.clamp(min=0), heads, longest, dtype).expand(batch, -1, -1)

    def _apply_window(self, call: AttentionCall, operation: Operation, window: int) -> AttentionCall:
        """Put queries at their positions; where they see later or first keys, make the window a mask."""
        dropped = 0
        if not call.causal:
            queries, keys, offset = call.query.shape[2], call.key.shape[2], self.passes.state.forward.offset
            dropped = max(offset + queries - keys, 0)
            call = replace(call, offset=offset - dropped)
        if self.causal and not operation.prefix:
            return call
        distance = relative_positions(call)
        near = ((distance if self.causal else distance.abs()) < window)[None, None]
        if operation.prefix:
            keys_from_start = torch.arange(call.key.shape[2], device=near.device) + dropped
            keys_from_start = keys_from_start - self.passes.state.starts(call)[..., None]
            near = near | ((keys_from_start >= 0) & (keys_from_start < operation.prefix))[:, None]
        keep = near if call.keep is None else call.keep & near
        return replace(call, keep=keep, operation=replace(operation, window=None, prefix=0))


def _lower_by_log_length(call: AttentionCall) -> AttentionCall:
    """Lower the scores of each query by the logarithm of how many keys it sees (Ramapuram et al. 2024)."""
    count = visible_mask(call).sum(-1, keepdim=True).clamp(min=1)
    shift = -torch.log(count.to(call.query.dtype)).expand(*count.shape[:3], call.key.shape[2])
    bias: Tensor = shift if call.bias is None else call.bias + shift
    return replace(call, bias=bias)
