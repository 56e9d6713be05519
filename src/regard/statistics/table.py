"""The tidy table of all results: its columns, and the selection of rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from regard.errors import UserError, warn_user

COLUMNS = ("statistic", "layer", "head", "position", "epsilon", "value", "standard_error", "n", "site")
TOKEN_COLUMNS = ("site", "layer", "head", "position", "token", "count", "share")
WHOLE_NUMBERS = ("layer", "head", "position", "n", "count")
FRACTIONS = ("epsilon", "value", "standard_error", "share")


def make_table(rows: Sequence[Sequence[Any]], columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return rows as a table, with nullable integers and null for absent numbers."""
    table = pd.DataFrame(rows, columns=list(columns))
    dtypes = {c: "Int64" for c in WHOLE_NUMBERS if c in columns}
    dtypes |= {c: "float64" for c in FRACTIONS if c in columns}
    return table.astype(dtypes)


def is_of_statistic(name: str, statistic: str) -> bool:
    """Return whether a name in the table is of a statistic, also if it has several numbers; see `filter_statistic`."""
    return name == statistic or name.startswith(f"{statistic}_")


KEY_HEADS = ("key_norm", "value_norm")
"""Statistics whose heads are those of keys and values, of which grouped queries have fewer."""
DERIVED = ("_sink_ratio", "_own")
"""Endings of rows that say something else than the rows of their statistic."""


def filter_statistic(table: pd.DataFrame, statistic: str) -> pd.Series:
    """Return which rows are of a statistic, also if it has several numbers, such as massive_activations_top1."""
    return (table["statistic"] == statistic) | table["statistic"].str.startswith(f"{statistic}_")


def select_statistic(table: pd.DataFrame, statistic: str | None) -> pd.DataFrame:
    """Return the rows of a statistic (None: all). Raises UserError for one that the table lacks.

    A name that no row has stands for its numbers, as massive_activations for massive_activations_top1, but never for
    what is derived from its own rows alone: key_norm without positions is not key_norm_sink_ratio.
    """
    if statistic is None:
        return table
    rows = table[filter_statistic(table, statistic)]
    if rows.empty:
        known = ", ".join(dict.fromkeys(table["statistic"])) or "none"
        raise UserError(f"unknown statistic {statistic!r}; the table has: {known}")
    exact = rows["statistic"] == statistic
    if exact.any():
        return rows[exact]
    names = list(dict.fromkeys(rows["statistic"]))
    if all(name.removeprefix(statistic) in DERIVED for name in names):
        raise UserError(f"the table has no rows of {statistic} itself (positions may be left out), only {names[0]}")
    return rows


def find_group_sizes(table: pd.DataFrame) -> dict[tuple[str, int], int]:
    """Return the query heads of each key/value head, by site and layer, where a table has statistics of both."""
    rows = table[table["head"].notna()]
    is_of_keys = rows["statistic"].str.startswith(KEY_HEADS)
    keys, queries = (of.groupby(["site", "layer"])["head"].max() + 1 for of in (rows[is_of_keys], rows[~is_of_keys]))
    return {(str(site), int(layer)): int(size) for (site, layer), size in (queries // keys).dropna().items()}


def spread_key_heads(heads: Iterable[tuple[str, int, int]], table: pd.DataFrame) -> set[tuple[str, int, int]]:
    """Return the query heads that read key/value heads; one each, with a warning, if the table does not tell."""
    sizes, spread = find_group_sizes(table), set[tuple[str, int, int]]()
    heads = list(heads)
    if any((site, layer) not in sizes for site, layer, _ in heads):
        warn_user(
            "heads: these are heads of keys and values; measure entropy beside, to be told which queries read them"
        )
    for site, layer, head in heads:
        size = sizes.get((site, layer), 1)
        spread |= {(site, layer, head * size + member) for member in range(size)}
    return spread


def select_heads(
    table: pd.DataFrame,
    statistic: str,
    below: float | None,
    above: float | None,
    relative: bool,
    equal: Mapping[str, Any],
) -> set[tuple[str, int, int]]:
    """Return the heads (site, layer, head) whose value passes thresholds: see `MeasureResult.heads`."""
    if below is None and above is None:
        raise UserError("heads: expected a threshold, below= or above=")
    rows = table[table["head"].notna()]
    for column, value in equal.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    if not len(rows) or rows.duplicated(["site", "layer", "head"]).any():
        names = ", ".join(f"{column}={value}" for column, value in equal.items())
        raise UserError(f"heads: expected one value of {statistic} a head where {names}; choose other rows")
    values = rows["value"]
    if relative:
        values = values / rows.groupby(["site", "layer"])["value"].transform("mean")
    passes = values.notna()
    passes &= True if below is None else values < below
    passes &= True if above is None else values > above
    return {(str(row.site), int(row.layer), int(row.head)) for row in rows[passes].itertuples()}
