"""Forwards of an observed model, which wait for each other where several threads call it."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from regard.errors import UserError
from regard.hooks.patches import LOCK

_LOCKS: WeakKeyDictionary[nn.Module, ReferenceType["_Queue"]] = WeakKeyDictionary()
"""The lock of the blocks that are open on a module: two locks could be taken in two orders."""
_GUARD = threading.Lock()
"""Held while a lock is taken or given on."""
if hasattr(os, "register_at_fork"):  # else a child might wait for threads that it does not have
    for held in (LOCK, _GUARD):
        os.register_at_fork(before=held.acquire, after_in_parent=held.release, after_in_child=held.release)
OBSERVED = (
    "regard.watching observes this model inside the block, which is no part of a graph; compile without "
    "fullgraph=True, or call what is not compiled"
)
"""What `torch.compile(fullgraph=True)` says."""
PATIENCE = 1.0
"""Seconds after which a thread that waits asks whether the one it waits for has ended, or left its forward."""


class _Place(NamedTuple):
    """A thread that waits, what it waits at, and whether it keeps others out of a block, or is in a forward."""

    thread: threading.Thread
    gate: threading.Lock
    is_block: bool


class _Queue:
    """A lock that a thread may take several times, and that goes to who has waited longest.

    One of `threading` goes to a thread that calls the model again and again, and others wait for ever. What a thread
    still holds when it has ended, or has left a forward without its hooks, as by Ctrl-C, is taken from it.

    `heir` is the lock that has taken its place, which only who holds both may say.
    """

    def __init__(self) -> None:
        self._turn, self._times, self._blocks = 0, 0, 0
        self._owner: threading.Thread | None = None
        self.heir: _Queue | None = None
        self._waiting: deque[_Place] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner is threading.current_thread()

    def last(self) -> "_Queue":
        """Return the lock that stands in its place, and point to it: those in between may go."""
        found = self
        while found.heir is not None:
            found = found.heir
        if found is not self:
            self.heir = found
        return found

    def acquire(self, *, is_block: bool) -> int:
        """Wait for the lock, and return what `release` wants."""
        place = _Place(threading.current_thread(), threading.Lock(), is_block)
        with _GUARD:
            if self._owner is None:
                self._begin(place)
                return self._turn
            if self._owner is place.thread:
                self._times, self._blocks = self._times + 1, self._blocks + is_block
                return self._turn
            self._waiting.append(place)
            place.gate.acquire()
        try:
            while not place.gate.acquire(timeout=PATIENCE):  # until `release` gives it
                self._take_from_idle()
        except BaseException:
            with _GUARD:
                is_given = place not in self._waiting
                if not is_given:
                    self._waiting.remove(place)
            if is_given:
                self.release(self._turn, is_block=is_block)
            raise
        return self._turn

    def release(self, turn: int, *, is_block: bool) -> None:
        """Give the lock on, unless it was taken away since."""
        with _GUARD:
            if turn != self._turn:
                return
            self._times, self._blocks = self._times - 1, self._blocks - is_block
            if not self._times:
                self._give()

    def _begin(self, place: _Place) -> None:
        self._owner, self._times, self._blocks = place.thread, 1, int(place.is_block)

    def _give(self) -> None:
        """End a turn: give the lock to who has waited longest, of those that a forked process still has."""
        self._owner, self._turn = None, self._turn + 1
        while self._waiting and self._owner is None:
            place = self._waiting.popleft()
            if _is_alive(place.thread):
                self._begin(place)
                place.gate.release()

    def _take_from_idle(self) -> None:
        with _GUARD:
            owner = self._owner
            if owner is not None and not (_is_alive(owner) and (self._blocks or _is_in_call(owner))):
                self._give()


def _is_alive(thread: threading.Thread) -> bool:
    """Return whether a thread has not ended; one that Python has not started raises, where a fork has ended it."""
    try:
        return thread.is_alive()
    except (AssertionError, RuntimeError):
        return False


def _is_in_call(thread: threading.Thread) -> bool:
    """Return whether a thread is calling a module, or a part of such a call that `torch.compile` has made."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and "call_impl" not in frame.f_code.co_name:
        frame = frame.f_back
    return frame is not None


class _Turns(threading.local):
    """What this thread has entered and not left: modules, and None for a block, each with its lock and its turn."""

    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module | None, _Queue, int]] = []


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
            self._leave(self._thread.entered[-1][0])

    @torch.compiler.disable(reason=OBSERVED)  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, _args: Any) -> None:
        """Wait; a hook before a forward."""
        if getattr(module, "_is_replica", False):  # its copies would wait for the module that waits for them
            raise UserError("devices: cannot observe a model inside DataParallel; start a process for each device")
        self._enter(module)
        if self._is_over:
            self._leave(module)

    @torch.compiler.disable(reason=OBSERVED)  # type: ignore[untyped-decorator]
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
        self._thread.entered.append((module, *_acquire(self._lock, is_block=module is None)))

    def _leave(self, module: nn.Module | None) -> None:
        """Leave a module that was entered, and those inside that an interrupt has left in its place."""
        entered = self._thread.entered
        while any(one is module for one, *_ in entered):
            one, lock, turn = entered.pop()
            lock.release(turn, is_block=one is None)
            if one is module:
                return

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_idle, ()


def _find_lock(modules: Sequence[nn.Module]) -> _Queue:
    """Return the lock of the blocks that are open on some modules, one for all, or a new lock.

    Locks that this thread has itself stay several: it cannot wait for itself. A later block makes them one.
    """
    while True:
        with LOCK:
            found = {module: _LOCKS[module]() for module in modules if module in _LOCKS}
            known = {module: lock.last() for module, lock in found.items() if lock is not None}
            locks = list(dict.fromkeys(known.values()))
            if len(locks) < 2 or any(lock.is_mine for lock in locks):
                chosen = locks[0] if locks else _Queue()
                for module in modules:
                    _LOCKS[module] = ref(known.get(module, chosen))
                return chosen
        _join(locks)


def _join(locks: Sequence[_Queue]) -> None:
    """Let the first of some locks take the place of the others, once no thread has one of them.

    They stand in the order of their modules, the outer before the inner, in which forwards take them, too.
    """
    with ExitStack() as stack:
        held = []
        for lock in locks:  # or what another thread has put in its place meanwhile
            own, turn = _acquire(lock, is_block=True)
            stack.callback(own.release, turn, is_block=True)
            held.append(own)
        for own in held:
            if own is not held[0]:
                own.heir = held[0]


def _acquire(lock: _Queue, *, is_block: bool) -> tuple[_Queue, int]:
    """Wait for the lock that stands in the place of one, and return it with its turn."""
    while True:
        lock = lock.last()
        turn = lock.acquire(is_block=is_block)
        if lock.heir is None:
            return lock, turn
        lock.release(turn, is_block=is_block)


def _make_idle() -> OneAtATime:
    """Return what the copy of a model has, which nobody observes."""
    turns = OneAtATime()
    turns.end_block()
    turns.let_go()
    return turns
