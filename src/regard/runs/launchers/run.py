"""Jobs through an engine: so many at once, each tried again when it fails, the others going on."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from regard.runs.launchers.jobs import Job, JobResult

MOST_LOST = 20
"""Machines that may go away under one job before it counts as failed."""


class Launcher(Protocol):
    """Where jobs run. As a context it is there for the time of a block; at the block's end no job is at work."""

    patience: float
    """Seconds after which what a job has written is seen here."""

    def __enter__(self) -> Launcher: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def places(self) -> int:
        """How many jobs may be at work at once, at least 1."""
        ...

    def start(self, job: Job) -> None:
        """Begin a job."""
        ...

    def ended(self) -> list[JobResult]:
        """The jobs that have ended since, at least one; waits for it."""
        ...


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
    """The errors of the jobs that failed for good, by key.

    A job that failed is begun again up to `retries` times, after the others; one whose machine went away is begun
    again without that being counted. `finished` tells by its key whether a job has left what it should: then it is
    done, whatever became of its process.
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
                    kind = "failed" if failures <= retries else "given up"
                if kind == "failed":
                    waiting.append(job)
                elif kind == "given up":
                    errors[job.key] = error
                on_event(JobEvent(kind, job.key, attempts[job.key], error, time.monotonic() - began))
    return errors


def _missing(key: str, finished: Callable[[str], bool], patience: float) -> str:
    """Empty, or what is wrong with a job that ended well: it left no results that could be seen for so long."""
    until = time.monotonic() + patience
    while not finished(key):
        if time.monotonic() >= until:
            return "ended well, but its results cannot be read"
        time.sleep(min(1.0, patience))
    return ""
