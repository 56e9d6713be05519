"""Panels of lines that a page's script draws, and the columns they are made of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.report import labels
from regard.report.arrays import Floats

Panel = dict[str, Any]
Values = Sequence[float] | Floats
Styles = Sequence[tuple[str, int, int]]
"""The name of each line, its ink, and its stroke (0 solid, 1 dashed, 2 dotted)."""
INKS, STROKES = 6, 3
LINES = INKS * STROKES
"""Lines of a panel, at most: each has its own ink and stroke."""
MOST = 500
"""The most points of one line on a page; longer lines are thinned evenly."""
DOMAIN = "valid_loss."
"""What stands before a domain's name in the columns of validation losses."""


def numeric_column(table: pd.DataFrame, name: str) -> Floats:
    """The column as float64, NaN where it is null or missing."""
    if name not in table:
        return np.full(len(table), np.nan)
    return pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)


def last_value(history: pd.DataFrame, name: str) -> float | None:
    """The column's last value that is a finite number; None where there is none."""
    values = numeric_column(history, name)
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None


def domains(table: pd.DataFrame) -> list[str]:
    """The names of the domains that have a validation loss of their own; none of a single one, whose loss is that."""
    names = [str(name).removeprefix(DOMAIN) for name in table.columns if str(name).startswith(DOMAIN)]
    return names if len(names) > 1 else []


def thin_indices(count: int, most: int = MOST) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which of `count` points to keep: all, or `most` spread evenly with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).round().astype(np.int64)


def thinning_note(lengths: Iterable[int], file: str) -> str:
    """A sentence on points left away, "" where the page holds all."""
    return f"Longer curves are thinned to {MOST} points; {file} has all." if max(lengths, default=0) > MOST else ""


def line(
    axis: str, series: str, places: Values, values: Values, unit: str = "", half: Values | None = None
) -> list[dict[str, Any]]:
    """The points of one line as the page's script reads them, at most `MOST`; `half` is the half width of the band."""
    known = [i for i, value in enumerate(values) if math.isfinite(value)]
    points = []
    for i in (known[index] for index in thin_indices(len(known))):
        value, margin = float(values[i]), math.nan if half is None else float(half[i])
        is_sure = math.isfinite(margin)
        points.append(
            {
                axis: int(places[i]),
                "series": series,
                "value": round_value(value),
                "low": round_value(value - margin) if is_sure else None,
                "high": round_value(value + margin) if is_sure else None,
                "shown": labels.with_margin(value, margin if is_sure else math.nan, unit),
            }
        )
    return points


def curve(
    series: str, table: pd.DataFrame, column: str = "value", unit: str = "", axis: str = "step"
) -> list[dict[str, Any]]:
    """The points of one line, those of a column over another one."""
    return line(axis, series, numeric_column(table, axis), numeric_column(table, column), unit)


def assign_styles(names: Sequence[str], *, repeat: bool = False) -> list[tuple[str, int, int]]:
    """Assign an ink and a stroke to each name, as far as they suffice; to all with `repeat`, from the first again."""
    styled = names if repeat else names[:LINES]
    return [(name, i % INKS, i // INKS % STROKES) for i, name in enumerate(styled)]


def round_value(value: float) -> float:
    """Round to five digits, which a chart cannot show more of."""
    return float(f"{value:.5g}")


def panel(
    caption: str, note: str, axis: str, points: Sequence[Mapping[str, Any]], lines: Styles | None = None, **fields: Any
) -> list[Panel]:
    """One panel, none without points; `lines` are the styles of its lines."""
    if not points:
        return []
    styles = {} if lines is None else {"lines": [list(style) for style in lines]}
    return [{"caption": caption, "note": note, "axis": axis, **fields, "points": list(points), **styles}]
