"""Jobs as tasks of a Ray cluster (Moritz et al. 2018): across processes and machines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from regard.errors import UserError
from regard.runs.launchers.jobs import TERMINATE_TIMEOUT, Job, JobResult, run_job
from regard.runs.launchers.local import cores

_STORE = 100 * 2**20
"""Bytes of the object store of a cluster of our own: only names and exit codes pass through it."""

_QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Keeps Ray from printing what its nodes log, what became of cancelled tasks and what will change, and from the web."""


class Ray:
    """One task a job, on whichever node has a core for it (and `gpus` GPUs).

    Without an address a cluster of this machine is started with `workers` cores (default: all), and stopped in the end.
    With one ("auto", "host:port") the tasks go to that cluster, `workers` at once (default: as many as it has cores).
    The folder of a sweep has to be at the same path on all nodes, and Regard has to be installed there. A job whose
    node dies is begun again on another one.
    """

    patience = 20.0

    def __init__(self, *, address: str | None = None, workers: int | None = None, gpus: int = 0) -> None:
        if workers is not None and workers < 1:
            raise UserError(f"workers: expected at least 1, got {workers}")
        try:
            with _quiet():
                import ray
        except ImportError:
            raise UserError("launcher: ray is not installed; pip install 'regard[sweep]', or choose local") from None
        self._ray: Any = ray
        self._address, self._workers, self._gpus = address, workers, gpus
        self._threads = 1 if address or workers is None else max(1, cores() // workers)
        self._keys: dict[Any, str] = {}
        self._ours = False
        self._around = ExitStack()

    def __enter__(self) -> Ray:
        with ExitStack() as around:
            around.enter_context(_quiet())
            if not self._ray.is_initialized():
                self._begin()
            self._around = around.pop_all()
        return self

    def _begin(self) -> None:
        """Start a cluster, or go to the one at the address. Raises UserError."""
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        with _handlers_kept():
            try:
                if self._address:
                    self._ray.init(address=self._address, **quiet)
                else:
                    own = {"num_cpus": self._workers or cores(), "object_store_memory": _STORE}
                    self._ray.init(address="local", include_dashboard=False, **own, **quiet)
            except Exception as error:  # Ray raises that class itself where a node does not start in time
                why = " ".join(str(error).split())
                raise UserError(f"address: no Ray cluster at {self._address or 'this machine'}: {why}") from error
        self._ours = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._around:
            try:
                self._cancel()
            finally:
                if self._ours:
                    self._ray.shutdown()

    def places(self) -> int:
        if self._workers is not None:
            return self._workers
        there = self._ray.cluster_resources()
        shares = [there.get("CPU", 0.0), *([there.get("GPU", 0.0) / self._gpus] if self._gpus else [])]
        return max(1, int(min(shares)))

    def start(self, job: Job) -> None:
        task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0, scheduling_strategy="SPREAD")(run_job)
        self._keys[task.remote(job, self._threads)] = job.key

    def ended(self) -> list[JobResult]:
        found: list[Any] = []
        while not found:
            found, _ = self._ray.wait(list(self._keys), num_returns=1, timeout=0.5)
        return [self._ended(task) for task in found]

    def _ended(self, task: Any) -> JobResult:
        key, problems = self._keys.pop(task), self._ray.exceptions
        try:
            ended: JobResult = self._ray.get(task)
            return ended
        except problems.RayTaskError as error:
            return JobResult(key, str(error).strip().splitlines()[-1])
        except problems.OutOfMemoryError:
            return JobResult(key, "killed because its node ran out of memory")
        except problems.RayError as error:
            return JobResult(key, f"its node was lost ({type(error).__name__})", lost=True)

    def _cancel(self) -> None:
        """Ask what is at work to end, as Ctrl-C does; then with force. A cluster that is gone has ended it already."""
        tasks = list(self._keys)
        self._keys.clear()
        with contextlib.suppress(self._ray.exceptions.RayError):
            for task in tasks:
                self._ray.cancel(task, force=False)
            _, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=TERMINATE_TIMEOUT) if tasks else ([], [])
            for task in left:
                self._ray.cancel(task, force=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """While it lasts the environment asks Ray for quiet, unless it says otherwise; afterwards it is as it was."""
    ours = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """While it lasts others may set what happens at SIGTERM and SIGINT; afterwards it is as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
