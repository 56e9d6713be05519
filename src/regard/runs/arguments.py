"""What several commands read from their options in the same way."""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.runs.config import allowed_types

if TYPE_CHECKING:
    from rich.console import RenderableType


_SEVERAL = tuple[str, ...]


def print_summary(summary: RenderableType, out: Path) -> None:
    """Print what a run has found, and what it has written."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(summary)
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"\nWritten to {out}: {written}", soft_wrap=True)


def add_fields(
    parser: argparse._ActionsContainer, record: type[Any], prefix: str, *, without: Collection[str] = ()
) -> None:
    """One option for each field of a record but those `without`, unset unless it is given; see `parse_given_fields`."""
    for one in fields(record):
        shared: dict[str, Any] = {"dest": f"{prefix}_{one.name}", "default": argparse.SUPPRESS}
        shared["help"] = one.metadata["help"].replace("%", "%%")
        option = f"--{one.name.replace('_', '-')}"
        if one.name in without:
            continue
        if isinstance(one.default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, **shared)
        else:
            more: dict[str, Any] = (
                {"nargs": "+", "action": "extend"} if allowed_types(record, one.name)[0] == _SEVERAL else {}
            )
            parser.add_argument(option, metavar="X", **more, **shared)


def parse_given_fields(given: argparse.Namespace, prefix: str, parsed: Callable[[str, str], Any]) -> dict[str, Any]:
    """The fields that were given as options, by name: `parsed(name, text)` is the value of a text. Raises UserError."""
    changes = {}
    for option, said in vars(given).items():
        name = option.removeprefix(f"{prefix}_")
        if option != name:
            changes[name] = (
                tuple(said) if isinstance(said, list) else said if said in (True, False) else parsed(name, said)
            )
    return changes


def default_work_dir(out: Path) -> Path:
    """The folder OUT.work, where a long run is kept until it is done. Raises UserError for one that has no name."""
    if not out.resolve().name:
        raise UserError(f"--out: expected a folder that can be made, got {out}")
    return (out if out.name else out.resolve()).with_name(f"{out.resolve().name}.work")


def check_work_dir(work: Path, there: bool, given: argparse.Namespace) -> None:
    """Nothing, or a UserError: there is what a run that was broken off has left, and it is not said what to do."""
    if there and not (given.resume or given.overwrite):
        raise UserError(f"--out: {work} is of a run that was broken off; go on with --resume, or give --overwrite")


def parse_number(text: str, kind: type, option: str) -> float | int:
    """The number that a text says. Raises UserError, which names the option."""
    try:
        value: float | int = kind(text)
    except ValueError:
        raise UserError(f"{option}: expected a number, got {text!r}") from None
    return value


def check_model_folder(model: str) -> None:
    """Nothing, or a UserError: this is the folder of a run, and the model is in a folder of it."""
    folder = Path(model) / "model"
    if not (Path(model) / "config.json").is_file() and (folder / "config.json").is_file():
        raise UserError(
            f"model: expected config.json in the folder '{model}', which is of a run; did you mean {folder}?"
        )


def model_slug(model: str) -> str:
    """A model's name as a part of a file's name."""
    if Path(model).is_dir():
        model = Path(model).resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:80].strip("-.") or "model"


def new_run_dir(verb: str, model: str) -> Path:
    """A folder under runs/ that no run before had."""
    return Path("runs") / f"{verb}-{model_slug(model)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
