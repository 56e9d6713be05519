"""What a forward says to the constant heads of its layers: where tokens stand, and what masks hide beside padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.attention.tracing import is_traced
from regard.hooks.forward_pass import ForwardContext, keeps_apart, meet_anywhere, segment_starts
from regard.hooks.recomputed import Passes

MaskAnswers = dict[tuple[int, ...], tuple[Tensor, bool]]
"""View of a mask → the mask and the answer."""
KEPT_MASKS = 2
"""As many kinds of masks as models alternate between layers."""


@dataclass
class PassState:
    """The forward that a stack is in, shared by its layers.

    A shift is the column of each sample's first real token, None if all begin at 0. `block_starts` is where the block
    of each token begins, of a mask of pairs that keeps blocks apart. `hides_padding_alone` says of each mask so far
    whether it hides nothing but padding, `separates` whether it keeps packed sequences apart. `uses` counts the calls
    of each module that is called more than once; `caches` has the cache that each was passed.
    """

    forward: ForwardContext = field(default_factory=ForwardContext)
    shift: Tensor | None = None
    encoder_shift: Tensor | None = None
    block_starts: Tensor | None = None
    hides_padding_alone: MaskAnswers = field(default_factory=dict)
    separates: MaskAnswers = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    caches: dict[int, Any] = field(default_factory=dict)

    @cached_property
    def is_unmasked(self) -> bool:
        """Whether no token so far is padding, and each row is one sequence."""
        masks = (self.shift, self.encoder_shift, self.block_starts, self.forward.token_mask, self.forward.segments)
        return all(value is None for value in masks)

    def copy(self) -> PassState:
        """Return a state of the same forward that goes on to count by itself."""
        return replace(self, uses=dict(self.uses)) if self.uses else self

    def packed_starts(self, call: AttentionCall) -> Tensor | None:
        """Return the column at which the sequence of each token begins, (batch, token); None if rows are whole."""
        if self.block_starts is not None:
            return self.block_starts
        segments = self.forward.segments
        if segments is None or call.keep is None:
            return None
        if is_traced():
            starts = segment_starts(segments).masked_fill(meet_anywhere(call.keep, segments), 0)
            return starts.expand(call.query.shape[0], -1)
        are_apart = ask_once(self.separates, call.keep, lambda: keeps_apart(call, segments))
        return segment_starts(segments).expand(len(call.query), -1) if are_apart else None


def ask_once(answers: MaskAnswers, mask: Tensor, ask: Callable[[], bool]) -> bool:
    """Return the answer on a mask, which may be known from another layer.

    A mask is kept with its answer: else one that was made for a call would leave its address to that of another.
    """
    view = (mask.data_ptr(), *mask.shape, *mask.stride())
    if view not in answers:
        if len(answers) == KEPT_MASKS:
            del answers[next(iter(answers))]
        answers[view] = mask, ask()
    return answers[view][1]


def _find_shift(mask: Tensor | None) -> Tensor | None:
    if mask is None or (not is_traced() and bool(mask[:, 0].all())):
        return None
    return mask.int().argmax(-1)


def begin_pass(passes: Passes[PassState], stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep what the arguments of a forward of a stack say; a hook before each forward."""
    forward = ForwardContext.from_arguments(stack, args, kwargs, passes.previous.forward)
    shift, encoder_shift = _find_shift(forward.token_mask), _find_shift(forward.encoder_mask)
    passes.begin_in(stack, PassState(forward, shift, encoder_shift, forward.find_block_starts()))
