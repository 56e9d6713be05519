"""`regard learn`."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands.learn.config import LearnConfig, parse_recorded_seeds, split_methods
from regard.runs.arguments import add_config_options, add_run_options, file_slug, parse_config_options, parse_seeds
from regard.runs.progress import ProgressEvent

if TYPE_CHECKING:
    from regard.commands.learn.result import LearnResult
    from regard.commands.learn.run import Progress
    from regard.runs.progress import OnProgress

HELP = "Learn task after task, and see what is kept of each."
EXAMPLES = """streams:
  stdlib-split (embedded), ag-split, db-split, yahoo-split, yahoo-db-split,
  news-series, news-series-mnli, reviews, long-sequence, superni

methods:
  all of a model   finetune, probe, probe-finetune, prescale, replay, agem,
                   der++, mbpa++, ewc, lwf, idbr, osf
  LoRA             sapt, sapt-task-free, sequential-lora, incremental-lora,
                   replay-lora, o-lora, n-lora, inflora, migu, slao, gainlora,
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "stream",
        nargs="?",
        metavar="STREAM",
        help="a stream by its name (default: stdlib-split), a .jsonl, .csv, .tsv or .parquet file with the columns "
        "task, text and label, or a folder with a folder for each task",
    )
    parser.add_argument("--seeds", metavar="A,B,…", help="of rows, order, weights and batches (default: 508)")
    add_run_options(parser, "runs/learn-STREAM-METHOD")
    parser.add_argument("--no-save-models", action="store_true", help="keep no model of every task's end, for rollback")
    add_config_options(parser, LearnConfig, BY_SCALE, exclude=("stream", "seed"), show_defaults=False)


def parse_config(args: argparse.Namespace) -> tuple[LearnConfig, list[int]]:
    """Return the configuration, and the seeds, from options and file. Raises UserError."""
    changes = parse_config_options(args, LearnConfig)
    if args.stream is not None:
        changes["stream"] = args.stream
    config = LearnConfig.from_options(args.config, changes)
    split_methods(config)
    if args.seeds is not None:
        return config, parse_seeds(args.seeds)
    recorded = () if args.config is None else parse_recorded_seeds(args.config)
    return config, [*recorded] or [config.seed]


def run(args: argparse.Namespace) -> None:
    """Learn, save, print. What can be refused is refused before the model is loaded."""
    config, seeds = parse_config(args)
    from regard.commands.learn.run import PARTS, learn
    from regard.runs.command_line import run_command

    def run_learn(work_dir: Path, on_progress: OnProgress) -> LearnResult:
        return learn(
            config,
            seeds=seeds,
            work_dir=work_dir,
            resume=args.resume,
            save_models=not args.no_save_models,
            on_progress=describe_progress(on_progress),
        )

    name = f"{file_slug(Path(config.stream).stem)}-{file_slug(config.method)}"
    run_command(args, "learn", args.out or Path("runs") / f"learn-{name}", run_learn, parts=PARTS)


def describe_progress(on_progress: OnProgress) -> Callable[[Progress], None]:
    """Return a callback that describes each event of a comparison in words.

    What the stream's protocols differ in, which every run says before its first task, becomes a note.
    """
    from regard.commands.learn.one_run import PROTOCOLS, TASK_END
    from regard.data.protocols import format_protocol_differences

    clock = Clock()

    def report(progress: Progress) -> None:
        if progress.told.phase == PROTOCOLS:
            on_progress(
                ProgressEvent(phase="reading the stream", note=format_protocol_differences(progress.told.metrics))
            )
            return
        clock.tick(progress)
        on_progress(
            ProgressEvent(
                phase=clock.describe(progress),
                step=finished(progress),
                steps=progress.runs * progress.tasks,
                milestone=progress.told.phase == TASK_END,
            )
        )

    return report


def finished(told: Progress) -> int:
    """Return how many tasks of all runs are done."""
    from regard.commands.learn.one_run import TASK_END

    return (told.run - 1) * told.tasks + told.told.task_index - (told.told.phase != TASK_END)


class Clock:
    """Measures how long a task takes, and describes how far a run is."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._first = 0

    def tick(self, told: Progress) -> None:
        """Begin to measure with the first event."""
        if self._began is None:
            self._began, self._first = self._now(), finished(told)

    def left(self, told: Progress) -> datetime.timedelta | None:
        """Return the time for the tasks that are left, if they take as long as the finished ones; None at first."""
        done = finished(told) - self._first
        if self._began is None or done < 1:
            return None
        each = (self._now() - self._began) / done
        return datetime.timedelta(seconds=round(each * (told.runs * told.tasks - finished(told))))

    def describe(self, told: Progress) -> str:
        """Return how far a run is, as in "run 2 of 6, prescale, seed 39: task 3 of 7, science-computers, learnt"."""
        one, left = told.told, self.left(told)
        place = f"run {told.run} of {told.runs}, {told.method}, seed {told.seed}: task {one.task_index} of {told.tasks}"
        step = f" {one.step}/{one.steps}" if one.steps else ""
        return f"{place}, {one.task}, {one.phase}{step}" + (f"; {left} left" if left is not None else "")
