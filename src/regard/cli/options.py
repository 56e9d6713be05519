"""What several commands read from their options in the same way."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType


def is_first() -> bool:
    """Whether this is the process that speaks and writes, where several run the same command."""
    return os.environ.get("RANK", "0") == "0"


def tell(summary: RenderableType, out: Path) -> None:
    """Print what a run has found, and what it has written."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(summary)
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"\nWritten to {out}: {written}", soft_wrap=True)


def number(text: str, kind: type, option: str) -> float | int:
    """The number that a text says. Raises UserError, which names the option."""
    try:
        value: float | int = kind(text)
    except ValueError:
        raise UserError(f"{option}: expected a number, got {text!r}") from None
    return value


def of_model(model: str) -> str:
    """A model's name as a part of a file's name."""
    if Path(model).is_dir():
        model = Path(model).resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:80].strip("-.") or "model"


def new_folder(verb: str, model: str) -> Path:
    """A folder under runs/ that no run before had."""
    return Path("runs") / f"{verb}-{of_model(model)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
