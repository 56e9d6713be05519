"""Forwards called past the hooks of a model: sentence-transformers calls `model.forward(…)`, not `model(…)`."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
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
    """Return the forward of a class, which calls the module, hooks and all, unless it is inside of such a call.

    It has no `__wrapped__`: accelerate's `unwrap_model` would put what that names in its place.
    """

    @wraps(module_class.forward)
    def call(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        called = self if is_traced() else _find_called(self)
        if called is None:
            with _without_wrappers(self, call):
                return self(*args, **inputs)
        return module_class.forward(called, *args, **inputs)  # the present one: libraries put their own there

    call.__signature__ = inspect.signature(module_class.forward)  # type: ignore[attr-defined]
    del call.__wrapped__
    return call


@contextmanager
def _without_wrappers(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Call a module without what a library has put around its forward, which is on the stack already.

    Entered twice, the autocast of accelerate's mixed precision would never end.
    """
    wrapper = vars(module).get(FORWARD)
    if wrapper is None or getattr(wrapper, "__func__", None) is call:
        yield
        return
    vars(module)[FORWARD] = MethodType(call, module)
    try:
        yield
    finally:
        vars(module)[FORWARD] = wrapper


class DirectForward:
    """Such a forward, bound to a module: a method that can be pickled, for it is no attribute of the class.

    Like a method it has the attributes of its function; torch.export reads the code.
    """

    def __init__(self, module: nn.Module) -> None:
        module_class: Any = type(module)
        self.__self__, self.__func__ = module, through_hooks(module_class)

    def __getstate__(self) -> nn.Module:
        return self.__self__

    def __setstate__(self, module: nn.Module) -> None:
        self.__init__(module)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name == "__func__":  # of a copy that is not complete
            raise AttributeError(name)
        return getattr(self.__func__, name)

    @property
    def __signature__(self) -> inspect.Signature:
        whole = inspect.signature(self.__func__)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.__func__(self.__self__, *args, **inputs)

    def __eq__(self, other: object) -> bool:
        return (self.__self__, self.__func__) == (getattr(other, "__self__", None), getattr(other, "__func__", None))

    def __hash__(self) -> int:
        return id(self.__self__)


def _find_called(module: nn.Module) -> nn.Module | None:
    """Return what this thread calls, hooks and all: a module, or a copy with its attributes, as of DataParallel.

    It is read from the stack: nothing stays of a call that is broken off.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        is_call = _CALL in code.co_name and code.co_filename == _CALLED_FROM
        if is_call or code.co_filename == __file__:  # of a compiled call from here nothing else may be seen
            called = frame.f_locals.get("self")
            forward = getattr(called, "__dict__", {}).get(FORWARD)
            if called is module or getattr(forward, "__self__", None) is module:
                return called
        frame = frame.f_back
    return None


def is_in_call(modules: Collection[nn.Module]) -> bool:
    """Return whether this thread calls one of some modules, hooks and all, as the stack shows."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _CALL in code.co_name and code.co_filename == _CALLED_FROM and frame.f_locals.get("self") in modules:
            return True
        frame = frame.f_back
    return False


def forwards_through_hooks(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, DirectForward]]:
    """Yield such forwards as attributes to set, of modules that have none of their own."""
    for module in modules:
        if can_patch(module, FORWARD):
            yield module, FORWARD, DirectForward(module)


def set_forwards(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, DirectForward]]:
    """Set them for good, and return what `restore_forwards` takes."""
    attributes = list(forwards_through_hooks(modules))
    for module, name, forward in attributes:
        setattr(module, name, forward)
    return attributes


def restore_forwards(attributes: Iterable[tuple[nn.Module, str, DirectForward]]) -> None:
    """Undo that, unless another forward was set since."""
    for module, name, forward in attributes:
        if vars(module).get(name) == forward:
            delattr(module, name)
