"""The attention function that Transformers calls: reads the host into an `AttentionCall` that observers see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall, ReductionRequest
from regard.attention.operator import attend
from regard.errors import UserError
from regard.hooks.constant_heads import NAME, ConstantHeadsByCall
from regard.hooks.registration import hint


class Observer(Protocol):
    """Someone who watches attention calls."""

    def before(
        self, module: nn.Module, call: AttentionCall, causal_site: bool
    ) -> tuple[AttentionCall, ReductionRequest] | None:
        """The call with what is known of its queries, and what is wanted of it; None if it is not of interest."""

    def after(self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]) -> None:
        """See the finished call."""


OBSERVERS: WeakKeyDictionary[nn.Module, list[Observer]] = WeakKeyDictionary()
"""Who watches which module, the last to come last; empty but while someone watches."""


class OperationOverride(Protocol):
    """What an attention layer computes in the place of softmax."""

    def swapped(self, call: AttentionCall) -> AttentionCall:
        """The call with that operation in it."""


OVERRIDES: WeakKeyDictionary[nn.Module, OperationOverride] = WeakKeyDictionary()
"""The modules that compute another operation; empty but inside of `replacing`."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The output (batch, query, head, width) and no weights, as `AttentionInterface` has it.

    A module that can say what it computes hands over the whole `AttentionCall` as the option `described`.
    """
    causal_site = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    call = options.get("described")
    if call is None:
        call = _call(query, key, value, attention_mask, scaling, causal_site, options)
    if dropout:
        call = replace(call, dropout=dropout)
    return dispatch(module, call, causal_site).transpose(1, 2).contiguous(), None


def dispatch(module: nn.Module, call: AttentionCall, causal_site: bool) -> Tensor:
    """The output of a call, (batch, head, query, width), shown to whoever watches it.

    It is that of the module's constants and of its other operation, where such have been put in.
    """
    uses = module._modules.get(NAME)
    if isinstance(uses, ConstantHeadsByCall):
        call = uses.constant(call)
    swap = OVERRIDES.get(module)
    if swap is not None:
        call = swap.swapped(call)
    watching: list[Observer] = []
    names: frozenset[str] = frozenset()
    first = 1
    for observer in OBSERVERS.get(module, ()):
        answer = observer.before(module, call, causal_site)
        if answer is not None:
            call, wanted = answer
            names, first = names | wanted.names, max(first, wanted.num_first_keys)
            watching.append(observer)
    output, reductions = attend(call, ReductionRequest(names=names, num_first_keys=first))
    for observer in watching:
        observer.after(module, call, output, reductions)
    return output


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    causal_site: bool,
    options: dict[str, Any],
) -> AttentionCall:
    """The host's arguments as a call."""
    if options.get("cache") is not None:
        raise UserError("cannot observe attention over a paged cache: generate without continuous batching")
    queries, keys = query.shape[2], key.shape[2]
    causal = mask is None and causal_site and queries > 1
    if causal and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
        keys = queries
    bias = options.get("position_bias")
    masks = _masks(mask, keys)
    if bias is not None:
        bias = bias[..., :keys]
        additive = masks.pop("bias", None)
        masks["bias"] = bias if additive is None else bias + additive
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        sink=options.get("s_aux"),
        **{"causal": causal, **masks},
    )


def _masks(mask: Tensor | None, keys: int) -> dict[str, Any]:
    """A mask in the words of a call: in short where our own mask function left a hint, else entry by entry."""
    if mask is None:
        return {}
    said = hint(mask)
    if said is not None and mask.shape[-1] == keys:
        return said
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return {"keep": mask}
    keep = mask > torch.finfo(mask.dtype).min / 2
    shift = mask.masked_fill(~keep, 0.0)
    return {"keep": keep, "bias": shift} if bool(shift.any()) else {"keep": keep}


def add_observer(modules: Sequence[nn.Module], observer: Observer) -> None:
    """From now on the observer sees the calls of these modules."""
    for module in modules:
        OBSERVERS.setdefault(module, []).append(observer)


def remove_observer(modules: Sequence[nn.Module], observer: Observer) -> None:
    """The observer sees them no more."""
    for module in modules:
        left = [other for other in OBSERVERS.get(module, []) if other is not observer]
        if left:
            OBSERVERS[module] = left
        else:
            OBSERVERS.pop(module, None)
