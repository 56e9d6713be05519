"""Jobs as processes, each under guard; run several at once with a launcher, and retry those that fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from regard.errors import UserError
from regard.runs.rank import IN_JOB

TERMINATE_TIMEOUT = 30.0  # seconds that a process has to keep what it has done, once it is asked to end
REFUSED = 2
"""Exit code of a command for a mistake of the user, which another attempt would repeat."""
MOST_LOST = 20  # machines that a job may lose before that counts as a failure
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of a job that sees no GPU."""
_TAIL = 8192


@dataclass(frozen=True)
class Job:
    """What python is to run (its arguments), from which folder, and the file that what it prints goes to."""

    key: str
    command: tuple[str, ...]
    directory: str
    log: str
    grace: float = TERMINATE_TIMEOUT


@dataclass(frozen=True)
class JobResult:
    """How a job ended: `error` is empty if well; `lost` if the machine under it went away; `refused` by the command."""

    key: str
    error: str = ""
    lost: bool = False
    refused: bool = False


@dataclass(frozen=True)
class StartedJob:
    """A job at work: its guard, and where in the log it began."""

    job: Job
    guard: subprocess.Popen[bytes]
    offset: int

    def ended(self) -> JobResult | None:
        code = self.guard.poll()
        if code is None:
            return None
        return JobResult(self.job.key, _error(code, self.job.log, self.offset), refused=code == REFUSED)

    def ask_to_end(self) -> None:
        if self.guard.stdin is not None:
            self.guard.stdin.close()

    def wait(self) -> None:
        self.ask_to_end()
        try:
            self.guard.wait(timeout=self.job.grace + 5)
        finally:
            self.guard.kill()


def start_job(job: Job, threads: int, environment: Mapping[str, str] | None = None) -> StartedJob:
    """Start a job under a guard. Raises OSError if its folders do not exist."""
    log = Path(job.log)
    log.touch()
    guard = subprocess.Popen(
        [sys.executable, "-m", "regard.runs.launchers.guard", job.log, str(job.grace), *job.command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=job.directory,
        env={**os.environ, IN_JOB: "1", "OMP_NUM_THREADS": str(threads), **(environment or {})},
        start_new_session=True,
    )
    return StartedJob(job, guard, log.stat().st_size)


def run_job(job: Job, threads: int, environment: Mapping[str, str] | None = None) -> JobResult:
    """Run a job on this machine, which ends with the caller, and return its result."""
    try:
        started = start_job(job, threads, environment)
    except OSError as error:
        advice = "a sweep needs a folder that all its nodes share"
        return JobResult(job.key, f"{error.strerror}: {error.filename}; {advice}")
    try:
        while (result := started.ended()) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.guard.wait(timeout=0.2)
        return result
    finally:
        started.wait()


def _error(code: int, log: str, offset: int) -> str:
    """Return what went wrong, in a line; empty if nothing did."""
    if code == 0:
        return ""
    killer = code - 128 if code > 128 else -code
    if killer in {int(number) for number in signal.Signals}:
        return f"killed by {signal.Signals(killer).name}"
    return _last_line(log, offset) or f"ended with exit code {code}"


def _last_line(log: str, offset: int) -> str:
    """Return the last line after the offset that is not blank."""
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(offset, end - _TAIL))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(workers: int) -> int:
    """Return the threads of each of several jobs at once: a share of the cores, or OMP_NUM_THREADS if that is less."""
    share = max(1, cores() // workers)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(wanted)) if wanted.isdecimal() and int(wanted) else share


def check_workers(workers: int | None) -> None:
    """Raise UserError for fewer than one worker."""
    if workers is not None and workers < 1:
        raise UserError(f"workers: expected at least 1, got {workers}")


class Local:
    """Several processes at once (default: one a core), which share the cores equally.

    With `devices`, GPUs as CUDA_VISIBLE_DEVICES names them, there is one process a GPU, which sees only that one.
    Without, processes see no GPU: all of them would share the first.
    """

    patience = 0.0

    def __init__(self, *, workers: int | None = None, devices: Sequence[str] = ()) -> None:
        check_workers(workers)
        self.workers = min(workers or len(devices) or cores(), len(devices) or 2**31)
        self._free = list(devices)[: self.workers]
        self._device: dict[str, str] = {}
        self._running: dict[str, StartedJob] = {}

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *error: object) -> None:
        for started in self._running.values():
            started.ask_to_end()
        for started in self._running.values():
            started.wait()
        self._running.clear()

    def places(self) -> int:
        return self.workers

    def start(self, job: Job) -> None:
        environment = NO_GPU
        if self._free:
            self._device[job.key] = self._free.pop(0)
            environment = {"CUDA_VISIBLE_DEVICES": self._device[job.key]}
        self._running[job.key] = start_job(job, share_cores(self.workers), environment)

    def ended(self) -> list[JobResult]:
        while not (results := [ended for job in self._running.values() if (ended := job.ended()) is not None]):
            time.sleep(0.05)
        for result in results:
            self._running.pop(result.key).wait()
            if result.key in self._device:
                self._free.append(self._device.pop(result.key))
        return results


class Launcher(Protocol):
    """Where jobs run: a context, at whose end no job is at work."""

    patience: float  # seconds until a file that a job wrote is seen in this process

    def __enter__(self) -> Launcher: ...

    def __exit__(self, *error: object) -> None: ...

    def places(self) -> int:
        """Return how many jobs may run at once, at least 1."""

    def start(self, job: Job) -> None:
        """Start a job."""

    def ended(self) -> list[JobResult]:
        """Wait for a job to end, and return all that have ended since."""


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job: `failed` is followed by another attempt, `given up` is not."""

    kind: Literal["started", "finished", "failed", "given up"]
    key: str
    attempt: int
    error: str = ""
    seconds: float = 0.0


def run_jobs(
    jobs: Sequence[Job],
    engine: Launcher,
    *,
    finished: Callable[[str], bool],
    retries: int = 2,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> dict[str, str]:
    """Run jobs, and return the errors of those that failed for good, by key.

    A job that failed is started again up to `retries` times, after the others; if its machine was lost, without that
    being counted, and not if its command refused it. A job whose results are there, as `finished` tells by its key, is
    done whatever its process did.
    """
    waiting, running = deque(jobs), dict[str, tuple[Job, float]]()
    attempts, lost, errors = Counter[str](), Counter[str](), dict[str, str]()
    with engine:
        while waiting or running:
            while waiting and len(running) < engine.places():
                job = waiting.popleft()
                attempts[job.key] += 1
                running[job.key] = job, time.monotonic()
                on_event(JobEvent("started", job.key, attempts[job.key]))
                engine.start(job)
            for ended in engine.ended():
                job, began = running.pop(ended.key)
                lost[job.key] += ended.lost
                error = "" if finished(job.key) else ended.error or _missing(job.key, finished, engine.patience)
                failures = attempts[job.key] - min(lost[job.key], MOST_LOST)
                kind: Literal["finished", "failed", "given up"] = "finished"
                if error:
                    kind = "failed" if failures <= retries and not ended.refused else "given up"
                if kind == "failed":
                    waiting.append(job)
                elif kind == "given up":
                    errors[job.key] = error
                on_event(JobEvent(kind, job.key, attempts[job.key], error, time.monotonic() - began))
    return errors


def _missing(key: str, finished: Callable[[str], bool], patience: float) -> str:
    """Return the error of a job that ended well but whose results are not seen in time; empty if they are."""
    until = time.monotonic() + patience
    while not finished(key):
        if time.monotonic() >= until:
            return "ended well, but its results cannot be read"
        time.sleep(min(1.0, patience))
    return ""
