"""Parts of docs/benchmarks.md: tables that show some rows and link to the rest, paragraphs, verdicts on aims."""

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""A case of a benchmark: `case` says which, `figures` has times and memory by contestant."""
MOST_NAMED = 4
"""Cases that miss an aim are named up to this number, and counted above it."""


@dataclass(frozen=True)
class ResultTable:
    """The table of one benchmark: all rows for a CSV file, those in `on_page` for the page.

    Attributes:
        name: Stem of the CSV file in docs/results.
        head: Names of the columns.
        cells: One tuple per row.
        on_page: Whether the page shows each row.
        only_in_file: Names of columns that the page leaves out.
    """

    name: str
    head: tuple[str, ...]
    cells: list[tuple[Any, ...]]
    on_page: list[bool]
    only_in_file: frozenset[str] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether the page shows all rows and columns."""
        return all(self.on_page) and not self.only_in_file

    def to_markdown(self) -> str:
        """Return rows and columns for the page, with a link to the CSV file if that has more."""
        columns = [index for index, name in enumerate(self.head) if name not in self.only_in_file]
        shown = [row for row, selected in zip(self.cells, self.on_page, strict=True) if selected]
        text = markdown_table(
            [self.head[index] for index in columns], [[row[index] for index in columns] for row in shown]
        )
        if self.is_whole:
            return text
        figures = f"all {len(self.head)} columns" if self.only_in_file else ""
        cases = "" if all(self.on_page) else f"all {len(self.cells)} cases"
        more = " and ".join(part for part in (cases, figures) if part)
        return f"{text}\n\n{more.capitalize()}: [{self.name}.csv](results/{self.name}.csv)."

    def to_csv(self) -> str:
        """Return all rows as CSV."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([self.head, *self.cells])
        return buffer.getvalue()


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def wrap(text: str) -> str:
    """Return a paragraph in lines of 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def case_cells(row: Row) -> tuple[Any, ...]:
    """Return the values that tell a case from others."""
    return tuple(row["case"].values())


def ratio(row: Row, name: str, of: str = "time_ratio") -> float:
    """Return a contestant's time, or memory, over that of the reference."""
    return float(row["figures"][name][of])


def ratio_cells(row: Row, *names: str, of: str = "time_ratio") -> list[str]:
    """Return ratios with two digits; a dash for contestants that did not run."""
    return [f"{ratio(row, name, of):.2f}" if name in row["figures"] else "–" for name in names]


def milliseconds(row: Row, name: str) -> str:
    """Return a contestant's median time in ms; below one ms to a millionth of a second."""
    value = row["figures"][name]["seconds"] * 1e3
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def mebibytes(row: Row, name: str) -> str:
    """Return a contestant's extra memory in MiB; a dash if it did not run."""
    return f"{row['figures'][name]['memory']:.0f}" if name in row["figures"] else "–"


def format_verdict(rows: Sequence[Row], aims: Mapping[str, Callable[[Row], bool]]) -> str:
    """Return how many cases meet each aim, and which do not if they are few."""
    parts = []
    for name, meets in aims.items():
        missed = [row for row in rows if not meets(row)]
        cases = ", ".join(" ".join(str(part) for part in case_cells(row)) for row in missed)
        exceptions = f" (not {cases})" if 0 < len(missed) <= MOST_NAMED else ""
        parts.append(f"{name}: {len(rows) - len(missed)} of {len(rows)} cases{exceptions}")
    return wrap(f"Met: {'; '.join(parts)}.")
