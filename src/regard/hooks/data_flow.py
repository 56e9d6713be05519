"""What the tensors of a forward are made of: of what a block has returned, and of which inputs of the module."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from regard.attention.call import num_writes
from regard.attention.tracing import is_transformed
from regard.hooks.module_tree import modules_of

_CONSTANT = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros"}
)
"""Functions that make a tensor of none, as do `new_zeros`, `ones_like` and the like of the shape of one."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Types of arguments that hold no tensor."""
IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__iand__")
"""Operators that change their first argument; functions that do end in one underscore."""
MADE, UNKNOWN, OPEN, INPUT = 1, 2, 4, 8
"""Bits of an origin: of a block, of something unknown, perhaps of more inputs than told; then one for each input."""


def writes(name: str) -> bool:
    """Return whether a function changes its first argument, by its name."""
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


class DataFlow(threading.local):
    """Follows the functions that a thread calls in a forward.

    The origin of a tensor has the bits of all that a function read to make it, and `MADE` if a block made it. It has
    none if all of these are weights, other tensors that modules hold, constants, or made of such. Of others, as of
    those that come from NumPy, nothing is known.
    """

    def __init__(self) -> None:
        self.is_on = self.in_block = self.is_alone = False
        """Whether a forward is followed, is in a block, and in one that was called by itself."""
        self._notes: dict[int, tuple[ReferenceType[Tensor], int | None, int]] = {}
        """Each tensor that something is known of, how often it had been written to, and its origin."""
        self._written: dict[int, int] = {}
        """Memory that was written to where nothing counts it, and what other tensors there may have beside theirs."""
        self._module: nn.Module | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward."""
        self.end()
        self.is_on, self._module = True, module
        for part in modules_of(module):
            for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
                if type(tensor) is Tensor:
                    self._note(tensor, 0)
        inputs = (one for one in _flatten((args, kwargs)) if isinstance(one, Tensor))
        for index, tensor in enumerate(inputs):
            self._note(tensor, INPUT << index)

    def is_of(self, module: nn.Module) -> bool:
        """Return whether the forward is that of this module."""
        return self._module is module

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
        self.is_on = self.in_block = self.is_alone = False
        self._module = None
        self._notes.clear()
        self._written.clear()

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Note what a function has made of its arguments, and return it; of an iterator, one over the same."""
        if args and result is args[0] and "out" not in kwargs and not writes(name):
            return result  # as of `to`, and of dropout in evaluation
        if name == "__iter__":
            rows = list(result)
            self.follow("unbind", args, kwargs, rows)
            return iter(rows)
        given = (args[1:], kwargs) if name.endswith("_like") or name.startswith("new_") else (args, kwargs)
        read = [one for one in _flatten(given) if isinstance(one, Tensor)]
        written = [one for one in (args[:1] if writes(name) else (kwargs.get("out"),)) if isinstance(one, Tensor)]
        origin = self._join(self._find(one, since=1 if written and one is written[0] else 0) for one in read)
        if not read and given[0] is args and name not in _CONSTANT:
            origin = UNKNOWN
        if self.in_block:
            origin |= MADE
        for one in (*written, *_flatten(result)):
            if isinstance(one, Tensor):
                self._note(one, origin)
        if written and origin and num_writes(written[0]) is None:
            place, before = _place(written[0]), self._written.get(_place(written[0]), 0)
            self._written[place] = before | (UNKNOWN if origin & (MADE | UNKNOWN) else OPEN)
        return result

    def is_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Return whether something among the arguments is made of what a block has returned; None if nobody knows."""
        found = [self._find(one) for one in _flatten((args, kwargs)) if not isinstance(one, _PLAIN)]
        origin = self._join(found) if found else UNKNOWN
        return True if origin & MADE else None if origin & UNKNOWN else False

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor is known to be made of weights, buffers and constants alone."""
        return not self._find(tensor) & ~MADE

    def is_of_inputs(self, tensor: Tensor) -> bool:
        """Return whether a tensor is known to be made of inputs of the forward."""
        return self._find(tensor) >= INPUT

    def are_apart(self, factors: Iterable[Tensor], value: Tensor) -> bool:
        """Return whether values are known to be of no input that queries, or keys, are of.

        A block that is called by itself may be passed all of them.
        """
        of_value, origins = self._find(value), [self._find(one) for one in factors]
        if any(one & (UNKNOWN | OPEN) for one in (of_value, *origins)) or (self.is_alone and of_value >= INPUT):
            return False
        return any(one >= INPUT and not one & of_value & ~MADE for one in origins)

    def _join(self, found: Iterable[int]) -> int:
        """Return the origin of something that is made of tensors of these."""
        joined = 0
        for origin in found:
            joined |= origin
        return joined

    def _find(self, value: Any, since: int = 0) -> int:
        """Return the origin of a tensor that was written to at most so many times since."""
        note = self._notes.get(id(value))
        tensor = None if note is None else note[0]()
        if note is None or tensor is None or tensor is not value:
            return 0 if isinstance(value, nn.Parameter) else UNKNOWN
        _, before, origin = note
        if before is None:
            return origin | (self._written.get(_place(tensor), 0) if self._written else 0)
        return origin if tensor._version - before <= since else origin | UNKNOWN

    def _note(self, tensor: Tensor, origin: int) -> None:
        self._notes[id(tensor)] = ref(tensor), num_writes(tensor), origin


def _place(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor; 0 of those that have none of their own."""
    return 0 if is_transformed(tensor) else tensor.untyped_storage().data_ptr()


def _flatten(value: Any) -> Iterator[Any]:
    """Iterate over what stands in lists, tuples and dictionaries, however deep."""
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, (list, tuple, dict)):
            yield from _flatten(one)
        else:
            yield one


FLOW = DataFlow()
"""That of this thread."""
