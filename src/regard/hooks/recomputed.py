"""Which forward a layer belongs to that a backward pass computes again, as gradient checkpointing does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks.by_thread import ByThread, is_in_backward
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.modules import AttentionLayer

FUNCTION = "_gradient_checkpointing_func"
"""Attribute by which modules of Transformers that checkpoint call what is computed again."""


class StackState(Protocol):
    """What a forward of a stack leaves for its layers."""

    forward: ForwardContext

    def copy(self) -> Any:
        """Return a state of the same forward, at the same layer, that goes on by itself."""
        ...


State = TypeVar("State", bound=StackState)


class Passes(ByThread[State]):
    """The state of the forward that a thread is in; of several forwards, that of the part which is computed again."""

    def __init__(self, first: State) -> None:
        super().__init__(first)
        self._waiting, self._are_several, self._is_computed_again = first, False, True

    @property
    def previous(self) -> State:
        """The state of this thread's forward before one that begins."""
        return self._find_state()

    @property
    def state(self) -> State:
        """The state of this thread's forward.

        Raises:
            UserError: The layer is computed again, and nothing tells which of several forwards it belongs to.
        """
        if not is_traced() and self.is_lost:
            self._is_computed_again = True
            if self._are_several:
                raise UserError(
                    "gradient checkpointing: expected that of Transformers (model.gradient_checkpointing_enable()), or "
                    "one backward pass after each forward with gradients (score inside torch.no_grad()); got a layer "
                    "of one of several forwards with padding or packing"
                )
        return self._find_state()

    @property
    def is_lost(self) -> bool:
        """Whether a layer is computed again by someone who does not say in which forward it was."""
        return is_in_backward() and not self.is_again

    def begin_in(self, stack: nn.Module, state: State) -> None:
        """Begin a forward of a stack in this thread; what its parts compute again belongs to it."""
        self.begin(state)
        if is_traced() or not torch.is_grad_enabled():
            return
        for module in stack.modules():
            function = getattr(module, FUNCTION, None)
            is_used = getattr(module, "gradient_checkpointing", False) and module.training
            if function is not None and is_used and not any(link.passes is self for link in _links(function)):
                setattr(module, FUNCTION, _Checkpointing(function, self))
        if not self.is_again:
            is_alone = self._is_computed_again or (state.forward.is_plain and self._waiting.forward.is_plain)
            self._are_several = not is_alone or (self._are_several and not self._is_computed_again)
            self._waiting, self._is_computed_again = state, False

    def end_in(self, stack: nn.Module) -> None:
        """Leave the checkpointing functions of a stack as they were."""
        for module in stack.modules():
            function = vars(module).get(FUNCTION)
            links = _links(function)
            if any(link.passes is self for link in links):
                function = links[-1].function
                for link in reversed(links):
                    function = function if link.passes is self else _Checkpointing(function, link.passes)
                setattr(module, FUNCTION, function)


def make_passes(layers: Sequence[AttentionLayer], make_state: Callable[[], State]) -> dict[nn.Module, Passes[State]]:
    """Return the forward that each stack of these layers will be in; stacks that share a module are in the same."""
    by_module: dict[nn.Module, Passes[State]] = {}
    for layer in layers:
        passes = by_module.get(layer.module) or by_module.get(layer.stack.module) or Passes(make_state())
        by_module[layer.module] = by_module[layer.stack.module] = passes
    return {stack: by_module[stack] for stack in (layer.stack.module for layer in layers)}


@dataclass(frozen=True)
class _Checkpointing:
    """A checkpointing function that computes a part again in the forward in which it was computed first."""

    function: Callable[..., Any]
    passes: Passes[Any]

    @property
    def keywords(self) -> dict[str, Any]:
        """Options of the checkpointing function."""
        return dict(getattr(self.function, "keywords", {}))

    def __call__(self, part: Callable[..., Any], *args: Any, **options: Any) -> Any:
        state = self.passes.state.copy()

        def compute(*inputs: Any, **named: Any) -> Any:
            if not is_in_backward():
                return part(*inputs, **named)
            with self.passes.again(state.copy()):
                return part(*inputs, **named)

        return self.function(compute, *args, **options)


def _links(function: Any) -> list[_Checkpointing]:
    """Return the functions of several passes around a checkpointing function, the outermost first."""
    links = []
    while isinstance(function, _Checkpointing):
        links.append(function)
        function = function.function
    return links
