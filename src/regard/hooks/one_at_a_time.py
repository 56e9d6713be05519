"""Forwards of an observed model, which wait for each other where several threads call it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from regard.errors import UserError
from regard.hooks.patches import LOCK

_LOCKS: WeakKeyDictionary[nn.Module, ReferenceType["_Queue"]] = WeakKeyDictionary()
"""The lock of the blocks that are open on a module: two locks could be taken in two orders."""
PATIENCE = 1.0
"""Seconds after which a thread that waits asks whether the one it waits for has ended."""


class _Queue:
    """A lock that a thread may take several times, and that goes to who has waited longest.

    One of `threading` goes to a thread that calls the model again and again, and others wait for ever. What a thread
    held when it ended, as one that was cancelled inside a forward, is taken from it.
    """

    def __init__(self) -> None:
        self._guard, self._times = threading.Lock(), 0
        self._owner: threading.Thread | None = None
        self._waiting: deque[tuple[threading.Thread, threading.Lock]] = deque()

    def acquire(self) -> None:
        place = threading.current_thread(), threading.Lock()
        with self._guard:
            if self._owner in (None, place[0]):
                self._owner, self._times = place[0], self._times + 1
                return
            self._waiting.append(place)
            place[1].acquire()
        try:
            while not place[1].acquire(timeout=PATIENCE):  # until `release` gives it
                self._take_from_ended()
        except BaseException:
            with self._guard:
                is_given = place not in self._waiting
                if not is_given:
                    self._waiting.remove(place)
            if is_given:
                self.release()
            raise

    def release(self) -> None:
        with self._guard:
            self._times -= 1
            if not self._times:
                self._give()

    def _give(self) -> None:
        """Give the lock, which nobody has, to who has waited longest."""
        self._owner = None
        if self._waiting:
            (self._owner, gate), self._times = self._waiting.popleft(), 1
            gate.release()

    def _take_from_ended(self) -> None:
        with self._guard:
            if self._owner is not None and not self._owner.is_alive():
                self._give()


class _Turns(threading.local):
    """What this thread has entered and not left: modules, and None for a block."""

    def __init__(self) -> None:
        self.entered: list[nn.Module | None] = []


class OneAtATime:
    """Lets a forward of some modules begin once none of another thread is under way; those of one thread may nest.

    As a context it keeps forwards of other threads out of a block.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._lock, self._thread, self._is_over = _find_lock(modules), _Turns(), False

    @property
    def is_mine(self) -> bool:
        """Whether this thread is in a forward that has begun inside the block."""
        return bool(self._thread.entered) and not self._is_over

    def keep_out(self) -> None:
        """Wait for forwards that have begun in other threads, and keep others out until `let_in`, or `let_go`."""
        self._enter(None)

    def let_in(self) -> None:
        """Let forwards of other threads begin again."""
        self._leave(None)

    def __enter__(self) -> None:
        self.keep_out()

    def __exit__(self, *_error: object) -> None:
        self.let_in()

    def end_block(self) -> None:
        """Wait for forwards that have begun in other threads; later ones do not belong to the block.

        They wait until `let_go`.
        """
        try:
            self.keep_out()
        finally:
            self._is_over = True

    def let_go(self) -> None:
        """Leave all that this thread is in: an interrupted forward leaves its modules here."""
        self._is_over = True
        while self._thread.entered:
            self._leave(self._thread.entered[-1])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, _args: Any) -> None:
        """Wait; a hook before a forward."""
        if getattr(module, "_is_replica", False):  # its copies would wait for the module that waits for them
            raise UserError("devices: cannot observe a model inside DataParallel; start a process for each device")
        self._enter(module)
        if self._is_over:
            self._leave(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Let others go on; a hook after a forward, also one that failed, perhaps before it came to `begin`."""
        self._leave(module)

    def register(self, modules: Sequence[nn.Module], stack: ExitStack) -> Callable[[], None]:
        """Register `begin` before all other hooks of modules, until a stack is left; return what registers `end`.

        That stands behind the hooks that are registered in between.
        """
        for module in modules:
            stack.callback(module.register_forward_pre_hook(self.begin, prepend=True).remove)

        def register_end() -> None:
            for module in modules:
                stack.callback(module.register_forward_hook(self.end, always_call=True).remove)

        return register_end

    def _enter(self, module: nn.Module | None) -> None:
        self._lock.acquire()
        self._thread.entered.append(module)

    def _leave(self, module: nn.Module | None) -> None:
        """Leave a module that was entered, and those inside that an interrupt has left in its place."""
        entered = self._thread.entered
        while module in entered:
            is_it = entered.pop() is module
            self._lock.release()
            if is_it:
                return

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_idle, ()


def _find_lock(modules: Sequence[nn.Module]) -> _Queue:
    """Return the lock of the blocks that are open on one of some modules, or a new one."""
    with LOCK:
        known = [lock for lock in (_LOCKS[module]() for module in modules if module in _LOCKS) if lock is not None]
        lock = known[0] if known else _Queue()
        for module in modules:
            _LOCKS[module] = ref(lock)
    return lock


def _make_idle() -> OneAtATime:
    """Return what the copy of a model has, which nobody observes."""
    turns = OneAtATime()
    turns.end_block()
    turns.let_go()
    return turns
