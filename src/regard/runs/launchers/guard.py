"""`python -m regard.runs.launchers.guard LOG GRACE COMMAND…`: one process that does not outlive whoever asked for it.

The guard holds the read end of a pipe from whoever asked. When that closes (a request to stop, or the asker's death,
SIGKILL included), the command is asked to end, and killed if it has not after GRACE seconds. While it lives the log is
locked, so that a second attempt at the same trial begins when the first is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

MARGIN = 10.0
"""Seconds beyond the grace that a guard waits for the one before it."""
_PR_SET_PDEATHSIG = 1
_ASKER = 0
"""The pipe from whoever asked: standard input."""


def main(arguments: Sequence[str]) -> int:
    """The command's exit code; 128 + n where signal n killed it."""
    log, grace, *command = arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open(log, "ab", buffering=0) as file:
        if not _lock(file.fileno(), float(grace) + MARGIN):
            file.write(b"another process is at work on this trial\n")
            return 1
        child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            preexec_fn=_dying_with_the_guard() if sys.platform == "linux" else None,
        )
        try:
            while child.poll() is None and not _left_alone(0.1):
                pass
        except KeyboardInterrupt:
            pass
        _end(child, float(grace))
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _left_alone(seconds: float) -> bool:
    """Whether the asker is gone; waits so long for that."""
    readable, _, _ = select.select([_ASKER], [], [], seconds)
    return bool(readable) and os.read(_ASKER, 1) == b""


def _lock(log: int, seconds: float) -> bool:
    """Whether the log is ours now; waits so long for it. The command inherits the lock with its standard error."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until or _left_alone(0.1):
                return False
        except OSError:
            return True  # a file system without locks


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    """Ask the command to end, then kill it and what it has started."""
    if child.poll() is None:
        _signal(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace)
    _signal(child.pid, signal.SIGKILL)
    child.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _dying_with_the_guard() -> Callable[[], object]:
    """What the command does before it starts, on Linux: it asks to be killed when the guard is."""
    control = ctypes.CDLL(None).prctl
    return lambda: control(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
