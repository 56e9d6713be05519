"""Progress of a run: one event for all commands, shown as a bar or as lines."""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from regard.runs.rank import is_main_process

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_INTERVAL = 30.0  # seconds between two lines where standard error is no terminal
NOTEBOOK_INTERVAL = 0.2  # seconds between two pictures of a notebook's bar
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """Progress of a run: `step` of `steps` (None if unknown) of a phase such as "training"."""

    phase: str
    step: int = 0
    steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name: loss, tokens_per_second, seconds_left
    note: str = ""  # lines that are shown at once, if it was not shown before
    milestone: bool = False  # a log shows the event at once

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", in_one_line(self.phase))  # it may name a task of the user's, or a file

    def __str__(self) -> str:
        parts = [self.phase]
        for name in ("loss", "relative_error"):
            if name in self.metrics:
                parts.append(f"{name.replace('_', ' ')} {self.metrics[name]:.3f}")
        if "tokens_per_second" in self.metrics:
            parts.append(f"{self.metrics['tokens_per_second']:,.0f} tokens/s")
        if "seconds_left" in self.metrics:
            parts.append(f"{datetime.timedelta(seconds=round(self.metrics['seconds_left']))} left")
        return ", ".join(parts)


OnProgress = Callable[[ProgressEvent], None]


def in_one_line(text: str) -> str:
    """Return a text with a space in the place of each line break, as names of a user's own tasks may have."""
    return " ".join(text.splitlines())


def report_packing(on_progress: OnProgress | None, domain: str, tokens: int) -> None:
    """Report the tokens of a domain of texts that have been packed."""
    if on_progress is not None:
        on_progress(ProgressEvent(phase=f"packing {domain}", step=tokens))


@contextlib.contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Yield a callback that shows events on standard error: as a bar on a terminal, else a line every 30 seconds.

    Only the main process of several shows anything.
    """
    from rich.console import Console

    stderr = None if sys.stderr is None else cast("TextIO", _Unfailing(sys.stderr))
    console = Console(stderr=True, file=stderr, highlight=False)
    if not is_main_process():
        yield lambda event: None
    elif console.is_terminal:
        with _bar(console) as callback:
            yield callback
    else:
        progress = PlainProgress(lambda line: console.print(line, soft_wrap=True, markup=False))
        with heartbeat(progress.beat):
            yield progress


class _Unfailing:
    """A file that drops what cannot be written: a run does not end as the disk of its log is full, or a terminal gone.

    It does if it writes into a pipe that is closed, as it is asked to.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with _dropping():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _dropping():
            self._file.flush()


@contextlib.contextmanager
def _dropping() -> Iterator[None]:
    """Suppress errors of the system but for a closed pipe."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


@contextlib.contextmanager
def heartbeat(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every `PLAIN_INTERVAL` seconds while the block lasts, from a thread of its own."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(PLAIN_INTERVAL):
            beat()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class PlainProgress:
    """Prints an event at most every `PLAIN_INTERVAL` seconds, for logs; notes and milestones at once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last = time.monotonic()
        self._notes: set[str] = set()
        self._latest = ProgressEvent(phase="starting")
        self._started = self._last

    def __call__(self, event: ProgressEvent) -> None:
        if event.note and event.note not in self._notes:
            self._notes.add(event.note)
            self._write(event.note)
        self._latest = event
        if event.milestone or time.monotonic() - self._last >= PLAIN_INTERVAL:
            self._show(event)

    def beat(self) -> None:
        """Show the latest event again, with the time since the beginning, if nothing was shown for the interval."""
        if time.monotonic() - self._last >= PLAIN_INTERVAL:
            elapsed = datetime.timedelta(seconds=round(time.monotonic() - self._started))
            self._show(self._latest, f", {elapsed} so far")

    def _show(self, event: ProgressEvent, elapsed: str = "") -> None:
        self._last = time.monotonic()
        count = "" if event.steps is None else f" ({event.step:,} of {event.steps:,})"
        self._write(f"{event}{count}{elapsed}")


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    notes: set[str] = set()
    bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), console=console)
    with bar:
        task = bar.add_task("starting", total=None)

        def show(event: ProgressEvent) -> None:
            if event.note and event.note not in notes:
                notes.add(event.note)
                console.print(event.note, soft_wrap=True, markup=False)
            if event.steps is None:  # for which `update` keeps that of the phase before
                bar.tasks[0].total = None
            bar.update(task, description=str(event), completed=event.step, total=event.steps)

        yield show


def shown_in_notebook(adapt: Callable[[OnProgress], Callable[[Any], None]] | None = None) -> Callable[[F], F]:
    """Give the decorated command a bar as its `on_progress` in a notebook, if it is given none.

    `adapt` makes a callback for the command's own events out of one for a `ProgressEvent`.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("on_progress") is not None or not in_notebook() or not is_main_process():
                return function(*args, **kwargs)
            with _notebook_bar() as show:
                return function(*args, **{**kwargs, "on_progress": show if adapt is None else adapt(show)})

        return cast("F", command)

    return decorate


def in_notebook() -> bool:
    """Return whether the process is the kernel of a notebook, as Jupyter and Colab start it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def _notebook_bar() -> Iterator[OnProgress]:
    """Yield a callback that shows events as a bar: a widget where there are some, else text."""
    from tqdm.auto import tqdm

    notes: set[str] = set()
    shown_at, phase = 0.0, ""
    with tqdm(desc="starting", bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]") as bar:

        def show(event: ProgressEvent) -> None:
            nonlocal shown_at, phase
            if event.note and event.note not in notes:
                notes.add(event.note)
                bar.write(event.note)
            if event.steps is None:  # for which `reset` keeps that of the phase before
                bar.total = None
            elif event.steps != bar.total:
                bar.reset(event.steps)
            bar.n = event.step
            bar.set_description_str(str(event), refresh=False)
            is_last, now = event.step == event.steps, time.monotonic()
            if is_last or event.milestone or event.phase != phase or now - shown_at >= NOTEBOOK_INTERVAL:
                bar.refresh()
                shown_at, phase = now, event.phase

        yield show
