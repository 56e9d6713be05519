"""Parts of a result page: text, tables, figures and verdicts. `experiments.pages` writes the pages."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.claims import DASH, NOT_RUN, VERDICTS, Claim, Verdict
from regard.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

RESULTS = Path("docs") / "results"
FIGURES = Path("docs") / "figures"
WIDTH = 120


@dataclass(frozen=True)
class Table:
    """A table of results, kept as a CSV file.

    Attributes:
        name: Name of the file in docs/results, without its ending.
        about: What the rows are, for the list of files.
        head: Column titles.
        rows: Cells.
    """

    name: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def select(self, columns: Sequence[str], rows: Sequence[str] | None = None, not_run: Collection[str] = ()) -> Table:
        """Return some columns, and the rows of these first cells, in that order.

        Rows in `not_run` that are missing say so; another that is missing raises UserError.
        """
        index = [list(self.head).index(column) for column in columns]
        by_name = {str(row[0]): row for row in self.rows}
        check_runs(self.name, [name for name in rows or () if name not in by_name], not_run)
        selected = [[row[i] for i in index] for row in self.rows]
        if rows is not None:
            missing = [NOT_RUN, *[DASH] * (len(columns) - 2)]
            selected = [[by_name[name][i] for i in index] if name in by_name else [name, *missing] for name in rows]
        return replace(self, head=columns, rows=selected)

    def to_markdown(self) -> str:
        """Format the table for a page."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)

    def to_csv(self) -> str:
        """Format the table for its file: as on a page, without the backslashes of Markdown."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([str(cell).replace("\\", "") for cell in line] for line in (self.head, *self.rows))
        return text.getvalue()


def check_runs(table: str, missing: Iterable[str], not_run: Collection[str]) -> None:
    """Raise UserError if rows of a table have no runs, unless the record says that they were not run."""
    lost = [name for name in missing if name not in not_run]
    if lost:
        advice = "python -m experiments.pages PAPER --not-run ROW says that a row was left out"
        raise UserError(f"tables: expected runs of every row of {table}, found none of {'; '.join(lost)}; {advice}")


@dataclass(frozen=True)
class Figure:
    """A figure, drawn as docs/figures/NAME.svg."""

    name: str
    caption: str
    draw: Callable[[], Drawing]

    def to_markdown(self) -> str:
        """Format the figure and its caption for a page."""
        return f"![{self.caption.split(',')[0].rstrip('.')}](figures/{self.name}.svg)\n\n{wrap(self.caption)}"


@dataclass(frozen=True)
class Page:
    """A result page: a title, its parts, and all tables and figures that belong to it.

    Parts are Markdown if they start with "#" or "* ", else paragraphs. Tables and figures that are no parts are listed
    at the end.
    """

    name: str
    title: str
    parts: Sequence[str | Table | Figure]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    files: Sequence[tuple[str, str]] = field(default=())
    """Further files in docs/results, with what they hold."""

    def to_markdown(self) -> str:
        """Format the whole page."""
        blocks = [f"# {self.title}"]
        for part in self.parts:
            if isinstance(part, str):
                blocks.append(part if part.startswith(("#", "* ")) else wrap(part))
            else:
                blocks.append(part.to_markdown())
        drawn = {part.name for part in self.parts if isinstance(part, Figure)}
        links = [f"[{table.name}.csv](results/{table.name}.csv): {table.about}" for table in self.tables]
        links += [f"[{name}](results/{name}): {about}" for name, about in self.files]
        links += [
            f"[{figure.name}.svg](figures/{figure.name}.svg): {figure.caption}"
            for figure in self.figures
            if figure.name not in drawn
        ]
        if links:
            blocks += ["## Data and further figures", "\n".join(map(item, links))]
        return "\n\n".join(filter(None, blocks)) + "\n"


# -- text ------------------------------------------------------------------------------------------------------------


def wrap(text: str) -> str:
    """Wrap a paragraph to the width of the docs."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def item(text: str) -> str:
    """Format a list item."""
    return textwrap.fill(
        text, WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def join_words(words: Iterable[str]) -> str:
    """Join words as in "a, b and c"; "none" without any."""
    *before, last = list(words) or ["none"]
    return f"{', '.join(before)} and {last}" if before else last


# -- verdicts --------------------------------------------------------------------------------------------------------


def count_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return how many verdicts there are of each kind."""
    counts = {word: sum(verdict.word == word for verdict in verdicts) for word in VERDICTS}
    return ", ".join(f"{word} {count}" for word, count in counts.items() if count)


def group_verdicts(verdicts: Sequence[Verdict]) -> dict[Claim[Any], list[Verdict]]:
    """Group verdicts by claim, in their order."""
    groups: dict[Claim[Any], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.claim, []).append(verdict)
    return groups


def format_verdicts(group: Sequence[Verdict]) -> str:
    """Format the verdicts of one claim: one word if all streams agree, else each word with its streams."""
    streams: dict[str, list[str]] = {}
    for verdict in group:
        streams.setdefault(verdict.word, []).append(verdict.stream)
    if len(streams) == 1:
        return f"*{group[0].word}*"
    return "; ".join(f"*{word}* ({', '.join(names)})" for word, names in streams.items())
