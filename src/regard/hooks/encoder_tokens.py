"""Which tokens cross-attention reads: those of the forward whose states the decoder is passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from regard.attention.call import is_same_view


class EncoderTokens:
    """The token ids that forwards of stacks have read, for the decoder that is passed their states.

    States that were computed ahead are told by the tensor, as long as it is there. Of states that are no stack's output
    as it was, such as projected ones, it is the only forward of another stack since the latest decoder began; of
    several nobody knows which, so there are no tokens.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[ReferenceType[Tensor], Tensor]] = []
        self._latest: dict[str, tuple[int, Tensor | None]] = {}
        """How many forwards of a stack no decoder has taken yet, and the tokens of the latest."""

    def add(self, path: str, tokens: Tensor | None, output: Any) -> None:
        """Note that a stack has read these tokens, and what it returned."""
        self._latest[path] = self._latest.get(path, (0, None))[0] + 1, tokens
        states = _find_states(output)
        self._outputs = [one for one in self._outputs if one[0]() is not None]
        if tokens is not None and states is not None:
            self._outputs.append((ref(states), tokens))

    def take(self, path: str, states: Tensor | None) -> Tensor | None:
        """Return the tokens of the states that a stack is passed as it begins a sequence; None if they are unknown."""
        others = (other for other, (_, tokens) in self._latest.items() if other != path and tokens is not None)
        count, latest = self._latest.pop(next(others, ""), (0, None))
        for output, tokens in self._outputs:
            known = output()
            if known is not None and states is not None and is_same_view(known, states):
                return tokens
        return latest if count == 1 else None


def _find_states(output: Any) -> Tensor | None:
    """Return the first tensor of numbers that a forward has returned."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
