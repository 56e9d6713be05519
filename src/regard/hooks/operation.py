"""Another operation where a trained model's softmax was, while a block of code runs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall, Operation, relative_positions, visible_mask
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.attention.weightings import FEATURE_MAPS
from regard.constants import Layer
from regard.errors import UserError
from regard.hooks import deberta
from regard.hooks.attention_function import OVERRIDES, attention_function
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.layers import AttentionLayer, find_attention_layers
from regard.hooks.registration import attention_installed, register

Layers = Collection[int | Layer] | int | None
Sites = Collection[str] | str | None


@dataclass(frozen=True)
class OverriddenOperation:
    """What a model computes instead of softmax, and in which layers (site, layer)."""

    spec: AttentionSpec
    layers: tuple[Layer, ...]


@contextmanager
def override_attention(
    model: nn.Module, attention_: AttentionSpec | str, layers: Layers = None, sites: Sites = None
) -> Iterator[OverriddenOperation]:
    """While it lasts layers of the model compute another operation; afterwards the model is as it was.

    See `regard.replacing`, whose part for operations this is. Raises UserError for one that would have to be learned.
    """
    spec = parse_attention(attention_)
    here = find_attention_layers(model)
    _check_free(model, here)
    chosen = _chosen(here, spec, layers, sites)
    register(attention_function)
    with ExitStack() as stack:
        stack.enter_context(attention_installed(model))
        stack.enter_context(deberta.patch_deberta(model))
        stack.callback(_take, chosen)
        during = {place.stack.module: CachedLength() for place in chosen}
        for place in chosen:
            OVERRIDES[place.module] = LayerOperation(spec, place.causal, during[place.stack.module])
        for module, cached in during.items() if spec.window is not None else ():
            handle = module.register_forward_pre_hook(partial(_begin, cached), with_kwargs=True)
            stack.callback(handle.remove)
        yield OverriddenOperation(spec, tuple((place.site, place.layer) for place in chosen))


def parse_attention(attention_: AttentionSpec | str) -> AttentionSpec:
    """The spec, or that of a name, which may have changes behind it, `sigmoid+window=8`.

    Raises UserError for one that no trained model has the weights for.
    """
    spec = _named(attention_) if isinstance(attention_, str) else attention_
    if obstacle := _obstacle(spec):
        raise UserError(f"attention: a trained model cannot be given {obstacle}; expected {_allowed()}")
    return spec


def _named(text: str) -> AttentionSpec:
    name, *changes = text.split("+")
    if name not in ATTENTIONS:
        raise UserError(f"attention: expected {_allowed()}; got {text!r}")
    pairs = [change.partition("=") for change in changes]
    known = AttentionSpec().to_dict()
    if unknown := [field for field, _, _ in pairs if field not in known]:
        raise UserError(
            f"attention: expected changes of {', '.join(known)}, such as sigmoid+window=8; got {unknown[0]!r}"
        )
    return ATTENTIONS[name].with_(**{field: _value(value) for field, _, value in pairs})


def _value(text: str) -> Any:
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)


def _obstacle(spec: AttentionSpec) -> str | None:
    """What of a spec does not fit a model that was trained with something else; None if all of it does."""
    if spec.learns:
        return f"{', '.join(spec.learns)}, which would have to be learned"
    if spec.positions != AttentionSpec().positions:
        return f"positions={spec.positions}, for it keeps its own"
    return f"prefix={spec.prefix}, for its own masks stay" if spec.prefix else None


def _allowed() -> str:
    names = [name for name, spec in ATTENTIONS.items() if not _obstacle(spec)]
    return f"one of {', '.join(names)}, or an AttentionSpec of weighting, normalisation, window and their kin"


def _check_free(model: nn.Module, here: Sequence[AttentionLayer]) -> None:
    """Nothing, or a UserError: the model does not compute softmax now."""
    if any(place.module in OVERRIDES for place in here):
        raise UserError("the attention of this model is already replaced by another operation; leave that block first")
    if any(place.operation for place in here):
        raise UserError(
            f"cannot replace the attention of {type(model).__name__}: expected a model that computes softmax, this one "
            "was trained with another operation"
        )


def _chosen(here: Sequence[AttentionLayer], spec: AttentionSpec, layers: Layers, sites: Sites) -> list[AttentionLayer]:
    """The places that are to compute something else: all of self-attention, or those that are asked for."""
    known = list(dict.fromkeys(place.site for place in here))
    wanted = [site for site in known if not site.startswith("cross")] if sites is None else _several(sites)
    if unknown := [site for site in wanted if site not in known]:
        raise UserError(f"sites: expected some of {', '.join(known)}, got {unknown[0]!r}")
    if spec.window is not None and any(site.startswith("cross") for site in wanted):
        raise UserError("sites: a window needs queries and keys of one sequence, leave cross-attention out")
    found = [place for place in here if place.site in wanted]
    if layers is not None:
        found = _of_layers(found, [layers] if isinstance(layers, int) else list(layers))
    chosen = {id(place.module) for place in found}
    if sum(id(place.module) in chosen for place in here) > len(found):
        raise UserError("layers: layers of this model share their weights and their attention; expected all of them")
    if not found:
        raise UserError("layers: expected one layer at least, got none")
    return found


def _several(sites: Collection[str] | str) -> list[str]:
    return [sites] if isinstance(sites, str) else list(sites)


def _of_layers(found: Sequence[AttentionLayer], layers: Sequence[Any]) -> list[AttentionLayer]:
    """The places of these layers: numbers, of every site, or (site, layer)."""
    kept: set[Layer] = set()
    for layer in layers:
        same = [(p.site, p.layer) for p in found if _is(p, layer)]
        if not same:
            last = max(p.layer for p in found)
            raise UserError(f"layers: expected numbers from 0 to {last}, or pairs (site, layer); got {layer!r}")
        kept.update(same)
    return [place for place in found if (place.site, place.layer) in kept]


def _is(place: AttentionLayer, layer: Any) -> bool:
    if isinstance(layer, (tuple, list)):
        return tuple(layer) == (place.site, place.layer)
    try:
        return operator.index(layer) == place.layer
    except TypeError:
        return False


def _take(chosen: Sequence[AttentionLayer]) -> None:
    for place in chosen:
        OVERRIDES.pop(place.module, None)


@dataclass
class CachedLength:
    """How many tokens came before the forward that a stack is in."""

    tokens: int = 0


def _begin(cached: CachedLength, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before each forward of a stack."""
    cached.tokens = ForwardContext.from_arguments(stack, args, kwargs, None).offset


