"""Cache layers without the keys of constant heads: a layer with other heads holds theirs, one without holds none.

A layer of a cache becomes such a layer behind its first call, if the host hands what the layer holds to attention as it
is. What the layer returns from then on are the keys that it holds, or zeros, without memory, in the shape of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from regard.attention.call import as_tensor
from regard.errors import UserError


class PartialKeys(CacheLayerMixin):
    """What changes in a cache layer of Transformers that holds the keys of some heads.

    Attributes:
        key_heads: These heads. If there are none, keys are zeros of width 1, which say how many tokens there are.
        is_expected: The module that comes next has these constant heads; others would read keys that are not there.
    """

    full: type
    key_heads: tuple[int, ...]
    is_expected: bool
    keys: Any

    def expect(self, key_heads: tuple[int, ...] | None) -> None:
        """Note that the next update comes from a module whose dynamic heads read these key heads; None: all."""
        self.is_expected = key_heads == self.key_heads

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all: the keys that are held, or zeros in the shape of all.

        Raises:
            UserError: A module needs other keys than those that are held.
        """
        layer: Any = super()
        if not self.is_expected:
            self._hold_all()
            return self.update(key_states, value_states, *args, **options)
        self.is_expected = False
        batch, heads, tokens, width = key_states.shape
        if self.key_heads:
            held = key_states.index_select(1, as_tensor(self.key_heads, key_states.device))
        else:
            held = key_states.new_zeros(batch, self.keys.shape[1], tokens, 1)
        keys, values = layer.update(held, value_states, *args, **options)
        return (keys if self.key_heads else keys.expand(-1, heads, -1, width)), values

    def reset(self) -> None:
        """Forget all tokens; a layer that grows then holds all keys again."""
        layer: Any = super()
        layer.reset()
        if self.keys is None:
            self.__class__ = self.full

    def _hold_all(self) -> None:
        """Become a layer of all keys again. Raise a UserError unless it is empty."""
        layer: Any = self
        if int(layer.get_seq_length()):
            raise UserError(
                "this cache holds no keys of the heads that were constant when it was filled; go on with the model and "
                "the constant heads that filled it, or begin with an empty cache"
            )
        self.__class__ = self.full
        layer.is_initialized = False


class PartialDynamicLayer(PartialKeys, DynamicLayer):
    """`DynamicLayer` with the keys of some heads."""

    full = DynamicLayer


class PartialSlidingLayer(PartialKeys, DynamicSlidingWindowLayer):
    """`DynamicSlidingWindowLayer` with the keys of some heads."""

    full = DynamicSlidingWindowLayer


class PartialStaticLayer(PartialKeys, StaticLayer):
    """`StaticLayer` without keys."""

    full = StaticLayer


class PartialStaticSlidingLayer(PartialKeys, StaticSlidingWindowLayer):
    """`StaticSlidingWindowLayer` without keys."""

    full = StaticSlidingWindowLayer


PARTIAL: dict[type, Any] = {
    layer.full: layer
    for layer in (PartialDynamicLayer, PartialSlidingLayer, PartialStaticLayer, PartialStaticSlidingLayer)
}
"""Layers with the keys of some heads by the class of those with all. Quantized and offloaded keys stay whole."""


def find_cache_layer(cache: Any, module: nn.Module) -> Any:
    """Return the layer of a cache in which a module keeps keys and values; None if there is none yet."""
    index = getattr(module, "layer_idx", None)
    layers = getattr(cache, "layers", ())
    return layers[index] if isinstance(index, int) and -len(layers) <= index < len(layers) else None


def check_holds_all(layer: Any) -> None:
    """Raise a UserError for a plain dynamic layer with keys of fewer heads than it has values, or of width 1.

    It was made of the tensors of a layer that holds the keys of some heads; nothing in them says of which.
    """
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None or not layer.keys.numel():
        return
    (_, key_heads, _, width), (_, heads, _, value_width) = layer.keys.shape, layer.values.shape
    if key_heads < heads or width == 1 < value_width:
        raise UserError(
            "this cache was made of the keys and values of another, which has no keys of the heads that were constant "
            "when it was filled; go on with that one or a copy of it (copy.deepcopy), or begin with an empty cache"
        )


def is_handed_on(tensor: Tensor, held: Any) -> bool:
    """Return whether a tensor (batch, head, token, width) shows what a cache layer holds, maybe of more or less tokens.

    Both are views of one storage then, with the same strides; a host that changes or repeats what it gets from a cache
    makes another storage.
    """
    return (
        isinstance(held, Tensor)
        and tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        and tensor.stride() == held.stride()
        and (*tensor.shape[:2], tensor.shape[3]) == (*held.shape[:2], held.shape[3])
    )


def drop_keys(layer: Any, key_heads: tuple[int, ...]) -> None:
    """Let a cache layer hold the keys of these heads alone, if it can.

    Static layers have as many heads of keys as of values.
    """
    partial = PARTIAL.get(type(layer))
    is_static = isinstance(layer, StaticLayer)
    if partial is None or (is_static and key_heads):
        return
    if key_heads:
        layer.keys = layer.keys.index_select(1, as_tensor(key_heads, layer.keys.device))
    else:
        batch, heads, tokens, _ = layer.keys.shape
        layer.keys = layer.keys.new_zeros(batch, heads if is_static else 1, tokens, 1)
        if is_static:
            layer.k_head_dim = 1
            torch._dynamo.mark_static_address(layer.keys)
    layer.__class__ = partial
    layer.key_heads, layer.is_expected = key_heads, False


def is_close(keys: Tensor, observed: Tensor) -> Tensor:
    """Return where keys are those observed, but for rounding: a cache of latent vectors computes them at each step.

    Rounding is by the size of an entry, which a bias may make far larger than others, or of most entries.
    """
    info = torch.finfo(keys.dtype)
    largest = observed.abs().amax(dim=(0, 1))
    return (keys - observed).abs() <= (2 if info.bits == 16 else 32) * info.eps * largest.maximum(largest.median())


def check_same_keys(now: Tensor, observed: Tensor) -> None:
    """Raise a UserError if entries (row, key, entry) of a cache's keys are not those observed before, or no numbers."""
    if torch.equal(now, observed) or bool(is_close(now, observed).all()):
        return
    if not bool(observed.isfinite().all()):
        raise UserError("non-finite activations: keys in a cache; check the model and its precision")
    if bool(is_close(now[:, None], observed).flatten(2).all(-1).any(1).all()):
        raise UserError("cannot observe beam search: the rows of its cache are reordered between steps")
    raise UserError(
        "cannot observe this cache: its keys are not those that were observed; another model has filled it, this one "
        "has outside of the block, or the cache changes what it holds, as a quantized one does; go on with a cache "
        "that this model alone fills, inside the block"
    )


def lent_cache(stack: str, tokens: int, lender: str) -> UserError:
    """Return the error of a stack that goes on behind so many tokens in the cache of another."""
    return UserError(
        f"cannot observe {stack}: it goes on behind the {tokens} tokens in the cache of another part, {lender}, and "
        "attends to keys that are not its own"
    )


def unknown_cache(tokens: int, observed: int) -> UserError:
    """Return the error of a cache of which other tokens were observed than those that it holds."""
    problem = f"it holds {tokens} tokens, of which {observed} were observed"
    if not observed:
        problem += ": another model filled it, or this one outside of the block"
    return UserError(
        f"cannot observe this cache: {problem}; start the sequence inside the block, and neither crop nor reorder its "
        "cache"
    )
