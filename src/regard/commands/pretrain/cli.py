"""`regard pretrain`."""

from __future__ import annotations

import argparse
import datetime
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.runs.arguments import (
    add_fields,
    check_work_dir,
    default_work_dir,
    model_slug,
    parse_given_fields,
    print_summary,
)
from regard.runs.rank import is_main_process

HELP = "Train a small decoder from nothing, and watch sinks while they emerge."
EXAMPLES = """examples:
  regard pretrain nano
  regard pretrain pico --attention sigmoid --weight-decay 1
  regard pretrain nano --data novels.txt web@0.3=pages.jsonl --max-steps 5000
  regard pretrain --config runs/pretrain-nano/results.json --seed 1
  accelerate launch -m regard pretrain 60m --out runs/60m
"""
NAMED = "nano"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: one for each field of a recipe, and where to write."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe: pico, nano (default), 1m, 60m or 1b")
    parser.add_argument("--config", metavar="FILE", help="recipe from a file that a run has written (results.json)")
    add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: runs/pretrain-NAME)")
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier run in DIR")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was broken off, or begin")
    parser.add_argument(
        "--cache", metavar="DIR", help="where packed text is kept (default: $REGARD_CACHE, else ~/.cache/regard)"
    )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """One option for each field of a recipe, unset unless it is given."""
    from regard.commands.pretrain.config import PretrainConfig

    add_fields(parser.add_argument_group("recipe (defaults are those of NAME)"), PretrainConfig, "recipe")


def given_recipe(given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The recipe to begin with, by its name or from a file, and what the options change of it. Raises UserError."""
    from regard.commands.pretrain.config import PretrainConfig, parse_field, preset_config

    if given.name is not None and given.config is not None:
        raise UserError(f"--config: expected a recipe's name or a file, got both '{given.name}' and {given.config}")
    base = PretrainConfig.from_file(given.config) if given.config is not None else given.name or NAMED
    changes = parse_given_fields(given, "recipe", parse_field)
    preset_config(base, **changes)
    return base, changes


def run(given: argparse.Namespace) -> None:
    """Train, print, write; everything that can be refused is refused before."""
    base, changes = given_recipe(given)
    from regard.commands.pretrain.run import can_resume, pretrain
    from regard.runs.output_dir import check_output_dir

    name = given.name or (model_slug(Path(given.config).resolve().parent.name) if given.config else NAMED)
    out = given.out or Path("runs") / f"pretrain-{name}"
    work = default_work_dir(out)
    if is_main_process():
        check_output_dir(out, overwrite=given.overwrite, verb="pretrain")
        check_work_dir(work, can_resume(work), given)
    try:
        with _progress() as reports:
            found = pretrain(
                base, work_dir=work, resume=given.resume, keep_work_dir=True, cache=given.cache, **reports, **changes
            )
        if not is_main_process():
            return
        found = replace(found, metadata={**found.metadata, "command": given.line})
        found.save(out, overwrite=given.overwrite)
    except KeyboardInterrupt:
        if not can_resume(work):
            raise
        raise UserError(
            f"interrupted; what was trained is kept in {work}: the same command with --resume goes on"
        ) from None
    shutil.rmtree(work)
    print_summary(found.summary(), out)


Reports = dict[str, Callable[..., None]]


@contextmanager
def _progress() -> Iterator[Reports]:
    """What a run tells on the way, on standard error if that is a terminal: tokens packed; loss, speed, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal or not is_main_process():
        yield {}
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console)
    with bar:
        task = bar.add_task("reading text", total=None)

        def of_text(domain: str, tokens: int) -> None:
            bar.update(task, description=f"packing {domain}", completed=tokens)

        def of_training(step: int, steps: int, numbers: Mapping[str, float]) -> None:
            speed, left = (
                numbers.get("items_per_second", 0.0),
                datetime.timedelta(seconds=round(numbers["seconds_left"])),
            )
            said = f"loss {numbers.get('loss', float('nan')):.3f}, {speed:,.0f} tokens/s, {left} left"
            bar.update(task, description=said, completed=step, total=steps)

        yield {"on_text": of_text, "on_progress": of_training}
