"""Work of commands with freed memory kept, as each command of Regard keeps it (kept), and with the C library's habits.

A step of Regard's decoder in its loop, and a forward of BERT-base (padded) or a Llama of its size under the default
statistics; float32 on one thread. How the heap lies decides what goes back to the system, and changes from process to
process: each round is a new process, one of each in turn. The clock is the thread's CPU time, which has in it what the
system does for the thread.

    python -m benchmarks.freed_memory [--quick] [--rounds N] [--out FILE]                        15 minutes on one core
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.timing import clock, keep, parser, prepared, race_in_rounds, row
from regard.runs.freed_memory import keep_freed_memory

NAMES = ("default", "kept")
CASES = (("train", "1M", 256), ("train", "10M", 256), ("observe", "bert", 128), ("observe", "llama", 128))
"""What is done, with which model, and tokens."""
QUICK = (("train", "tiny", 256),)
WARM = 2
"""Forwards before the clock."""


def train(size: str, length: int, times: int) -> list[float]:
    """Return the seconds of so many steps."""
    from benchmarks.training_contestants import PEERS, SIZES, Setting

    torch.set_grad_enabled(True)
    return PEERS["regard"](SIZES[size], length, Setting())(times)


def observe(kind: str, length: int, times: int) -> list[float]:
    """Return the seconds of so many observed forwards, each of one sample."""
    import regard
    from benchmarks.whole_model import Case

    case, seconds = Case(kind, 1, length, size="base"), []
    with regard.watching(case.model):
        for _ in range(WARM + times):
            start = clock()
            case.plain()
            seconds.append(clock() - start)
    return seconds[WARM:]


def run_child(options: argparse.Namespace) -> None:
    """Print the seconds, and the peak of resident memory in MiB."""
    kept, work, model, length = options.child
    if kept == "kept":
        assert keep_freed_memory(), "expected the GNU C library, and no variable that tunes it"
    seconds = {"train": train, "observe": observe}[work](model, int(length), options.times)
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def time_in_process(name: str, case: tuple[Any, ...], times: int, peaks: dict[str, float]) -> list[float]:
    """Return the seconds of a process of its own; its peak is kept if it is the largest."""
    command = [sys.executable, "-m", "benchmarks.freed_memory", "--times", str(times), "--child", name, *map(str, case)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True)
    seconds, peak = json.loads(ended.stdout)
    peaks[name] = max(peaks.get(name, 0.0), peak)
    return list(seconds)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--times", type=int, default=8)
    options.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = prepared(options, arguments)
    if given.child:
        run_child(given)
        return
    times, rounds = (1, 1) if given.quick else (given.times, given.rounds)
    rows: list[dict[str, Any]] = []
    for case in QUICK if given.quick else CASES:
        peaks: dict[str, float] = {}
        contestants = {name: partial(time_in_process, name, case, times, peaks) for name in NAMES}
        figures = race_in_rounds(contestants, rounds)
        line = row(dict(zip(("work", "model", "length"), case, strict=True)), figures, "default")
        keep(line | {"peak_mib": peaks}, rows, "freed_memory", given.out)


if __name__ == "__main__":
    main()
