"""Small calls of several layers, which wait until they are reduced together, as one call of more samples.

To begin an operation takes longer than to compute it where samples are short, and on a GPU nearly always. So the calls
of a forward are copied behind each other, and every reduction is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import QKV, AttentionCall, map_fields
from regard.attention.device_choice import choose_for
from regard.attention.tracing import is_transformed
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.layer_copies import LayerCopies

MAX_PAIRS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Most pairs of query and key, over all heads, of a call that waits."""
MAX_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Most memory of the calls of a forward that wait, with one call more at most."""
OF_TOKENS = ("query_mask", "key_mask")
MASKS = ("keep", *OF_TOKENS)


@dataclass(frozen=True)
class Place:
    """Where the reductions of a call belong: to a layer, and there to its queries and to `keys` from `first_key` on.

    `is_self` says whether queries and keys are the same tokens.
    """

    layer: LayerAccumulator
    is_self: bool
    queries: slice
    first_key: int
    keys: int
    virtual_key: bool = False

    @classmethod
    def of(
        cls, call: AttentionCall, layer: LayerAccumulator, *, is_self: bool, start: int, first_key: int, keys: int
    ) -> Place:
        """Return the place of a call whose first query is token `start`."""
        virtual_key = call.operation is not None and call.operation.has_extra_column
        return cls(layer, is_self, slice(start, start + call.query.shape[2]), first_key, keys, virtual_key)

    def add(self, tensors: dict[str, Tensor]) -> None:
        self.layer.add_attention(
            tensors, queries=self.queries, first_key=self.first_key, keys=self.keys, virtual_key=self.virtual_key
        )


@dataclass
class _Group:
    """Calls that differ in queries, keys and values alone.

    `first` is the first of them, whose masks are copies; `masks` are the masks that the calls share, held so that no
    other mask takes their memory.
    """

    first: AttentionCall
    masks: list[Tensor]
    vectors: LayerCopies
    places: list[Place] = field(default_factory=list)

    def join(self) -> AttentionCall:
        """Return the calls as one, whose samples are those of each call in turn."""
        calls, first = len(self.places), self.first
        known = [name for name in OF_TOKENS if getattr(first, name) is not None]
        masks: dict[str, Any] = {name: getattr(first, name).repeat(calls, 1) for name in known}
        keep = first.keep if first.keep is None or len(first.keep) == 1 else first.keep.repeat(calls, 1, 1, 1)
        starts = None if first.starts is None else first.starts * calls
        vectors: dict[str, Any] = self.vectors.join()
        return replace(first, **vectors, **masks, keep=keep, starts=starts)


class WaitingCalls:
    """The calls of one forward that wait, by what they have in common."""

    def __init__(self) -> None:
        self._groups: dict[Any, _Group] = {}
        self._num_bytes = 0

    def add(self, call: AttentionCall, place: Place, *, most: int) -> bool:
        """Let a call wait, of at most so many in the forward; return whether those that wait should be reduced now.

        Calls of one kind get half of the memory that is left, for there may be other kinds: a mask for each layer.
        """
        signature = _signature(call, is_self=place.is_self)
        vectors: dict[str, Any] = {name: getattr(call, name).detach() for name in QKV}
        group = self._groups.get(signature)
        if group is None:
            size, left = _num_bytes(call), choose_for(call.query.device, MAX_BYTES) - self._num_bytes
            copies = LayerCopies(max(min(most, left // 2 // size), 1), vectors)
            self._num_bytes += copies.room * size
            first = replace(map_fields(call, **dict.fromkeys(MASKS, torch.clone)), **vectors, dropout=0.0)
            group = self._groups[signature] = _Group(first, _masks(call), copies)
        group.vectors.add(vectors)
        group.places.append(place)
        return group.vectors.count == group.vectors.room

    def take(self) -> Iterator[tuple[AttentionCall, list[Place]]]:
        """Yield calls joined, and where the reductions of each belong; they wait no longer."""
        groups, self._groups, self._num_bytes = self._groups, {}, 0
        for group in groups.values():
            yield group.join(), group.places


def may_wait(call: AttentionCall) -> bool:
    """Return whether a call is so small that it should wait, and can be a part of one with other layers' calls."""
    batch, heads, queries, _ = call.query.shape
    options = (call.bias, call.sink, call.operation, call.constant, call.query_positions, call.key_positions)
    if any(option is not None for option in options) or any(map(_is_untold, _masks(call))):
        return False
    device = call.query.device
    is_small = batch * heads * queries * call.key.shape[2] <= choose_for(device, MAX_PAIRS)
    return is_small and 4 * _num_bytes(call) <= choose_for(device, MAX_BYTES)


def _masks(call: AttentionCall) -> list[Tensor]:
    return [mask for name in MASKS if (mask := getattr(call, name)) is not None]


def _is_untold(mask: Tensor) -> bool:
    """Return whether nobody can tell if a mask is written to: in inference mode, or a transform of torch.func."""
    return mask.is_inference() or is_transformed(mask)


def _num_bytes(call: AttentionCall) -> int:
    """Return the memory that a call takes while it waits, and when it is joined."""
    copied = sum(getattr(call, name).nbytes for name in QKV)
    return copied + sum(mask.nbytes for mask in _masks(call)) or 1


def _signature(call: AttentionCall, *, is_self: bool) -> Any:
    """Return what calls must have in common. Masks are the same in one place of memory, unless they are written to."""
    vectors = [(part.shape, part.dtype, part.device) for part in (call.query, call.key, call.value)]
    masks = [(mask.data_ptr(), mask.shape, mask.stride(), mask._version) for mask in _masks(call)]
    kinds = [getattr(call, name) is None for name in MASKS]
    return is_self, call.scale, call.causal, call.offset, call.softcap, call.starts, *vectors, *masks, *kinds
