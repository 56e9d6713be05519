"""What the tensors of a forward are made of: of what a block has returned, or of what the module was passed alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from regard.attention.call import num_writes

_CONSTANT = frozenset({"arange", "empty", "eye", "ones", "rand", "randn", "zeros"})
"""Functions that make a tensor of none."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Types of arguments that hold no tensor."""
IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__iand__")
"""Operators that change their first argument; functions that do end in one underscore."""


def writes(name: str) -> bool:
    """Return whether a function changes its first argument, by its name."""
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


class DataFlow(threading.local):
    """Follows the functions that a thread calls in a forward of a module of nobody's library.

    A tensor is made of what a block has returned if one of those that a function read to make it is, or if a block
    made it. It is not if all of these are inputs of the forward, weights, constants, or made of such. Of others, as
    of those that come from NumPy, nothing is known.
    """

    def __init__(self) -> None:
        self.is_on = self.in_block = False
        self._notes: dict[int, tuple[ReferenceType[Tensor], int | None, bool]] = {}
        """Each tensor that something is known of, how often it had been written to, and whether a block made it."""
        self._is_lost = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward."""
        self.end()
        self.is_on = True
        for tensor in (*module.buffers(), *(one for one in _flatten((args, kwargs)) if isinstance(one, Tensor))):
            self._note(tensor, False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside the block, which computes for others than the module."""
        is_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = is_on

    def end(self) -> None:
        """Forget everything."""
        self.is_on = self.in_block = self._is_lost = False
        self._notes.clear()

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Note what a function has made of its arguments, and return it; of an iterator, one over the same."""
        if args and result is args[0] and "out" not in kwargs and not writes(name):
            return result  # as of `to`, and of dropout in evaluation
        if self.in_block and type(result) is Tensor and name[-1:] != "_":  # the usual case, of hundreds in a forward
            self._notes[id(result)] = ref(result), None, True
            return result
        if name == "__iter__":
            rows = list(result)
            self.follow("unbind", args, kwargs, rows)
            return iter(rows)
        read = [one for one in _flatten((args, kwargs)) if isinstance(one, Tensor)]
        written = [one for one in (args[:1] if writes(name) else (kwargs.get("out"),)) if isinstance(one, Tensor)]
        found = [self._find(one, since=1 if written and one is written[0] else 0) for one in read]
        is_made = self.in_block or (self._join(found) if read or name in _CONSTANT else None)
        if written and is_made is not False and num_writes(written[0]) is None:
            self._is_lost = True  # other views of the same memory may be read
        for one in (*written, *_flatten(result)):
            if isinstance(one, Tensor):
                self._note(one, is_made)
        return result

    def is_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Return whether something among the arguments is made of what a block has returned; None if nobody knows."""
        found = [self._find(one) for one in _flatten((args, kwargs)) if not isinstance(one, _PLAIN)]
        return self._join(found) if found else None

    def _join(self, found: list[bool | None]) -> bool | None:
        """Return what is known of something that is made of tensors, of each of which this is known."""
        if True in found:
            return True
        return None if None in found or self._is_lost else False

    def _find(self, value: Any, since: int = 0) -> bool | None:
        """Return what is known of a tensor that was written to at most so many times since."""
        note = self._notes.get(id(value))
        tensor = None if note is None else note[0]()
        if note is None or tensor is None or tensor is not value:
            return False if isinstance(value, nn.Parameter) else None
        _, before, is_made = note
        return is_made if is_made or (num_writes(tensor) or 0) - (before or 0) <= since else None

    def _note(self, tensor: Tensor, is_made: bool | None) -> None:
        if is_made is None:
            self._notes.pop(id(tensor), None)
        else:
            self._notes[id(tensor)] = ref(tensor), num_writes(tensor), is_made


def _flatten(value: Any) -> Iterator[Any]:
    """Iterate over what stands in lists, tuples and dictionaries, however deep."""
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, (list, tuple, dict)):
            yield from _flatten(one)
        else:
            yield one


FLOW = DataFlow()
"""That of this thread."""
