"""Tables of a comparison in a terminal: numbers stay whole, words lose their middle."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import rich.table
from rich.text import Text

from regard.report.terminal import WIDTH, shorten

GAP, MIN_WORD = 2, 12
"""Blanks between the columns of a table, and letters of a word that are always shown."""


def terminal_table(table: pd.DataFrame, max_rows: int | None = None, width: int = WIDTH) -> rich.table.Table:
    """Return a table as a terminal of a width shows it, its first rows: numbers in four digits, texts as they are.

    Where it would be wider, words lose their middle rather than go on in the next line; numbers stay whole, unless
    numbers alone are wider.
    """
    rows = [[*map(_format, row)] for row in table.head(max_rows).itertuples(index=False)]
    columns = [[row[index] for row in rows] for index in range(table.shape[1])]
    widest = [max([len(str(name)), *map(len, cells)]) for name, cells in zip(table.columns, columns, strict=True)]
    least = [min(_least_width(cells), most) for cells, most in zip(columns[1:], widest[1:], strict=True)]
    room = min(widest[0], max(width // 3, width - sum(GAP + column for column in widest[1:])))
    room = min(room, max(MIN_WORD, width - sum(GAP + column for column in least)))
    widths = _share_out(width - room - GAP * len(least), least, widest[1:])
    shown = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column(Text(str(table.columns[0])), no_wrap=True)
    for name, column in zip(table.columns[1:], widths, strict=True):
        shown.add_column(Text(str(name)), justify="right", overflow="fold", width=column)
    for first, *cells in rows:
        shown.add_row(
            Text(shorten(first, room)),
            *(Text(_shorten_words(cell, max(MIN_WORD, column))) for cell, column in zip(cells, widths, strict=True)),
        )
    return shown


def _share_out(total: int, least: Sequence[int], widest: Sequence[int]) -> list[int]:
    """Return widths from the least to the widest that fill a total, if it is that much; the narrowest grow first."""
    widths = [*least]
    for _ in range(total - sum(least)):
        if not (growing := [at for at, most in enumerate(widest) if widths[at] < most]):
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def split_columns(table: pd.DataFrame, width: int = WIDTH) -> Iterator[pd.DataFrame]:
    """Yield the table in parts, each with the first column, whose numbers and shortened words fit a width."""
    columns = [[*map(_format, table[name])] for name in table.columns]
    room = width - GAP - min(width // 3, max(map(len, columns[0]), default=0))
    parts, used = [[0]], 0
    for index, cells in enumerate(columns[1:], start=1):
        needed = GAP + _least_width(cells)
        if used + needed > room and len(parts[-1]) > 1:
            parts, used = [*parts, [0]], 0
        parts[-1].append(index)
        used += needed
    yield from (table.iloc[:, part] for part in parts)


def _shorten_words(text: str, width: int) -> str:
    """Return a text whose words fit into a width, unless they are numbers."""
    return " ".join(word if _is_number(word) else shorten(word, width) for word in text.split(" "))


def _least_width(cells: Sequence[str]) -> int:
    """Return the width in which numbers stay whole, and words keep what is always shown (of 1.2e-07 all)."""
    words = [word for cell in cells for word in cell.split(" ")]
    return max((len(word) if _is_number(word) else min(len(word), MIN_WORD) for word in words), default=0)


def _is_number(word: str) -> bool:
    return not any(map(str.isalpha, word))


def _format(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return str(value)
