"""`regard learn`."""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import UserError
from regard.runs.arguments import (
    add_fields,
    check_work_dir,
    default_work_dir,
    is_main_process,
    model_slug,
    parse_given_fields,
    parse_number,
    print_summary,
)

if TYPE_CHECKING:
    from rich.console import Console

    from regard.commands.learn.config import LearnConfig
    from regard.commands.learn.run import Progress

HELP = "Learn task after task, and see what is kept of each."
EXAMPLES = """streams:
  stdlib-split (embedded), ag-split, db-split, yahoo-split, yahoo-db-split,
  news-series, news-series-mnli, reviews, long-sequence, superni

methods:
  all of a model   finetune, probe, probe-finetune, prescale, replay, agem,
                   der++, mbpa++, ewc, lwf, idbr, osf
  LoRA             sapt, sapt-task-free, sequential-lora,
                   incremental-lora, replay-lora, o-lora, n-lora, inflora, migu, slao, gainlora,
                   seekr, epi
  prompts, other   l2p, progprompt, lfpt5, ctr
  to compare with  separate (a model for each task), joint (all tasks at once)

settings:
  --set NAME=VALUE, of the method; those of sapt and sapt-task-free stand in
  docs/sapt-settings.md, a name that there is not is answered with all there are

examples:
  regard learn stdlib-split
  regard learn --method finetune,probe-finetune,prescale --seeds 508,39,123
  regard learn db-split --data published --order paper --out runs/db
  regard learn stdlib-split --method sapt,replay-lora,joint --head labels
  regard learn reviews.jsonl --model bert-base-uncased --scale paper
  regard learn --config runs/db --method joint --out runs/joint
  regard sweep learn --vary method=finetune,prescale --seeds 508,39 --out runs/s

Several methods are one comparison: one run for each method and seed, one after
the other. `regard sweep learn` gives each a process of its own.
"""
BY_SCALE = """Rows, lengths, batch, epochs, rates, schedule and precision that are not given
are those of --scale."""
OTHERWISE = ("stream", "seed")
"""Fields of a course that the command takes in another way than as an option of their name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: one for each field of a course, and where to write."""
    parser.add_argument(
        "stream",
        nargs="?",
        metavar="STREAM",
        help="a stream by its name (default: stdlib-split), a .jsonl, .csv, .tsv or .parquet file with the columns "
        "task, text and label, or a folder with a folder for each task",
    )
    parser.add_argument("--seeds", metavar="A,B,…", help="of rows, order, weights and batches (default: 508)")
    parser.add_argument("--config", metavar="FILE", help="course and seeds of a run: its folder, or results.json")
    _add_course(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: runs/learn-STREAM-METHOD)")
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier run in DIR")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was broken off, or begin")
    parser.add_argument("--no-save-models", action="store_true", help="keep no model of every task's end, for rollback")


def _add_course(parser: argparse.ArgumentParser) -> None:
    """One option for each field of a course, unset unless it is given."""
    from regard.commands.learn.config import LearnConfig

    group = parser.add_argument_group("course", BY_SCALE)
    add_fields(group, LearnConfig, "course", without=OTHERWISE)


def given_course(given: argparse.Namespace) -> tuple[LearnConfig, list[int]]:
    """What is to be learnt and how, and with which seeds, from options and file. Raises UserError."""
    from regard.commands.learn.config import LearnConfig, parse_field, parse_seeds, split_methods

    changes = parse_given_fields(given, "course", parse_field)
    if given.stream is not None:
        changes["stream"] = given.stream
    base = LearnConfig() if given.config is None else LearnConfig.from_file(given.config)
    course = base.replace(**changes)
    split_methods(course)
    if given.seeds is not None:
        return course, [int(parse_number(part, int, "--seeds")) for part in given.seeds.split(",")]
    return course, [*(parse_seeds(given.config) if given.config is not None else ())] or [course.seed]


