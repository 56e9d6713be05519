"""All that needs a GPU, in one command: the tests marked `gpu`, every benchmark on the card, the page.

Each part is a process of its own with a limit of time; one that fails does not stop the others. Results go to
`benchmarks/results/gpu-*.json` with card and date. With `--device cpu` the same parts run without a card, in Triton's
interpreter where it is needed, and their results are thrown away: that shows that the command works.

    python -m benchmarks.gpu [--device cuda] [--quick] [--minutes 40] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TESTS = "tests"
BENCHMARKS = (
    "gpu_kernels",
    "attention_function",
    "long_sequences",
    "whole_model",
    "attention_backend",
    "training_step",
    "constant_attention",
    "structured_constants",
    "operators",
    "loss_layer",
    "learning",
    "adapters",
    "cached_probe",
    "gathering",
)
"""In this order, so that what matters most is done if time runs out."""
PART_MINUTES = 6.0
"""The most that one part may take."""


def command_of(part: str, options: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the command of a part."""
    if part == TESTS:
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    command = [sys.executable, "-m", f"benchmarks.{part}", "--device", str(options.device)]
    command += ["--quick"] if options.quick else []
    return command + (["--out", str(scratch / f"{part}.json")] if options.device.type != "cuda" else [])


def run_part(part: str, options: argparse.Namespace, scratch: Path, seconds: float) -> str | None:
    """Run a part; return what went wrong, None if nothing did."""
    environment = os.environ | {"REGARD_GPU_TESTS": str(options.device), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        ended = subprocess.run(
            command_of(part, options, scratch), cwd=ROOT, env=environment, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds / 60:.1f} minutes; what it had measured is kept"
    return f"exit code {ended.returncode}" if ended.returncode else None


def main(arguments: list[str] | None = None) -> int:
    """Run all parts; return 0, 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="cuda (default), or cpu")
    parser.add_argument("--quick", action="store_true", help="small cases, to see that it works")
    parser.add_argument("--minutes", type=float, default=40.0, help="the most that all parts take (default: 40)")
    parser.add_argument("--only", nargs="+", choices=(TESTS, *BENCHMARKS), default=(TESTS, *BENCHMARKS))
    options = parser.parse_args(arguments)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        problem = f"torch {torch.__version__} finds no GPU that it can use"
        print(f"benchmarks.gpu: {problem}; --device cpu --quick shows that all parts work", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.only:
            left = deadline - time.monotonic()
            print(f"== {part} ({left / 60:.0f} minutes left)", flush=True)
            limit = min(left, 60 * PART_MINUTES)
            problem = run_part(part, options, Path(scratch), limit) if left > 0 else "not run: no time was left"
            if problem is not None:
                problems[part] = problem
                print(f"== {part}: {problem}", flush=True)
    if options.device.type == "cuda":
        subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, check=True)
    summary = "; ".join(f"{part}: {problem}" for part, problem in problems.items()) or "all parts ran"
    print(f"== done: {summary}", flush=True)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
