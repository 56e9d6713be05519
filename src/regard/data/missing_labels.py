"""Rows of a user's own tables that have no label: an empty cell, null, or none in that line."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from regard.errors import UserError, warn_user

MissingLabels = Literal["skip", "refuse"]
"""What becomes of rows without a label."""
UNLABELED = "unlabeled"
"""Key of the metadata of a stream, or of a task's data: how many rows were left out."""


def find_labeled(rows: Sequence[tuple[Mapping[str, Any], str]], column: str, path: Path, option: str) -> list[int]:
    """Return the indices of the rows that have a label; warn of the number of others.

    Args:
        rows: Values by column, and what messages call the place in the file.
        column: The column of labels; where no row has it, all rows are returned.
        path: The file.
        option: What messages begin with.

    Raises:
        UserError: No row has a label.
    """
    if not any(column in values for values, _ in rows):
        return list(range(len(rows)))
    labeled = [index for index, (values, _) in enumerate(rows) if not is_no_label(values.get(column))]
    if not labeled:
        expected = f"expected labels in the column '{column}' of {path}"
        raise UserError(f"{option}: {expected}, none of {len(rows)} rows has one")
    if len(labeled) < len(rows):
        first = next(place for values, place in rows if is_no_label(values.get(column)))
        told = f"{len(rows) - len(labeled)} of {len(rows)} rows have nothing in the column '{column}' and are left out"
        warn_user(f"{option}: {path}: {told}, the first in {first} (missing-labels=refuse stops there)")
    return labeled


def is_no_label(value: Any) -> bool:
    """Whether a cell of labels or answers is empty: nothing, NaN, blanks, or a list of these."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list):
        return all(map(is_no_label, value))
    return value is None or (isinstance(value, str) and not value.strip())


def undo_float(value: Any) -> Any:
    """Return a whole number that was written as a float as an integer, as pandas writes a column with a gap."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
