"""Forwards of an observed model, which wait for each other where several threads call it."""

import threading
from typing import Any

import torch
from torch import nn


class OneAtATime:
    """Lets a forward of some modules begin once none of another thread is under way; those of one thread may nest.

    As a context it keeps forwards of other threads out of a block.
    """

    def __init__(self) -> None:
        self._lock, self._held = threading.RLock(), threading.local()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._held.times = getattr(self._held, "times", 0) + 1

    def __exit__(self, *_error: object) -> None:
        if getattr(self._held, "times", 0):
            self._held.times -= 1
            self._lock.release()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Wait; a hook before a forward."""
        self.__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Let others go on; a hook after a forward, also one that failed, perhaps before it came to `begin`."""
        self.__exit__()

    def register(self, module: nn.Module) -> list[Any]:
        """Register the hooks on a module, before and behind those that it has; return their handles."""
        before = module.register_forward_pre_hook(self.begin, prepend=True)
        return [before, module.register_forward_hook(self.end, always_call=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        return OneAtATime, ()
