"""The tour of Regard: every verb once on a small model, and one page that tells what came out.

    python -m demo [--out runs/demo] [--options FILE]

Finished steps are kept: after an interruption the same command goes on. FILE is JSON with further options of some
steps, as {"pretrain": ["--max-steps", "100"]}.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo.steps import Step, make_steps, write_texts
from demo.story import make_page
from regard.runs.output_dir import read_json, write_file

RECORD, PAGE = "tour.json", "index.html"
INTERRUPTED = 130


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
        head = f"== {number} of {len(steps)}, {step.title}"
        if is_finished(step, folder, record):
            print(f"{head}: kept", flush=True)
            continue
        print(f"{head}\n   regard {shlex.join(step.command)}", flush=True)
        code = run_step(step, folder, record)
        if code:
            print(f"== {'interrupted' if code == INTERRUPTED else 'failed'}; the same command goes on", flush=True)
            return code
    write_file(folder / PAGE, make_page(folder, {step.key: record[step.key]["seconds"] for step in steps}))
    seconds = sum(record[step.key]["seconds"] for step in steps)
    print(f"== done in {seconds:.0f} s. Open in a browser: {folder / PAGE}", flush=True)
    return 0


def is_finished(step: Step, folder: Path, record: dict[str, Any]) -> bool:
    """Return whether a step with this command has left its result."""
    return record.get(step.key, {}).get("command") == list(step.command) and (folder / step.result).is_file()


def run_step(step: Step, folder: Path, record: dict[str, Any]) -> int:
    """Run a step in the folder, with its progress on the terminal and its summary in a file. Return its exit code."""
    start, before = time.monotonic(), record.pop(step.key, {})
    unfinished = before.get("unfinished", 0.0) if before.get("command") == list(step.command) else 0.0
    code = INTERRUPTED
    try:
        with (folder / f"{step.key}.txt").open("w", encoding="utf-8") as summary:
            line = [sys.executable, "-m", "regard", *step.command]
            code = subprocess.run(line, cwd=folder, stdin=subprocess.DEVNULL, stdout=summary, check=False).returncode
    except KeyboardInterrupt:
        pass
    seconds = round(unfinished + time.monotonic() - start, 1)
    record[step.key] = {"command": list(step.command), "seconds" if code == 0 else "unfinished": seconds}
    write_file(folder / RECORD, json.dumps(record, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