def run(given: argparse.Namespace) -> None:
    """Learn, print, write; everything that can be refused is refused before."""
    course, seeds = given_course(given)
    from regard.commands.learn.run import can_resume, learn
    from regard.runs.folder import check_output_dir

    named = f"{model_slug(Path(course.stream).stem)}-{model_slug(course.method)}"
    out = given.out or Path("runs") / f"learn-{named}"
    work = default_work_dir(out)
    if is_main_process():
        _check_unfinished(out, work, given)
        check_output_dir(out, overwrite=given.overwrite, verb="learn")
        check_work_dir(work, work.exists(), given)
    try:
        with _progress() as on_progress:
            found = learn(
                course,
                seeds=seeds,
                work_dir=work,
                resume=given.resume,
                save_models=not given.no_save_models,
                on_progress=on_progress,
            )
        if not is_main_process():
            return
        replace(found, metadata={**found.metadata, "command": given.line}).save(out, overwrite=given.overwrite)
    except KeyboardInterrupt:
        if not can_resume(work):
            raise
        raise UserError(
            f"interrupted; what was learnt is kept in {work}: the same command with --resume goes on"
        ) from None
    finally:
        if is_main_process() and not can_resume(work):
            _clear(work)
    _clear(work)
    print_summary(found.summary(), out)


def _check_unfinished(out: Path, work: Path, given: argparse.Namespace) -> None:
    """Nothing, or a UserError: a run is to be gone on with that is finished."""
    from regard.commands.learn.run import can_resume
    from regard.runs.folder import RESULTS

    if given.resume and not given.overwrite and (out / RESULTS).is_file() and not can_resume(work):
        raise UserError(
            f"--resume: the run in {out} is finished, there is nothing to resume; choose another folder with --out, "
            "or begin again with --overwrite"
        )


def _clear(work: Path) -> None:
    """Remove what a run keeps while it is at work, and the folder if that was all."""
    from regard.commands.learn.result import MODELS
    from regard.commands.learn.run import JOURNAL, STATES

    for part in (JOURNAL, STATES, MODELS):
        shutil.rmtree(work / part, ignore_errors=True)
    with suppress(OSError):
        work.rmdir()


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None] | None]:
    """What a run tells on the way, on standard error: all of it on a terminal, else a line for each finished task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not is_main_process():
        yield None
        return
    clock = Clock()
    if not console.is_terminal:
        yield with_protocols(console, lambda told: _line(clock, told))
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("tasks"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("reading the stream", total=None)

        def show(told: Progress) -> None:
            clock.tick(told)
            bar.update(task, description=clock.said(told), completed=finished(told), total=told.runs * told.tasks)

        yield with_protocols(console, show)


def with_protocols(console: Console, show: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """What shows how far a run is, and prints on the console what the stream's protocols differ in, once for all runs.

    That is told by each run before its first task; the files are not read again for it.
    """
    from regard.commands.learn.one_run import PROTOCOLS
    from regard.data.protocols import format_protocol_differences as in_words

    said: set[str] = set()

    def tell(told: Progress) -> None:
        if told.told.phase != PROTOCOLS:
            show(told)
            return
        lines = in_words(told.told.metrics)
        if lines not in said:
            console.print(lines, markup=False, highlight=False, soft_wrap=True)
        said.add(lines)

    return tell


def _line(clock: Clock, told: Progress) -> None:
    """Say that a task is learnt."""
    from regard.commands.learn.run import TASK_END

    clock.tick(told)
    if told.told.phase == TASK_END:
        print(clock.said(told), file=sys.stderr, flush=True)


def finished(told: Progress) -> int:
    """How many tasks of all runs are done."""
    from regard.commands.learn.run import TASK_END

    return (told.run - 1) * told.tasks + told.told.task_index - (told.told.phase != TASK_END)


class Clock:
    """Measures how long a task takes, and says how far a run is."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._first = 0

    def tick(self, told: Progress) -> None:
        """Begin to measure with the first thing that is told."""
        if self._began is None:
            self._began, self._first = self._now(), finished(told)

    def left(self, told: Progress) -> datetime.timedelta | None:
        """The time that the tasks that are left will take, as those that are done took; None before one is done."""
        done = finished(told) - self._first
        if self._began is None or done < 1:
            return None
        each = (self._now() - self._began) / done
        return datetime.timedelta(seconds=round(each * (told.runs * told.tasks - finished(told))))

    def said(self, told: Progress) -> str:
        """How far a run is, as in "run 2 of 6, prescale, seed 39: task 3 of 7, science-computers, learnt"."""
        one, left = told.told, self.left(told)
        place = f"run {told.run} of {told.runs}, {told.method}, seed {told.seed}: task {one.task_index} of {told.tasks}"
        step = f" {one.step}/{one.steps}" if one.steps else ""
        return f"{place}, {one.task}, {one.phase}{step}" + (f"; {left} left" if left is not None else "")
