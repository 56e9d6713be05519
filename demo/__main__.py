"""The tour of Regard: every verb once on a small model, and one page that tells what came out.

    python -m demo [--out runs/demo] [--options FILE]

Finished steps are kept: after an interruption the same command goes on. FILE is JSON with further options of some
steps, as {"pretrain": ["--max-steps", "100"]}.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from demo.steps import Step, make_steps, write_texts
from demo.story import make_page
from regard.runs.output_dir import read_json, write_file

RECORD, PAGE = "tour.json", "index.html"
ALL = "seconds"
"""What all turns took together, in the record."""
INTERRUPTED = 130
LOCK = threading.Lock()
"""Held while the record is written."""


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are not finished and write the page. Return 0, or the exit code of the step that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / "demo")
    parser.add_argument("--options", type=Path)
    args = parser.parse_args(arguments)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder)
    steps = make_steps(json.loads(args.options.read_text(encoding="utf-8")) if args.options else {})
    record = read_json(folder / RECORD)
    for number, step in enumerate(steps, 1):
        kept = ": kept" if is_finished(step, folder, record) else ""
        print(f"== {number} of {len(steps)}, {step.title}{kept}", flush=True)
    for _, turn in groupby(sorted(steps, key=lambda step: step.turn), key=lambda step: step.turn[0]):
        code = run_turn([step for step in turn if not is_finished(step, folder, record)], folder, record)
        if code:
            print(f"== {'interrupted' if code == INTERRUPTED else 'failed'}; the same command goes on", flush=True)
            return code
    write_file(folder / PAGE, make_page(folder, {step.key: record[step.key]["seconds"] for step in steps}, record[ALL]))
    print(f"== done in {record[ALL]:.0f} s. Open in a browser: {folder / PAGE}", flush=True)
    return 0


def is_finished(step: Step, folder: Path, record: dict[str, Any]) -> bool:
    """Return whether a step with this command has left its result."""
    return record.get(step.key, {}).get("command") == list(step.command) and (folder / step.result).is_file()


def run_turn(steps: Sequence[Step], folder: Path, record: dict[str, Any]) -> int:
    """Run the steps of a turn, as many side by side as there are cores, up to two. Return 0, or how one has failed."""
    start, workers = time.monotonic(), min(len(steps), os.cpu_count() or 1, 2)
    ended = threading.Event()

    def run(step: Step) -> int:
        code = INTERRUPTED if ended.is_set() else run_step(step, folder, record, alone=workers < 2)
        if code:
            ended.set()
        return code

    codes: list[int] = []
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        running = [pool.submit(run, step) for step in steps]
        try:
            codes += [one.result() for one in running]
        except KeyboardInterrupt:  # which the commands get, too
            ended.set()
            codes.append(INTERRUPTED)
    record[ALL] = round(record.get(ALL, 0.0) + time.monotonic() - start, 1)
    _write(record, folder)
    return next((code for code in codes if code), 0)


def run_step(step: Step, folder: Path, record: dict[str, Any], *, alone: bool) -> int:
    """Run a step in the folder, with its progress on the terminal and its summary in a file. Return its exit code.

    Beside another step it has one core, and its progress comes in lines that name it.
    """
    start, before = time.monotonic(), record.get(step.key, {})
    unfinished = before.get("unfinished", 0.0) if before.get("command") == list(step.command) else 0.0
    print(f"-- {step.key}: regard {shlex.join(step.command)}", flush=True)
    options: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL}
    if not alone:
        options |= {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE, "text": True}
    code = INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt), (folder / f"{step.key}.txt").open("w", encoding="utf-8") as summary:
        process = subprocess.Popen([sys.executable, "-m", "regard", *step.command], stdout=summary, **options)
        for line in process.stderr or ():
            print(f"   {step.key}: {line.rstrip()}", flush=True)
        code = process.wait()
    seconds = round(unfinished + time.monotonic() - start, 1)
    record[step.key] = {"command": list(step.command), "seconds" if code == 0 else "unfinished": seconds}
    _write(record, folder)
    return code


def _write(record: dict[str, Any], folder: Path) -> None:
    with LOCK:
        write_file(folder / RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
