"""What a forward leaves for its layers, by the thread that computes it: one model may serve several threads at once."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn

from regard.attention.tracing import is_traced
from regard.errors import UserError

State = TypeVar("State")


def hook_before(module: nn.Module, function: Callable[..., Any]) -> Any:
    """Register a function of a module and its arguments before its forward; the handle that is returned removes it.

    Beside a forward in another thread PyTorch may call it without keyword arguments, while it is put in or taken out:
    then it does nothing.
    """
    return module.register_forward_pre_hook(partial(_call_whole, function), with_kwargs=True)


def _call_whole(
    function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    return None if kwargs is None else function(module, args, kwargs)


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass, which computes a layer again if it computes one."""
    return _find_backward() != _NONE


def is_computed_again(name: str) -> bool:
    """Return whether this thread is in a backward pass, which computes the forward of a stack of this name again.

    It does so in a function with a backward of its own, or in `torch.utils.checkpoint`, as the Python stack shows.

    Raises:
        UserError: A hook of the backward pass has begun the forward.
    """
    frame: FrameType | None = sys._getframe(1)
    if not is_in_backward():
        return False
    while frame is not None and frame.f_code is not _BEGINS_BACKWARD:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__ or frame.f_code in _COMPUTE_AGAIN:
            return True
        frame = frame.f_back
    raise UserError(
        f"cannot observe a forward of {name} that a hook of a backward pass begins; call the model outside of it"
    )


_BEGINS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_COMPUTE_AGAIN = frozenset(
    function.__code__
    for name, function in vars(torch.autograd.function.BackwardCFunction).items()
    if name in ("apply", "apply_boxed")
)
_NONE = -1


def _find_backward() -> int:
    """Return the number of the backward pass that this thread is in."""
    return int(torch._C._current_graph_task_id())


class ByThread(Generic[State]):
    """The state of the forward that a thread is in.

    A thread that has begun none gets that of the latest forward, as does all code after a forward that began in a
    graph. A forward that begins in a backward pass is forgotten with it.
    """

    def __init__(self, first: State) -> None:
        self._latest, self._began_in_graph, self._own = first, False, threading.local()

    def begin(self, state: State) -> None:
        if not is_traced() and is_in_backward():
            self._own.again = _find_backward(), state
            return
        self._latest, self._began_in_graph = state, is_traced()
        if not is_traced():  # a graph has no threads
            self._own.state = state

    @property
    def state(self) -> State:
        return self._find_state()

    def _find_state(self) -> State:
        """Return the state of this thread's forward: not by `super().state`, which no graph can hold."""
        if is_traced():
            return self._latest
        if self.is_again:
            return self._own.again[1]
        return self._latest if self._began_in_graph else getattr(self._own, "state", self._latest)

    @property
    def is_again(self) -> bool:
        """Whether a forward has begun in the backward pass that this thread is in."""
        backward, _ = getattr(self._own, "again", (_NONE, None))
        return bool(backward != _NONE and backward == _find_backward())

    @contextmanager
    def again(self, state: State) -> Iterator[None]:
        """Be in a forward again inside the block, in a backward pass."""
        before = getattr(self._own, "again", (_NONE, None))
        self.begin(state)
        try:
            yield
        finally:
            self._own.again = before

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._latest,)
