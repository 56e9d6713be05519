"""Progress of a run: one event for all commands, shown as a bar or as lines."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regard.runs.rank import is_main_process

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_INTERVAL = 30.0  # seconds between two lines where standard error is no terminal


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """Progress of a run: `step` of `steps` (None if unknown) of a phase such as "training"."""

    phase: str
    step: int = 0
    steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name: loss, tokens_per_second, seconds_left
    note: str = ""  # a line that is shown at once, if it was not shown before
    milestone: bool = False  # a log shows the event at once

    def __str__(self) -> str:
        parts = [self.phase]
        if "loss" in self.metrics:
            parts.append(f"loss {self.metrics['loss']:.3f}")
        if "tokens_per_second" in self.metrics:
            parts.append(f"{self.metrics['tokens_per_second']:,.0f} tokens/s")
        if "seconds_left" in self.metrics:
            parts.append(f"{datetime.timedelta(seconds=round(self.metrics['seconds_left']))} left")
        return ", ".join(parts)


OnProgress = Callable[[ProgressEvent], None]


@contextlib.contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Yield a callback that shows events on standard error: as a bar on a terminal, else a line every 30 seconds.

    Only the main process of several shows anything.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not is_main_process():
        yield lambda event: None
    elif console.is_terminal:
        with _bar(console) as callback:
            yield callback
    else:
        yield PlainProgress(lambda line: console.print(line, soft_wrap=True, markup=False))


class PlainProgress:
    """Prints an event at most every `PLAIN_INTERVAL` seconds, for logs; notes and milestones at once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last = time.monotonic()
        self._notes: set[str] = set()

    def __call__(self, event: ProgressEvent) -> None:
        if event.note and event.note not in self._notes:
            self._notes.add(event.note)
            self._write(event.note)
        now = time.monotonic()
        if event.milestone or now - self._last >= PLAIN_INTERVAL:
            self._last = now
            count = "" if event.steps is None else f" ({event.step:,} of {event.steps:,})"
            self._write(f"{event}{count}")


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    notes: set[str] = set()
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console)
    with bar:
        task = bar.add_task("starting", total=None)

        def show(event: ProgressEvent) -> None:
            if event.note and event.note not in notes:
                notes.add(event.note)
                console.print(event.note, soft_wrap=True, markup=False)
            bar.update(task, description=str(event), completed=event.step, total=event.steps)

        yield show
