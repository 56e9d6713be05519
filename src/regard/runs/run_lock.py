"""Runs of one process wait for one another."""

import contextlib
import os
import threading
from collections.abc import Iterator

from regard.errors import warn_user

ONE_RUN = threading.RLock()
"""Held by a run: the random state of PyTorch, and what Accelerate keeps, are of the process, not of a thread."""
BUSY = "another run of this process is under way: this one waits until it has ended"
"""What a run says that waits, perhaps for one that waits for it, as its callback does for another thread."""


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """Wait for the runs of other threads, and say so. Runs inside a run do not wait."""
    lock = ONE_RUN
    if lock.acquire(blocking=False):
        lock.release()
    else:
        warn_user(BUSY)
    with lock:
        yield


def _renew_lock() -> None:
    """Make a new lock in a process that was forked, which has no thread that would release the one before."""
    global ONE_RUN
    ONE_RUN = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
