"""`python -m regard.runs.launchers.guard LOG GRACE COMMAND…`: runs a command that does not outlive its parent.

The guard reads a pipe from the parent. When that closes (a request to stop, or the parent's death, SIGKILL included),
the command is asked to end, and killed after GRACE seconds. Meanwhile the log is locked, so that a second attempt at
the same trial waits for the first.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from regard.runs.posix import fcntl

MARGIN = 10.0  # seconds beyond the grace that a guard waits for the one before it
_PR_SET_PDEATHSIG = 1
_PARENT = 0  # the pipe from the parent: standard input


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code; 128 + n if signal n killed it."""
    log, grace, *command = arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open(log, "ab", buffering=0) as file:
        if not _lock(file.fileno(), float(grace) + MARGIN):
            file.write(b"another process is at work on this trial\n")
            return 1
        child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_die_with_guard() if sys.platform == "linux" else None,
        )
        try:
            while child.poll() is None and not _parent_is_gone():
                pass
        except KeyboardInterrupt:
            pass
        _end(child, float(grace))
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _parent_is_gone() -> bool:
    """Wait a tenth of a second, and return whether the parent is gone."""
    readable, _, _ = select.select([_PARENT], [], [], 0.1)
    return bool(readable) and os.read(_PARENT, 1) == b""


def _lock(log: int, seconds: float) -> bool:
    """Lock the log, within some seconds, and return whether that worked. The command inherits the lock with stderr."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until or _parent_is_gone():
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


def _die_with_guard() -> Callable[[], object]:
    """Return what the command calls before it starts, on Linux: it asks to be killed when the guard is."""
    control = ctypes.CDLL(None).prctl
    return lambda: control(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
