"""Results as columns: arrays of rows that share statistic, site, layer and threshold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from regard.statistics.table import make_table

Positions = Literal["all", "thin", "none"]
NUM_FIRST_POSITIONS = 16
"""Positions that a thin table holds before the powers of two."""


class StatisticRow(NamedTuple):
    """One row of the table of results."""

    statistic: str
    layer: int | None
    head: int | None
    position: int | None
    epsilon: float | None
    value: float
    standard_error: float | None
    n: int
    site: str


class Columns(NamedTuple):
    """Rows that share statistic, site, layer and threshold: at most 32 bytes a row.

    `head` and `position` are None where they do not apply; a `standard_error` that does not is NaN.
    """

    statistic: str
    site: str
    layer: int | None
    epsilon: float | None
    head: np.ndarray | None
    position: np.ndarray | None
    value: np.ndarray
    standard_error: np.ndarray
    n: np.ndarray

    def rows(self) -> Iterator[StatisticRow]:
        absent = [None] * len(self.value)
        axes = [absent if index is None else index.tolist() for index in (self.head, self.position)]
        numbers = (self.value.tolist(), self.standard_error.tolist(), self.n.tolist())
        for head, position, value, error, n in zip(*axes, *numbers, strict=True):
            standard_error = None if math.isnan(error) else error
            yield StatisticRow(
                self.statistic, self.layer, head, position, self.epsilon, value, standard_error, n, self.site
            )


def make_columns(rows: Iterable[StatisticRow]) -> Iterator[Columns]:
    """Yield rows as columns, in the order of the rows."""
    for (statistic, site, layer, epsilon, no_head, no_position), group in itertools.groupby(rows, _shared):
        part = list(group)
        head = None if no_head else np.array([row.head for row in part], dtype=np.int32)
        position = None if no_position else np.array([row.position for row in part], dtype=np.int32)
        value = np.array([row.value for row in part], dtype=np.float64)
        error = np.array([row.standard_error for row in part], dtype=np.float64)
        n = np.array([row.n for row in part], dtype=np.int64)
        yield Columns(statistic, site, layer, epsilon, head, position, value, error, n)


def _shared(row: StatisticRow) -> tuple[Any, ...]:
    return row.statistic, row.site, row.layer, row.epsilon, row.head is None, row.position is None


def select_positions(columns: Iterable[Columns], positions: Positions) -> Iterator[Columns]:
    """Yield columns with all positions, with the first 16, powers of two and the last one ("thin"), or none of them.

    Columns of which no row is left are empty.
    """
    for part in columns:
        index = part.position
        if index is None or positions == "all" or not len(index):
            yield part
        else:
            mask = np.zeros(len(index), dtype=bool)
            if positions == "thin":
                mask = (index < NUM_FIRST_POSITIONS) | (index & (index - 1) == 0) | (index == index.max())
            head = None if part.head is None else part.head[mask]
            numbers = (part.value[mask], part.standard_error[mask], part.n[mask])
            yield Columns(*part[:4], head, index[mask], *numbers)


def join_columns(columns: Sequence[Columns]) -> pd.DataFrame:
    """Return columns as the table of results, as `make_table` does with their rows."""
    columns = [part for part in columns if len(part.value)]
    if not columns:
        return make_table([])
    sizes = [len(part.value) for part in columns]

    def repeat_name(names: Sequence[str]) -> Any:
        codes, uniques = pd.factorize(np.array(names, dtype=object))
        return pd.array(uniques, dtype="str").take(np.repeat(codes, sizes))

    def join_integers(arrays: Sequence[np.ndarray | int | None]) -> pd.arrays.IntegerArray:
        data, mask = np.ones(sum(sizes), dtype=np.int64), np.zeros(sum(sizes), dtype=bool)
        start = 0
        for array, size in zip(arrays, sizes, strict=True):
            rows = slice(start, start + size)
            if array is None:
                mask[rows] = True
            else:
                data[rows] = array
            start += size
        return pd.arrays.IntegerArray(data, mask)

    epsilon = np.array([part.epsilon for part in columns], dtype=np.float64)
    return pd.DataFrame(
        {
            "statistic": repeat_name([part.statistic for part in columns]),
            "layer": join_integers([part.layer for part in columns]),
            "head": join_integers([part.head for part in columns]),
            "position": join_integers([part.position for part in columns]),
            "epsilon": np.repeat(epsilon, sizes),
            "value": np.concatenate([part.value for part in columns]),
            "standard_error": np.concatenate([part.standard_error for part in columns]),
            "n": join_integers([part.n for part in columns]),
            "site": repeat_name([part.site for part in columns]),
        },
        copy=False,
    )
