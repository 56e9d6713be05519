"""Forwards called past the hooks of a model: sentence-transformers calls `model.forward(…)`, not `model(…)`."""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from regard.attention.tracing import is_traced
from regard.hooks.patches import can_patch

FORWARD = "forward"


class _Calls(threading.local):
    """The modules that this thread is calling, hooks and all, as often as it does."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


_CALLS = _Calls()


@cache
def through_hooks(module_class: Any) -> Callable[..., Any]:
    """Return the forward of a class, which calls the module, hooks and all, unless `note_calls` says it is called."""

    @wraps(module_class.forward)
    def call(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if is_traced() or self in _CALLS.modules:
            return module_class.forward(self, *args, **inputs)  # the present one: libraries put their own there
        return self(*args, **inputs)

    return call


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


def note_calls(module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Take note of calls of a module, by hooks before and behind all that it has."""
    before = module.register_forward_pre_hook(_enter, prepend=True)
    return before, module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _args: Any) -> None:
    if not is_traced():
        _CALLS.modules.append(module)


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if not is_traced() and module in _CALLS.modules:
        _CALLS.modules.remove(module)
