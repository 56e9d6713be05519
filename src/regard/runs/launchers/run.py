"""Run jobs with a launcher, several at once, and retry those that fail."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from regard.runs.launchers.jobs import Job, JobResult

MOST_LOST = 20
"""Machines that a job may lose before that counts as a failure."""


class Launcher(Protocol):
    """Where jobs run: a context, at whose end no job is at work."""

    patience: float
    """Seconds until a file that a job wrote is seen in this process."""

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
    being counted. A job whose results are there, as `finished` tells by its key, is done whatever its process did.
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
    """Return the error of a job that ended well but whose results are not seen in time; empty if they are."""
    until = time.monotonic() + patience
    while not finished(key):
        if time.monotonic() >= until:
            return "ended well, but its results cannot be read"
        time.sleep(min(1.0, patience))
    return ""
