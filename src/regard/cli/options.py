"""What several commands read from their options in the same way."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from regard.errors import UserError


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
