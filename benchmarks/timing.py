"""How time and memory are measured: contestants in turn, medians, and the peak of memory beyond the start.

On a CPU memory is what is resident, on a GPU what PyTorch allocates there, and the clock waits for the GPU.
"""

import argparse
import ctypes
import datetime
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"
HEAP = 31 * 2**20
GPU_BUDGET = 3.0
"""Most seconds that contestants run in turn on a GPU, where runs are short and differ less."""
Contestants = Mapping[str, Callable[[], object]]
_device = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one contestant took: seconds (median, fastest, slowest of `runs`) and extra peak memory in MiB."""

    seconds: float
    fastest: float
    slowest: float
    runs: int
    memory: float | None


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes; `about` is its docstring."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small cases, to see that it works")
    made.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default), cuda or cuda:N")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--out", type=Path)
    return made


def prepared(options: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The options as given, with PyTorch set to their device and number of threads, and to no gradients."""
    global _device
    given = options.parse_args(arguments)
    if given.device.type == "cuda" and not torch.cuda.is_available():
        options.exit(2, f"--device {given.device}: torch {torch.__version__} finds no GPU that it can use\n")
    _device = given.device
    if on_gpu():
        torch.cuda.set_device(_device.index or 0)
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    return given


def device() -> torch.device:
    """The device of the benchmark; as a context it makes tensors and modules there."""
    return _device


def on_gpu() -> bool:
    """Whether that is a GPU."""
    return _device.type == "cuda"


def clock() -> float:
    """Seconds: CPU time of this thread; of the wall where there are several threads, or a GPU, whose work is over."""
    if on_gpu():
        torch.cuda.synchronize(_device)
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def race(contestants: Contestants, *, least: int = 3, most: int = 15, budget: float = 12.0) -> dict[str, Figures]:
    """The figures of each contestant, run in turn so that a slow moment of the machine hits all alike.

    With one thread the clock is that thread's CPU time, which neighbors on a shared machine hardly touch. Each runs
    once for warmth, then at least `least` times, and up to `most` while all together stay within `budget` seconds, on a
    GPU within `GPU_BUDGET`.
    """
    budget = min(budget, GPU_BUDGET) if on_gpu() else budget
    torch.empty(HEAP, dtype=torch.uint8)  # freed at once: the allocator then keeps blocks, as after any model ran
    for run in contestants.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    began = time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - began > budget:
            break
        for name, run in contestants.items():
            start = clock()
            run()
            taken[name].append(clock() - start)
    gc.collect()
    memory = {name: extra_memory(run) for name, run in contestants.items()}
    return {name: summarize(times, memory[name]) for name, times in taken.items()}


def summarize(times: list[float], memory: float | None = None) -> Figures:
    """The figures of a contestant that took these times."""
    slowest, median = max(times), statistics.median(times)
    return Figures(seconds=median, fastest=min(times), slowest=slowest, runs=len(times), memory=memory)


def race_in_rounds(contestants: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, Figures]:
    """The figures, without memory, of contestants that take their own times, one after another and again."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, take in contestants.items():
            taken[name] += take()
    return {name: summarize(times) for name, times in taken.items()}


def with_allocated(figures: Mapping[str, Figures], contestants: Contestants) -> dict[str, Figures]:
    """The figures with what PyTorch allocates as their memory."""
    return {name: replace(one, memory=allocated(contestants[name])) for name, one in figures.items()}


def with_gradients(form: Callable[[], torch.Tensor], of: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """A loss forward and backward: the run gives it and its gradients."""

    def both() -> list[torch.Tensor]:
        with torch.enable_grad():
            loss = form()
            return [loss.detach(), *torch.autograd.grad(loss, of, allow_unused=True)]

    return both


def extra_memory(run: Callable[[], object]) -> float | None:
    """MiB by which memory peaks above where it stood before the run; None where the system does not tell.

    What Python has not collected yet may be freed, and used again, in the run: collect it before.
    """
    if on_gpu():
        return allocated(run)
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset.write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def allocated(run: Callable[[], object]) -> float:
    """MiB that PyTorch holds at the most during the run, beyond the start: blind to what its allocator keeps."""
    if on_gpu():
        torch.cuda.synchronize(_device)
        torch.cuda.reset_peak_memory_stats(_device)
        before = torch.cuda.memory_allocated(_device)
        run()
        torch.cuda.synchronize(_device)
        return (torch.cuda.max_memory_allocated(_device) - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = peak = 0
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak / 2**20


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    gpu = {}
    if on_gpu():
        gpu = {"card": torch.cuda.get_device_name(_device), "driver": _driver(), "cuda": torch.version.cuda}
    return gpu | {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _driver() -> str | None:
    """The version of the GPU's driver, where nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def row(case: Mapping[str, Any], figures: Mapping[str, Figures], reference: str) -> dict[str, Any]:
    """One line of a result: the case, each contestant's figures, and its ratios to the reference."""
    base = figures[reference]
    told = {}
    for name, one in figures.items():
        told[name] = asdict(one) | {"time_ratio": one.seconds / base.seconds, "memory_ratio": None}
        if one.memory is not None and base.memory:
            told[name]["memory_ratio"] = one.memory / base.memory
    return {"case": dict(case), "reference": reference, "figures": told}


def show(line: Mapping[str, Any]) -> None:
    """Print one line of a result."""
    case = " ".join(f"{name}={value}" for name, value in line["case"].items())
    parts = []
    for name, one in line["figures"].items():
        memory = "" if one["memory"] is None else f" +{one['memory']:.0f} MiB"
        spread = f"{one['fastest'] * 1e3:.1f}–{one['slowest'] * 1e3:.1f}"
        parts.append(f"{name} ×{one['time_ratio']:.2f} ({one['seconds'] * 1e3:.1f} ms, {spread}){memory}")
    print(f"{case}\n    " + "\n    ".join(parts), flush=True)


def keep(line: dict[str, Any], rows: list[dict[str, Any]], name: str, out: Path | None) -> None:
    """Add a line to a result, print it, and write all so far."""
    rows.append(line)
    show(line)
    write(name, rows, out)


def write(name: str, rows: list[dict[str, Any]], out: Path | None) -> None:
    """Keep the rows so far as JSON, by default where the docs' tables are made from; those of a GPU have its prefix."""
    path = out or RESULTS / f"{'gpu-' * on_gpu()}{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)  # whole at any time: the process may be ended
