"""Forwards called past the hooks of a model: sentence-transformers calls `model.forward(…)`, not `model(…)`."""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from types import FrameType, MethodType
from typing import Any

from torch import nn

from regard.attention.tracing import is_traced
from regard.hooks.patches import can_patch

FORWARD = "forward"
_CALL, _CALLED_FROM = "_call_impl", nn.Module._call_impl.__code__.co_filename
"""The function of PyTorch that calls a module with its hooks; a part of its name where it is compiled."""


@cache
def through_hooks(module_class: Any) -> Callable[..., Any]:
    """Return the forward of a class, which calls the module, hooks and all, unless it is inside of such a call."""

    @wraps(module_class.forward)
    def call(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if is_traced() or _is_called(self):
            return module_class.forward(self, *args, **inputs)  # the present one: libraries put their own there
        return self(*args, **inputs)

    return call


def _is_called(module: nn.Module) -> bool:
    """Return whether this thread is in a call of a module, hooks and all; no trace stays of one that is broken off."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if _CALL in code.co_name and code.co_filename == _CALLED_FROM and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def forwards_through_hooks(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, MethodType]]:
    """Yield such forwards as attributes to set, of modules that have none of their own."""
    for module in modules:
        if can_patch(module, FORWARD):
            module_class: Any = type(module)
            yield module, FORWARD, MethodType(through_hooks(module_class), module)


def set_forwards(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, MethodType]]:
    """Set them for good, and return what `restore_forwards` takes."""
    attributes = list(forwards_through_hooks(modules))
    for module, name, forward in attributes:
        setattr(module, name, forward)
    return attributes


def restore_forwards(attributes: Iterable[tuple[nn.Module, str, MethodType]]) -> None:
    """Undo that, unless another forward was set since."""
    for module, name, forward in attributes:
        if vars(module).get(name) == forward:
            delattr(module, name)
