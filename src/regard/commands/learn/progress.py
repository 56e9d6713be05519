"""Progress of a comparison, and how it is told."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.runs.progress import OnProgress, ProgressEvent

if TYPE_CHECKING:
    from regard.continual.run_state import ProgressEvent as TaskEvent


@dataclass(frozen=True)
class Progress:
    """Progress in run number `run`, from 1, of `runs` over `tasks` tasks; its phase is `TASK_END` after each task."""

    method: str
    seed: int
    run: int
    runs: int
    tasks: int
    event: TaskEvent

    @property
    def num_finished(self) -> int:
        """Number of finished tasks of all runs."""
        from regard.commands.learn.one_run import TASK_END

        return (self.run - 1) * self.tasks + self.event.task_index - (self.event.phase != TASK_END)


def describe_progress(on_progress: OnProgress, now: Callable[[], float] = time.monotonic) -> Callable[[Progress], None]:
    """Return a callback that reports a comparison's events as text, as in "run 2 of 6, prescale, seed 39: task 3 of 7".

    The protocols' differences, and what is said of lengths, become notes. The time left is estimated from the tasks
    finished since the first report.
    """
    from regard.commands.learn.one_run import PROTOCOLS, TASK_END
    from regard.data.splits import format_protocol_differences

    start: tuple[float, int] | None = None

    def report(progress: Progress) -> None:
        nonlocal start
        event, num_finished, num_tasks = progress.event, progress.num_finished, progress.runs * progress.tasks
        if event.phase == PROTOCOLS:
            note = format_protocol_differences(event.metrics)
            on_progress(ProgressEvent(phase="reading the stream", note=note))
            return
        if event.note:
            on_progress(ProgressEvent(phase="reading the texts", note=event.note))
            return
        start = start or (now(), num_finished)
        run = f"run {progress.run} of {progress.runs}, {progress.method}, seed {progress.seed}"
        step = f" {event.step}/{event.steps}" if event.steps else ""
        phase = f"{run}: task {event.task_index} of {progress.tasks}, {event.task}, {event.phase}{step}"
        if num_finished > start[1]:
            seconds_per_task = (now() - start[0]) / (num_finished - start[1])
            phase += f"; {datetime.timedelta(seconds=round(seconds_per_task * (num_tasks - num_finished)))} left"
        is_end = event.phase == TASK_END
        on_progress(ProgressEvent(phase=phase, step=num_finished, steps=num_tasks, milestone=is_end))

    return report
