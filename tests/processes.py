"""Python in a process of its own, without waiting for its imports.

The process is forked from one that has imported what Regard imports, but not Regard: a few seconds less than `python`
takes each time. What is read from the environment when torch or Transformers are imported (`HF_HOME`) is that of the
tests; a test that sets such a variable, or that is about imports, starts `python` itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

IMPORTED = ("torch", "transformers.modeling_utils", "transformers.models.auto", "accelerate", "pandas", "jinja2")
LIMIT = 900
"""Seconds after which a process hangs."""


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, __name__])
    return context


@dataclass(frozen=True)
class Started:
    """A process, and the folder of the files `out` and `err` with what it prints."""

    process: multiprocessing.context.ForkServerProcess
    folder: Path

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait until it ends, and return how."""
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, f"it takes more than {LIMIT} seconds"
        out, err = ((self.folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


@contextlib.contextmanager
def started(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, place: Path | None = None, given: str = ""
) -> Iterator[Started]:
    """Start what `python ARGUMENTS` would start: `-c CODE`, `-m MODULE` or a file, which `-W error` may precede.

    It is killed at the end of the block, if it has not ended.
    """
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "given").write_text(given, encoding="utf-8")
        place = place or Path.cwd()
        process = _server().Process(target=_become, args=([*map(str, arguments)], variables, str(place), folder))
        process.start()
        try:
            yield Started(process, Path(folder))
        finally:
            if process.is_alive():  # with what it has started
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def run_python(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, place: Path | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Return how `python ARGUMENTS` ends."""
    with started(arguments, environment, place, given) as process:
        return process.end()


def _become(arguments: list[str], environment: dict[str, str], place: str, folder: str) -> None:
    """Be the process of these arguments, in the forked one."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdin = open(f"{folder}/given", encoding="utf-8")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        # Transformers until 5.20 has scripts of torch, which torch calls deprecated.
        warnings.filterwarnings("ignore", r".torch\.jit\.\w+. is deprecated", DeprecationWarning)
        del arguments[:2]
    kind, *sys.argv = arguments
    if kind == "-c":
        code, main = sys.argv[0], types.ModuleType("__main__")
        sys.argv[0], sys.modules["__main__"] = kind, main
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv.insert(0, kind)
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