@dataclass(frozen=True)
class LayerOperation:
    """The operation of one attention layer: it goes into each call, in the place of softmax.

    Whatever else the model asks for stays: its scale, masks, biases, soft-cap, and the logit of its sink. `causal` says
    that queries see no later key; where they do, a window reaches both ways.
    """

    spec: AttentionSpec
    causal: bool
    cached: CachedLength

    def swapped(self, call: AttentionCall) -> AttentionCall:
        """The call with the operation in it. Scores are of queries and keys as the model hands them over, mapped."""
        spec, mapped = self.spec, FEATURE_MAPS[self.spec.feature_map]
        sink = call.query.new_zeros(call.query.shape[1]) if spec.extra == "zero" else call.sink
        operation = Operation.from_spec(spec)
        if sink is not None and (spec.weighting != "softmax" or spec.window) and operation.form != "materialised":
            operation = replace(operation, form="blockwise")
        call = replace(call, query=mapped(call.query), key=mapped(call.key), sink=sink, operation=operation)
        if spec.window is not None:
            call = self._windowed(call, operation, spec.window)
        return _lowered(call) if spec.log_length else call

    def _windowed(self, call: AttentionCall, operation: Operation, window: int) -> AttentionCall:
        """The call with its queries at their positions; where these see later keys, with the window as a mask."""
        if not call.causal:
            queries, keys = call.query.shape[2], call.key.shape[2]
            dropped = max(self.cached.tokens + queries - keys, 0)
            call = replace(call, offset=self.cached.tokens - dropped)
        if self.causal:
            return call
        near = (relative_positions(call).abs() < window)[None, None]
        keep = near if call.keep is None else call.keep & near
        return replace(call, keep=keep, operation=replace(operation, window=None))


def _lowered(call: AttentionCall) -> AttentionCall:
    """The call with its scores lowered by the logarithm of how many keys each query sees (Ramapuram et al. 2024)."""
    count = visible_mask(call).sum(-1, keepdim=True).clamp(min=1)
    lower = -torch.log(count.to(call.query.dtype)).expand(*count.shape[:3], call.key.shape[2])
    bias: Tensor = lower if call.bias is None else call.bias + lower
    return replace(call, bias=bias)
