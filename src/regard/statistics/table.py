"""The tidy table of all results: its columns, and how to pick rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.errors import UserError

COLUMNS = ("statistic", "layer", "head", "position", "epsilon", "value", "standard_error", "n", "site")
TOKEN_COLUMNS = ("site", "layer", "head", "position", "token", "count", "share")
WHOLE_NUMBERS = ("layer", "head", "position", "n", "count")
FRACTIONS = ("epsilon", "value", "standard_error", "share")


def make_table(rows: Sequence[Sequence[Any]], columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Rows as a table, whole numbers as nullable integers and absent numbers as null."""
    table = pd.DataFrame(rows, columns=list(columns))
    kinds = {c: "Int64" for c in WHOLE_NUMBERS if c in columns}
    kinds |= {c: "float64" for c in FRACTIONS if c in columns}
    return table.astype(kinds)


def filter_statistic(table: pd.DataFrame, statistic: str) -> pd.Series:
    """Which rows a statistic made; it may tell several numbers, such as massive_activations_top1."""
    return (table["statistic"] == statistic) | table["statistic"].str.startswith(f"{statistic}_")


def select_rows(table: pd.DataFrame, statistic: str | None, equal: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of a name (None: all), and of these those where each column is its value, or one of them; None is null.

    A name that no row bears stands for all that begin with it: massive_activations for its _top1, …, _median.
    """
    if statistic is not None:
        check_statistic(table, statistic)
        exact = table["statistic"] == statistic
        table = table[exact if exact.any() else filter_statistic(table, statistic)]
    for column, value in equal.items():
        if column not in table:
            raise UserError(f"unknown column {column!r}; the table has: {', '.join(table.columns)}")
        if value is None:
            table = table[table[column].isna()]
        elif isinstance(value, (list, tuple, set, range)):
            table = table[table[column].isin(list(value))]
        else:
            table = table[table[column] == value]
    return table.reset_index(drop=True)


def check_statistic(table: pd.DataFrame, statistic: str) -> None:
    """Nothing, or a UserError that names the statistics there are."""
    if not filter_statistic(table, statistic).any():
        known = ", ".join(dict.fromkeys(table["statistic"])) or "none"
        raise UserError(f"unknown statistic {statistic!r}; the table has: {known}")
