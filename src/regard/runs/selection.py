"""Selection of a table's rows by the values of its columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.errors import UserError, warn_user

MAX_LISTED = 8
"""Values that a warning lists, at most."""


def select_rows(table: pd.DataFrame, equal: Mapping[str, Any], name: str | None = None) -> pd.DataFrame:
    """Return the rows with one of the values (None: null) in each column of `equal`.

    Warns the caller's caller if no row is left, with what there is in the column that left none. `name` is what was
    selected before. Raises UserError for an unknown column, and for a threshold that was not measured.
    """
    for column, value in equal.items():
        if column not in table:
            raise UserError(f"unknown column {column!r}; the table has: {', '.join(table.columns)}")
        if value is None:
            rows = table[table[column].isna()]
        elif isinstance(value, (list, tuple, set, range)):
            rows = table[table[column].isin(list(value)) | (table[column].isna() & (None in value))]
        else:
            rows = table[table[column] == value]
            if column == "epsilon" and rows.empty:
                known = ", ".join(f"{number:g}" for number in table[column].dropna().unique()) or "none"
                raise UserError(f"epsilon: {value!r} was not measured; the table has: {known}")
        if rows.empty:
            asked = ", ".join([*([] if name is None else [repr(name)]), *(f"{k}={v!r}" for k, v in equal.items())])
            warn_user(f"frame({asked}) is empty: {_describe_column(table[column])}")
            return rows.reset_index(drop=True)
        table = rows
    return table.reset_index(drop=True)


def _describe_column(column: pd.Series) -> str:
    if column.empty:
        return "nothing was measured"
    values = [*column.dropna().unique(), *([None] if column.hasnans else [])]
    return f"{column.name} was measured for {list_some(values, MAX_LISTED)}"


def list_some(values: Sequence[Any], most: int, separator: str = ", ") -> str:
    """Return so many of the values, and the number of the others."""
    rest = len(values) - most
    return separator.join(map(str, values[:most])) + (f" and {rest} more" if rest > 0 else "")
