"""Attributes of models and configurations that are replaced while any block needs them."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

_ABSENT = object()


@dataclass
class _Patch:
    """One replaced attribute: its object, its values before and inside, and how many blocks need the replacement."""

    target: Any
    before: Any
    value: Any
    count: int = 0


_PATCHES: dict[tuple[int, str], _Patch] = {}
"""Attributes replaced now, by the identity of their object and their name; empty outside of blocks."""
LOCK = threading.RLock()
"""Held while blocks are entered and left."""


@contextmanager
def patched(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of objects inside the block.

    Blocks may overlap and end in any order: the first decides the value of an attribute, and the last restores it,
    unless it was changed inside.
    """
    attributes = list(attributes)
    entered: list[tuple[int, str]] = []
    try:
        with LOCK:
            for target, name, value in attributes:
                key = (id(target), name)
                if key not in _PATCHES:
                    _PATCHES[key] = _Patch(target, vars(target).get(name, _ABSENT), value)
                    setattr(target, name, value)
                _PATCHES[key].count += 1
                entered.append(key)
        yield
    finally:
        with LOCK:
            for key in reversed(entered):
                _leave(key)


def _leave(key: tuple[int, str]) -> None:
    patch, name = _PATCHES[key], key[1]
    patch.count -= 1
    if patch.count:
        return
    del _PATCHES[key]
    if vars(patch.target).get(name, _ABSENT) != patch.value:
        return  # the user has changed it inside the block
    if patch.before is _ABSENT:
        delattr(patch.target, name)
    else:
        setattr(patch.target, name, patch.before)


def can_patch(target: Any, name: str) -> bool:
    """Return whether an object has no attribute of its own by this name, other than a block's or its class's method."""
    if name not in vars(target) or (id(target), name) in _PATCHES:
        return True
    value = vars(target)[name]
    return isinstance(value, MethodType) and value == MethodType(getattr(type(target), name), target)
