"""What every saved run has: its record, its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.runs.folder import RESULTS

PAGE = "report.html"
"""The page that every run leaves."""


def read_record(folder: str | Path, *, verb: str, told: str) -> dict[str, Any]:
    """The record of a finished run of a verb in a folder; `told` names what such a run is of. Raises UserError."""
    path = Path(folder) / RESULTS
    if not path.is_file():
        raise UserError(f"no run in {folder}: expected a folder with {RESULTS}, as `regard {verb} --out` writes it")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the run in {folder} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(record, dict) or record.get("verb") != verb:
        raise UserError(f"the run in {folder} is not one of {told}")
    return record
