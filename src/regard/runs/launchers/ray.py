"""Jobs as tasks of a Ray cluster (Moritz et al. 2018): across processes and machines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from regard.errors import UserError, describe_error, warn_user
from regard.runs.launchers.jobs import (
    NO_GPU,
    TERMINATE_TIMEOUT,
    Job,
    JobResult,
    check_workers,
    cores,
    run_job,
    share_cores,
)

_STORE = 100 * 2**20  # bytes of the object store of an own cluster: only names and exit codes pass through it

_PATIENT = 200  # failed checks, 3 s apart, after which an own cluster's only node is lost: a busy machine is slow
_QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Silences logs of nodes, errors of cancelled tasks, warnings of changes, and usage statistics."""


class Ray:
    """One task a job, on any node that has a core (and `gpus` GPUs) for it; on another one if the node dies.

    Without an address a cluster of this machine is started with `workers` cores (default: all), and stopped in the end.
    With one ("auto", "host:port") the tasks go to that cluster, `workers` at once (default: as many as it has cores).
    All nodes need Regard, and the folder of the sweep at the same path.
    """

    patience = 20.0

    def __init__(self, *, address: str | None = None, workers: int | None = None, gpus: int = 0) -> None:
        check_workers(workers)
        try:
            with _quiet():
                import ray
        except ImportError:
            raise UserError("launcher: ray is not installed; pip install 'regard[sweep]', or choose local") from None
        self._ray: Any = ray
        self._address, self._workers, self._gpus = address, workers, gpus
        self._threads = 1 if address or workers is None else share_cores(workers)
        self._keys: dict[Any, str] = {}
        self._ours = False
        self._around = ExitStack()

    def __enter__(self) -> Ray:
        with ExitStack() as around:
            around.enter_context(_quiet())
            if not self._ray.is_initialized():
                self._begin()
            elif self._address:
                raise UserError(
                    "address: this process has joined a Ray cluster already; leave address out for that one"
                )
            try:
                self._check_gpus()
            except UserError:
                if self._ours:
                    self._ray.shutdown()
                raise
            self._around = around.pop_all()
        return self

    def _check_gpus(self) -> None:
        """Raise UserError if no node of an own cluster has as many GPUs as a job needs, which would wait for ever.

        A cluster that was joined may start further nodes: there it is a warning.
        """
        nodes = self._ray.nodes() if self._gpus else ()
        most = max((node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]), default=0)
        if most < self._gpus:
            message = f"gpus: expected a node of the cluster with {self._gpus}, the most that one has is {most:g}"
            if self._ours and not self._address:
                raise UserError(message)
            warn_user(f"{message}; trials wait for one")

    def _begin(self) -> None:
        """Start a cluster, or join the one at the address. Raises UserError."""
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        with _handlers_kept():
            try:
                if self._address:
                    self._ray.init(address=self._address, **quiet)
                else:
                    own: dict[str, Any] = {"num_cpus": self._workers or cores(), "object_store_memory": _STORE}
                    own["_system_config"] = {"health_check_failure_threshold": _PATIENT}
                    self._ray.init(address="local", include_dashboard=False, **own, **quiet)
            except Exception as error:  # Ray raises that class itself where a node does not start in time
                why = describe_error(error)
                raise UserError(f"address: no Ray cluster at {self._address or 'this machine'}: {why}") from error
        self._ours = True

    def __exit__(self, *error: object) -> None:
        with self._around:
            try:
                self._cancel()
            finally:
                if self._ours:
                    self._ray.shutdown()

    def places(self) -> int:
        if self._workers is not None:
            return self._workers
        resources = self._ray.cluster_resources()
        shares = [resources.get("CPU", 0.0), *([resources.get("GPU", 0.0) / self._gpus] if self._gpus else [])]
        return max(1, int(min(shares)))

    def start(self, job: Job) -> None:
        task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0, scheduling_strategy="SPREAD")(run_job)
        self._keys[task.remote(job, self._threads, None if self._gpus else NO_GPU)] = job.key

    def ended(self) -> list[JobResult]:
        tasks: list[Any] = []
        while not tasks:
            tasks, _ = self._ray.wait(list(self._keys), num_returns=1, timeout=0.5)
        return [self._result(task) for task in tasks]

    def _result(self, task: Any) -> JobResult:
        key, problems = self._keys.pop(task), self._ray.exceptions
        try:
            return self._ray.get(task)
        except problems.RayTaskError as error:
            return JobResult(key, str(error).strip().splitlines()[-1])
        except problems.OutOfMemoryError:
            return JobResult(key, "killed because its node ran out of memory")
        except problems.RayError as error:
            return JobResult(key, f"its node was lost ({type(error).__name__})", lost=True)

    def _cancel(self) -> None:
        """Interrupt the tasks, then kill them; a cluster that is gone has ended them already."""
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
    """Silence Ray through the environment for a while, unless the user has set otherwise."""
    ours = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
