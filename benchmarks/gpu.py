"""Everything for a GPU within 40 minutes, or --minutes: the tests that need one, every benchmark, and the page.

Each part runs in a process of its own and has a limit of time. One that fails does not stop the others. A benchmark
that is stopped at its limit keeps the cases that it has measured. The summary says how each part ended; the exit code
is 1 if one failed, and 2 if there is no GPU.

With `--device cpu --quick` all parts run on a CPU, tiny, to see that they work; results go to runs/gpu.

    python -m benchmarks.gpu [--device cuda] [--quick] [--minutes 40] [--parts tests,operators] [--out FOLDER]
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_section import TITLES, read_results, section
from benchmarks.timing import RESULTS

ROOT = Path(__file__).parents[1]
TESTS = "tests"
TEST_PATHS = ("tests/gpu", "tests/attention/test_kernels.py", "tests/attention/test_operator_kernels.py")
LIMITS = {
    TESTS: 300,
    "gpu_kernels": 180,
    "attention_function": 120,
    "long_sequences": 60,
    "whole_model": 210,
    "statistics_cost": 90,
    "constant_attention": 150,
    "structured_constants": 120,
    "decoding": 60,
    "cached_probe": 90,
    "operators": 180,
    "loss_layer": 60,
    "attention_backend": 120,
    "training_step": 210,
    "attention_steps": 60,
    "learning": 120,
    "adapters": 120,
    "adapter_step": 30,
    "gathering": 60,
    "look": 60,
}
"""Seconds that each part may take, `MINUTES` in all."""
MINUTES = 40
GPU_OPTIONS = {
    "training_step": (
        *("--sizes", "10M,124M", "--lengths", "1024"),
        *("--settings", "bfloat16,bfloat16 compiled"),
    ),
    "attention_steps": (
        *("--sizes", "124M", "--lengths", "1024", "--settings", "bfloat16"),
        *("--attentions", "sigmoid,softpick,kv-bias,linear"),
    ),
}
"""What suits a GPU better than the cases of a CPU."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended: its exit code, None if it was stopped at its limit; `cases` are those of a benchmark."""

    name: str
    seconds: float
    code: int | None
    cases: int
    limit: float

    @property
    def failed(self) -> bool:
        """Whether it failed, or was stopped before it had measured anything."""
        return bool(self.code) or (self.code is None and not self.cases)

    def __str__(self) -> str:
        ends = {None: f"stopped at its limit of {self.limit:.0f} s", 0: "passed"}
        measured = f", {self.cases} cases" if self.name != TESTS else ""
        state = ends.get(self.code, f"failed with exit code {self.code}")
        return f"{self.name}: {state} ({self.seconds:.0f} s{measured})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the summary, make the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="cuda (default), cuda:N, cpu")
    parser.add_argument("--quick", action="store_true", help="small cases, to see that it works")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"stop parts earlier (default: {MINUTES} in all)"
    )
    parser.add_argument("--parts", default=",".join(LIMITS), help=f"some of {', '.join(LIMITS)}")
    parser.add_argument("--out", type=Path, help="folder of the results; by default the page's, of quick runs runs/gpu")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in LIMITS]:
        parser.error(f"--parts: there is no {unknown[0]}; choose from {', '.join(LIMITS)}")
    is_gpu = options.device.type != "cpu"
    if is_gpu and not torch.cuda.is_available():
        print(explain_no_gpu(), file=sys.stderr)
        return 2
    measures = is_gpu and not options.quick
    out = (options.out or (RESULTS if measures else ROOT / "runs" / "gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    limits = {name: LIMITS[name] * options.minutes / MINUTES for name in names}
    outcomes = [run_part(name, options.device, limits[name], quick=options.quick, out=out) for name in names]
    print("\n== summary", *outcomes, sep="\n", flush=True)
    if out == RESULTS:
        made = subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, env=environment(options.device))
        page, page_failed = "docs/benchmarks.md", made.returncode != 0
    else:
        (out / "gpu.md").write_text(f"# GPU\n{section(read_results(out))[0]}", encoding="utf-8")
        page, page_failed = str(out / "gpu.md"), False
    failed = [outcome.name for outcome in outcomes if outcome.failed] + ["the page"] * page_failed
    print(f"failed: {', '.join(failed)}" if failed else f"== done. The figures are in {page}")
    return int(bool(failed))


def explain_no_gpu() -> str:
    """Say in one line why PyTorch cannot use a GPU, and what to do."""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; name a Python that has it by GPU_PYTHON"
    else:
        reason = f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU, or no driver for it"
    return f"no GPU: {reason}. To run everything on the CPU, tiny: make gpu GPU_ARGS='--device cpu --quick'"


def command(name: str, device: torch.device, *, quick: bool, out: Path) -> list[str]:
    """Return the command of a part."""
    if name == TESTS:
        return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TEST_PATHS]
    options = ["--device", str(device), "--out", str(out / f"gpu-{name}.json")]
    options += ["--quick"] if quick else GPU_OPTIONS.get(name, ()) if device.type != "cpu" else ()
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


def environment(device: torch.device) -> dict[str, str]:
    """Return the environment of a part: the package of this folder, and the device that tests run on."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "REGARD_TEST_DEVICE": str(device)}


def run_part(name: str, device: torch.device, limit: float, *, quick: bool, out: Path) -> Outcome:
    """Run a part until it ends or its limit of seconds; what it started ends with it."""
    print(f"\n== {name}", flush=True)
    result = out / f"gpu-{name}.json"
    before = result.stat().st_mtime_ns if result.exists() else None
    start = time.monotonic()
    process = subprocess.Popen(
        command(name, device, quick=quick, out=out), cwd=ROOT, env=environment(device), start_new_session=True
    )
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end_group(process)
    seconds = time.monotonic() - start
    is_new = result.exists() and result.stat().st_mtime_ns != before
    return Outcome(name, seconds, code, _complete(result, code == 0, seconds) if is_new else 0, limit)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _complete(path: Path, is_whole: bool, seconds: float) -> int:
    """Add to a result whether all cases ran, and how long they took; return how many did."""
    result: Mapping[str, list[object]] = json.loads(path.read_text(encoding="utf-8"))
    told = {**result, "complete": is_whole, "seconds": round(seconds)}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return len(result["rows"])


if __name__ == "__main__":
    assert LIMITS.keys() - {TESTS} == TITLES.keys()
    sys.exit(main())
