"""Memory that is freed stays with the process of a command, unless its user says otherwise."""

import ctypes
import os
import subprocess
import sys

import pytest

from regard import __main__
from regard.runs import freed_memory

PAGES = """
import ctypes
import resource
from regard.runs.freed_memory import keep_freed_memory

def use():
    blocks = [library.malloc(20 << 20) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        library.free(block)

print(keep_freed_memory())
library = ctypes.CDLL(None)
library.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no huge pages, of which a block takes but ten
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints the pages that a process gets for the second to fourth use of three blocks of 20 MiB at once."""
is_glibc = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def run(**variables: str) -> tuple[str, int]:
    untuned = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PAGES]
    ended = subprocess.run(command, env=untuned | variables, capture_output=True, text=True, check=True)
    kept, pages = ended.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(not is_glibc, reason="needs the GNU C library")
def test_memory_is_got_once() -> None:
    """9 blocks of 20 MiB are 46,080 pages of 4 KiB; those that are kept cost none."""
    kept, pages = run()
    assert kept == "True"
    assert pages < 100


@pytest.mark.skipif(not is_glibc, reason="needs the GNU C library")
@pytest.mark.parametrize(
    "name, value", [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")]
)
def test_what_a_user_has_tuned_stays(name: str, value: str) -> None:
    kept, pages = run(**{name: value})
    assert kept == "False"
    assert pages > 1000


def test_a_command_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(freed_memory, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(sys, "argv", ["regard", "--version"])
    with pytest.raises(SystemExit, match="0"):
        __main__.main()
    assert calls == ["kept"]
