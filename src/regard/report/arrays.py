"""The tidy table as dense arrays: what every report reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard.errors import UserError

AXES = ("layer", "head", "position")
COLUMNS = ("statistic", "site", "epsilon", *AXES, "value", "standard_error")
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Values and errors over some of the axes layer, head, position, in this order; NaN without a row.

    `position` is where it was taken from a block with positions; None for the whole sequence.
    """

    coordinates: dict[str, Labels]
    values: Floats
    errors: Floats
    position: int | None = None

    def at(self, axis: str, label: int) -> Block:
        """The block without `axis`, taken at `label`; a UserError that names the range where it has none."""
        labels, place = self.coordinates[axis], list(self.coordinates).index(axis)
        indices = np.flatnonzero(labels == label)
        if not indices.size:
            raise UserError(f"{axis} {label} was not measured: expected one of {labels.min()} to {labels.max()}")
        values, errors = (np.asarray(array.take(indices[0], place)) for array in (self.values, self.errors))
        return Block(self._without(axis), values, errors, label if axis == "position" else self.position)

    def keep(self, axis: str, mask: NDArray[np.bool_]) -> Block:
        place = list(self.coordinates).index(axis)
        coordinates = {**self.coordinates, axis: self.coordinates[axis][mask]}
        values, errors = (array.compress(mask, axis=place) for array in (self.values, self.errors))
        return Block(coordinates, values, errors, self.position)

    def mean_over(self, axis: str) -> Block:
        """The mean over `axis`. Its errors are NaN: heads share their samples, so their errors do not add up."""
        values = nanmean(self.values, list(self.coordinates).index(axis))
        return Block(self._without(axis), values, np.full_like(values, np.nan), self.position)

    def _without(self, axis: str) -> dict[str, Labels]:
        return {name: labels for name, labels in self.coordinates.items() if name != axis}


@dataclass(frozen=True)
class Measure:
    """One statistic at one site and threshold; `blocks` by the axes that its rows set, as in `("layer", "head")`."""

    statistic: str
    site: str
    epsilon: float | None
    blocks: dict[tuple[str, ...], Block]

    @property
    def key(self) -> tuple[str, str, float | None]:
        return self.statistic, self.site, self.epsilon

    def block(self, *axes: str) -> Block | None:
        return self.blocks.get(axes)


def check_columns(name: str, table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise UserError if a table lacks columns."""
    missing = [column for column in columns if column not in table]
    if missing:
        raise UserError(f"{name}: expected the columns {', '.join(columns)}; missing: {', '.join(missing)}")


def check_table(name: str, table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise UserError if a table lacks columns, or has no rows."""
    check_columns(name, table, columns)
    if table.empty:
        raise UserError(f"{name}: expected at least one row, the table is empty")


def measures(table: pd.DataFrame) -> list[Measure]:
    """Every statistic × site × epsilon of the table, in its order. Raises UserError for a table that is not tidy."""
    check_table("statistics", table, COLUMNS)
    groups = table.groupby(["statistic", "site", "epsilon"], sort=False, dropna=False)
    return [_measure(key, rows) for key, rows in groups]


def heads(measure: Measure, position: int | None = None) -> Block | None:
    """The layers × heads values: of the whole sequence where measured, else at `position` (None: at the first)."""
    return _take(measure, ("layer", "head"), position)


def layers(measure: Measure, position: int | None = None) -> Block | None:
    """The value of each layer, by the same rule as `heads`; the mean over heads where only heads have values."""
    by_layer = _take(measure, ("layer",), position)
    if by_layer is not None:
        return by_layer
    by_head = heads(measure, position)
    return None if by_head is None else by_head.mean_over("head")


def nanmean(values: Floats, axis: int | None = None) -> Floats:
    """The mean of what is not NaN; NaN, without a warning, where nothing is left."""
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.asarray(np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0))


def _take(measure: Measure, axes: tuple[str, ...], position: int | None) -> Block | None:
    whole, by_position = measure.block(*axes), measure.block(*axes, "position")
    if (whole is not None and position is None) or by_position is None:
        return whole if position is None else None
    return by_position.at("position", int(by_position.coordinates["position"][0]) if position is None else position)


def _measure(key: tuple[Any, ...], rows: pd.DataFrame) -> Measure:
    statistic, site, epsilon = key
    patterns = rows[list(AXES)].notna().to_numpy(dtype=bool) @ np.array([1, 2, 4])
    blocks = {}
    for pattern in np.unique(patterns):
        axes = tuple(axis for bit, axis in enumerate(AXES) if pattern >> bit & 1)
        blocks[axes] = _block(str(statistic), axes, rows[patterns == pattern])
    site, epsilon = "" if pd.isna(site) else str(site), None if pd.isna(epsilon) else float(epsilon)
    return Measure(str(statistic), site, epsilon, blocks)


def _block(statistic: str, axes: tuple[str, ...], rows: pd.DataFrame) -> Block:
    if rows.duplicated([*axes] or ["statistic"]).any():
        raise UserError(f"expected one row a number; {statistic} has several for the same {', '.join(axes) or 'model'}")
    coordinates, places = {}, []
    for axis in axes:
        coordinates[axis], place = np.unique(rows[axis].to_numpy(dtype=np.int64), return_inverse=True)
        places.append(place)
    shape = [len(labels) for labels in coordinates.values()]
    values, errors = np.full(shape, np.nan), np.full(shape, np.nan)
    where = tuple(places) if axes else ...
    values[where] = rows["value"].to_numpy(dtype=np.float64, na_value=np.nan)
    errors[where] = rows["standard_error"].to_numpy(dtype=np.float64, na_value=np.nan)
    return Block(coordinates, values, errors)
