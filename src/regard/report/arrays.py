"""The tidy table as dense arrays: what every report reads."""

from __future__ import annotations

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
    """Values and errors over some of the axes layer, head, position, in this order; NaN where the table has no row."""

    coordinates: dict[str, Labels]
    values: Floats
    errors: Floats

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the arrays' order."""
        return tuple(self.coordinates)

    def index(self, axis: str, label: int) -> int:
        """Where `label` stands on `axis`; a UserError that names the range where it does not."""
        labels = self.coordinates[axis]
        found = np.flatnonzero(labels == label)
        if not found.size:
            raise UserError(f"{axis} {label} was not measured: expected one of {labels.min()} to {labels.max()}")
        return int(found[0])

    def at(self, axis: str, label: int) -> Block:
        """The block without `axis`, taken at `label`."""
        place, where = self.axes.index(axis), self.index(axis, label)
        left = {name: labels for name, labels in self.coordinates.items() if name != axis}
        return Block(left, np.asarray(self.values.take(where, place)), np.asarray(self.errors.take(where, place)))

    def keep(self, axis: str, wanted: NDArray[np.bool_]) -> Block:
        """The block with only the labels of `axis` where `wanted` is true."""
        place = self.axes.index(axis)
        coordinates = {**self.coordinates, axis: self.coordinates[axis][wanted]}
        return Block(coordinates, self.values.compress(wanted, axis=place), self.errors.compress(wanted, axis=place))


@dataclass(frozen=True)
class Measure:
    """One statistic at one site and threshold; `blocks` by the axes that its rows set, as in `("layer", "head")`."""

    statistic: str
    site: str
    epsilon: float | None
    blocks: dict[tuple[str, ...], Block]

    @property
    def key(self) -> tuple[str, str, float | None]:
        """What tells this measure from every other of one table."""
        return self.statistic, self.site, self.epsilon

    def block(self, *axes: str) -> Block | None:
        """The block over exactly these axes, or None."""
        return self.blocks.get(axes)


@dataclass(frozen=True)
class Slice:
    """A block without its position axis, and the position it was taken at (None: of the whole sequence)."""

    block: Block
    position: int | None


def measures(table: pd.DataFrame) -> list[Measure]:
    """Every statistic × site × epsilon of the table, in the table's order.

    Raises UserError on an empty table, a missing column, or two rows for one number.
    """
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise UserError(f"expected a table with the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    if table.empty:
        raise UserError("the table is empty: there is nothing to report")
    groups = table.groupby(["statistic", "site", "epsilon"], sort=False, dropna=False)
    return [_measure(key, rows) for key, rows in groups]


def heads(measure: Measure, position: int | None = None) -> Slice | None:
    """The layers × heads values: of the whole sequence where measured, else at `position` (None: at the first)."""
    return _slice(measure, ("layer", "head"), position)


def layers(measure: Measure, position: int | None = None) -> Slice | None:
    """The value of each layer, by the same rule as `heads`; the mean over heads where only heads have values."""
    found = _slice(measure, ("layer",), position)
    if found is not None:
        return found
    by_head = heads(measure, position)
    return None if by_head is None else Slice(mean_over_heads(by_head.block), by_head.position)


def mean_over_heads(block: Block) -> Block:
    """The block's mean over heads. Its errors are NaN: heads share their samples, so their errors do not add up."""
    place = block.axes.index("head")
    left = {name: labels for name, labels in block.coordinates.items() if name != "head"}
    values = nanmean(block.values, place)
    return Block(left, values, np.full_like(values, np.nan))


def nanmean(values: Floats, axis: int | None = None) -> Floats:
    """The mean of what is not NaN; NaN, without a warning, where nothing is left."""
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.asarray(np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0))


def _slice(measure: Measure, axes: tuple[str, ...], position: int | None) -> Slice | None:
    whole = measure.block(*axes)
    if whole is not None and position is None:
        return Slice(whole, None)
    by_position = measure.block(*axes, "position")
    if by_position is None:
        return None
    at = int(by_position.coordinates["position"][0]) if position is None else position
    return Slice(by_position.at("position", at), at)


def _measure(key: tuple[Any, ...], rows: pd.DataFrame) -> Measure:
    statistic, site, epsilon = key
    present = np.stack([rows[axis].notna().to_numpy(dtype=bool) for axis in AXES], axis=1)
    pattern = present @ np.array([1, 2, 4])
    blocks = {}
    for code in np.unique(pattern):
        axes = tuple(axis for bit, axis in enumerate(AXES) if code >> bit & 1)
        blocks[axes] = _block(str(statistic), axes, rows[pattern == code])
    return Measure(
        str(statistic), "" if pd.isna(site) else str(site), None if pd.isna(epsilon) else float(epsilon), blocks
    )


def _block(statistic: str, axes: tuple[str, ...], rows: pd.DataFrame) -> Block:
    if rows.duplicated([*axes] or ["statistic"]).any():
        raise UserError(f"expected one row a number; {statistic} has several for the same {', '.join(axes) or 'model'}")
    coordinates, places = {}, []
    for axis in axes:
        labels, place = np.unique(rows[axis].to_numpy(dtype=np.int64), return_inverse=True)
        coordinates[axis] = labels
        places.append(place)
    shape = tuple(len(labels) for labels in coordinates.values())
    values, errors = np.full(shape, np.nan), np.full(shape, np.nan)
    where = tuple(places) if axes else ...
    values[where] = _floats(rows["value"])
    errors[where] = _floats(rows["standard_error"])
    return Block(coordinates, values, errors)


def _floats(column: pd.Series) -> Floats:
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
