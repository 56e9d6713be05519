"""Apply one-line mutations to the library, one at a time, and check that the tests notice each.

    python -m tests.mutants [--only TEXT ...] [--list] [--jobs N]

`mutants.toml` has the mutations: a file below src/regard, a part of a line as it stands there, what takes its
place, and the tests of which one must fail, in any of their cases (`--all-cases`). A mutation that is proven to change
nothing says why under `equivalent`, and is not run. The library is copied to a temporary folder: the working tree is
never changed.

Each mutation runs in a process forked from this one, which has imported what Regard imports, but not Regard.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")
TIMEOUT = 1800
HEAVY = ("torch", "transformers", "pandas", "pytest", "accelerate", "safetensors.torch")
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Plugins of pytest may be among what is imported already."""
SURVIVED, KILLED = 0, 1
"""Exit codes of pytest: all tests pass, some fail. Others mean that they have not been run."""


@dataclass(frozen=True)
class Mutant:
    """One mutation.

    Attributes:
        name: What is wrong with the library after it.
        file: The file below src/regard.
        before: A part of a line. It stands once in the file, or `nth` says which.
        after: What stands in its place.
        tests: The tests of which one must fail, as pytest takes them.
        nth: Which of several such parts, from 1; 0 where there is but one.
        equivalent: Why nothing changes, for a mutation that no test can notice.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    nth: int = 0
    equivalent: str = ""

    def mutate(self, source: str) -> str:
        """Return the text of the file with the mutation. Raises ValueError if there is nothing to mutate."""
        parts = source.split(self.before)
        count = len(parts) - 1
        if count < max(1, self.nth) or (count > 1 and not self.nth):
            raise ValueError(f"{self.name}: {self.file} has {self.before!r} {count} times")
        nth = max(1, self.nth)
        return self.before.join(parts[:nth]) + self.after + self.before.join(parts[nth:])


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """Read the mutations."""
    with path.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def check_mutants(mutants: Sequence[Mutant], source: Path = ROOT / "src" / "regard") -> list[str]:
    """Return what is wrong with the mutations: lines that are gone, tests that are gone, names that occur twice."""
    errors = []
    for mutant in mutants:
        try:
            text = (source / mutant.file).read_text(encoding="utf-8")
            compile(mutant.mutate(text), mutant.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            errors.append(str(error))
        errors += [f"{mutant.name}: no {test}" for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()]
    names = [mutant.name for mutant in mutants]
    return errors + [f"{name}: occurs twice" for name in sorted(set(names)) if names.count(name) > 1]


def run_tests(source: Path, tests: Sequence[str], log: Path) -> None:
    """Run tests with the library of this folder, in this process, which ends with pytest's exit code."""
    os.setpgid(0, 0)
    os.chdir(ROOT)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["PYTHONPATH"] = str(source)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    import pytest

    code = 70
    try:
        code = int(pytest.main(["-x", "-q", "--all-cases", "-p", "no:cacheprovider", *QUIET, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(mutant: Mutant, folder: Path) -> int:
    """Copy the library, mutate the copy and run the tests with it. Returns the process."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source)
    path = source / "regard" / mutant.file
    path.write_text(mutant.mutate(path.read_text(encoding="utf-8")), encoding="utf-8")
    process = os.fork()
    if process == 0:
        run_tests(source, mutant.tests, folder / "log")
    return process


def run(mutants: Sequence[Mutant], jobs: int) -> tuple[list[Mutant], list[str]]:
    """Run the mutations, so many at a time. Returns those that survive, and what went wrong with others."""
    waiting, running = list(mutants), dict[int, tuple[Mutant, Path, float]]()
    survivors: list[Mutant] = []
    errors: list[str] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, folder = waiting.pop(0), Path(tempfile.mkdtemp(prefix="regard-mutant-"))
            running[start(mutant, folder)] = (mutant, folder, time.monotonic())
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            for late, (_, _, began) in running.items():
                if time.monotonic() - began > TIMEOUT:
                    os.killpg(late, signal.SIGKILL)
            time.sleep(0.1)
            continue
        if process not in running:
            continue
        mutant, folder, began = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        word = {SURVIVED: "SURVIVED", KILLED: "killed", -signal.SIGKILL: "killed"}.get(code, "ERROR")
        print(f"{word:8} {time.monotonic() - began:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
        if word == "SURVIVED":
            survivors.append(mutant)
        elif word == "ERROR":
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            errors.append(f"{mutant.name}: pytest ended with {code}:\n{log[-1000:]}")
        shutil.rmtree(folder, ignore_errors=True)
    return survivors, errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations. Returns 0 if the tests notice all of them, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="mutations whose name or file has a text")
    parser.add_argument("--list", action="store_true", help="list the mutations and run none")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time (default: 2)")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in read_mutants()
        if not options.only or any(text in mutant.name or text in mutant.file for text in options.only)
    ]
    errors = check_mutants(mutants)
    if options.list or errors:
        print("\n".join(errors or [f"{mutant.file}: {mutant.name}" for mutant in mutants]))
        return int(bool(errors))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in HEAVY:
        importlib.import_module(module)
    tried = [mutant for mutant in mutants if not mutant.equivalent]
    survivors, errors = run(tried, options.jobs)
    killed = len(tried) - len(survivors) - len(errors)
    print(f"\n{killed} of {len(tried)} mutations killed; {len(mutants) - len(tried)} proven equivalent")
    print("\n".join([*errors, *(f"survived: {mutant.file}: {mutant.name}" for mutant in survivors)]))
    return int(bool(survivors or errors))


if __name__ == "__main__":
    sys.exit(main())
