"""Reductions of hidden states: small ones wait for those of other layers, and are reduced as one batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regard.attention.call import is_same_view
from regard.attention.device_choice import choose_for
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.alignment import SampleAlignment
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.layer_copies import LayerCopies, split_samples
from regard.hooks.reductions import REDUCTIONS, HiddenStates, to_acc_dtype

MAX_ENTRIES = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Most entries of hidden states that wait: of more, computing takes longer than beginning to."""
MAX_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Most memory of those of a forward that wait, whatever their shapes."""
NAMES = ("hidden_states", "hidden_state")
"""Names by which blocks are passed hidden states, if by any."""


def read_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a block is passed first, or as its hidden states by a usual name; None if neither."""
    return args[0] if args else next((kwargs[name] for name in NAMES if name in kwargs), None)


def as_hidden(value: Any) -> Float[Tensor, "*batch token width"] | None:
    """Return what may be hidden states; None for anything else."""
    return value if isinstance(value, Tensor) and value.ndim in (2, 3) else None


Waited = tuple[Tensor, list[LayerAccumulator]]
"""Hidden states whose rows are those of each of the layers in turn."""


class WaitingHidden:
    """The hidden states of one forward that wait, by their shape."""

    def __init__(self) -> None:
        self._groups: dict[Any, tuple[LayerCopies, list[LayerAccumulator]]] = {}
        self._num_bytes = 0

    def add(self, hidden: Tensor, layer: LayerAccumulator, names: Collection[str], *, most: int) -> list[Waited]:
        """Copy hidden states, which wait with those of so many layers; return what is to be reduced now.

        That is they alone if they are large, or there is no room, and all that wait once those of this shape fill it.
        """
        alone = [(hidden, [layer])]
        if not all(REDUCTIONS[name].joins_calls for name in names) or not (most and hidden.numel()):
            return alone
        if hidden.numel() > choose_for(hidden.device, MAX_ENTRIES):
            return alone
        key, tensors = (hidden.shape, hidden.dtype, hidden.device), {"hidden": hidden.detach()}
        if key not in self._groups:
            left = choose_for(hidden.device, MAX_BYTES) - self._num_bytes
            room = min(most, left // hidden.nbytes)
            if not room:
                return alone
            self._num_bytes += room * hidden.nbytes
            self._groups[key] = LayerCopies(room, tensors), []
        copies, layers = self._groups[key]
        copies.add(tensors)
        layers.append(layer)
        return self.take() if copies.count == copies.room else []

    def take(self) -> list[Waited]:
        """Return all that wait, which wait no longer."""
        groups, self._groups, self._num_bytes = self._groups, {}, 0
        return [(copies.join()["hidden"], layers) for copies, layers in groups.values()]


def reduce_hidden(
    hidden: Tensor,
    layers: Sequence[LayerAccumulator],
    names: Collection[str],
    forward: ForwardContext,
    first: int,
    *,
    sums_tokens: bool,
) -> None:
    """Add reductions of hidden states (batch, token, width), whose rows are those of each of the layers in turn.

    Their tokens are those of a forward from `first` on. Reductions by sample are summed over the real tokens of a row,
    or of each packed sequence in it, unless `sums_tokens` is false.
    """
    copied = to_acc_dtype(hidden.detach())
    if "hidden" in names and is_same_view(copied, hidden):  # the model, or its caller, may write to them
        copied = copied.clone()
    states, tensors = HiddenStates(copied), {}
    for reduction in (REDUCTIONS[name] for name in names):
        tensor = reduction.compute(states)
        is_sum = sums_tokens and reduction.axis == "sample"
        tensors[reduction.name] = _sum_tokens(tensor, len(layers), forward, first) if is_sum else tensor
    for layer, part in zip(layers, split_samples(tensors, len(layers)), strict=True):
        layer.add_tensors(part)


def _sum_tokens(values: Tensor, layers: int, forward: ForwardContext, first: int) -> Tensor:
    """Sum (batch, token, width) over the real tokens of each sample."""
    batch, tokens = values.shape[:2]
    if forward.segments is not None:
        return SampleAlignment.from_masks(batch, tokens, None, forward.segments, values.device).sum_tokens(values)
    mask = forward.token_mask
    if mask is None:
        return values.sum(1)
    weights = mask[:, first : first + tokens, None]
    return (values * (weights if layers == 1 else weights.repeat(layers, 1, 1))).sum(1)
