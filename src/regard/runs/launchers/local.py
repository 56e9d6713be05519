"""Jobs as processes of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from regard.errors import UserError
from regard.runs.launchers.jobs import Job, JobResult, StartedJob, start_job


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(workers: int | None) -> None:
    """Raise UserError for fewer than one worker."""
    if workers is not None and workers < 1:
        raise UserError(f"workers: expected at least 1, got {workers}")


class Local:
    """Several processes at once (default: one a core), which share the cores equally.

    With `devices`, GPUs as CUDA_VISIBLE_DEVICES names them, there is one process a GPU, which sees only that one.
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
        environment = {}
        if self._free:
            self._device[job.key] = environment["CUDA_VISIBLE_DEVICES"] = self._free.pop(0)
        self._running[job.key] = start_job(job, max(1, cores() // self.workers), environment)

    def ended(self) -> list[JobResult]:
        while not (results := [ended for job in self._running.values() if (ended := job.ended()) is not None]):
            time.sleep(0.05)
        for result in results:
            self._running.pop(result.key).wait()
            if result.key in self._device:
                self._free.append(self._device.pop(result.key))
        return results
