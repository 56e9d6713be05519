"""Which tokens cross-attention reads: those of the forward whose states the decoder is passed."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from regard.attention.call import is_same_view, num_writes
from regard.hooks.arguments import tensors_of


class EncoderTokens:
    """The token ids that forwards of stacks have read, for the decoder that is passed their states.

    States are told by the tensor, as long as it is there and nobody has written to it. States that are no stack's
    output as it was, such as projected ones, are those of the only encoder of the whole model's forward: the one that
    ran in it, or whose states it was passed. Of states from elsewhere nobody knows it, so there are no tokens: they may
    be another text's, or in another order.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[ReferenceType[Tensor], int | None, Tensor]] = []
        self._passed: list[Tensor] | None = None
        """Tokens of the states that the whole model was passed in the forward under way; None outside of one."""
        self._latest: dict[str, tuple[int, Tensor | None]] = {}
        """How many forwards of a stack there were in it, and the tokens of the latest."""

    def begin(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward of the whole model."""
        found = (self._find(states) for value in (*args, *kwargs.values()) for states in tensors_of(value))
        self._passed, self._latest = [tokens for tokens in found if tokens is not None], {}

    def end(self, *_: Any) -> None:
        """End it."""
        self._passed, self._latest = None, {}

    def add(self, path: str, tokens: Tensor | None, output: Any) -> None:
        """Note that a stack has read these tokens, and what it returned."""
        self._latest[path] = self._latest.get(path, (0, None))[0] + 1, tokens
        states = next(tensors_of(output), None)
        self._outputs = [one for one in self._outputs if one[0]() is not None]
        if tokens is not None and states is not None:
            self._outputs.append((ref(states), num_writes(states), tokens))

    def take(self, path: str, states: Tensor | None) -> Tensor | None:
        """Return the tokens of the states that a stack is passed as it begins a sequence; None if they are unknown."""
        known = None if states is None else self._find(states)
        if known is not None or self._passed is None:
            return known
        others = [latest for other, latest in self._latest.items() if other != path and latest[1] is not None]
        candidates = [*self._passed, *(tokens if count == 1 else None for count, tokens in others)]
        return candidates[0] if len(candidates) == 1 else None

    def _find(self, states: Tensor) -> Tensor | None:
        """Return the tokens of states that a stack has returned, and that are as they were."""
        for output, writes, tokens in self._outputs:
            known = output()
            if known is not None and is_same_view(known, states) and num_writes(states) == writes:
                return tokens
        return None
