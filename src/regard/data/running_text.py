"""Running text, in rows that joined are the text."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from regard.data.tables import TASK, Table, TableRow, read_pieces


def read_running_text(path: Path) -> Table:
    """Read the lines of a text file as `running_text_rows` does."""
    lines = "".join(read_pieces(path, TASK)).split("\n")
    return Table(str(path), tuple(running_text_rows(f"{line}\n" for line in lines[: -1 if not lines[-1] else None])))


def running_text_rows(lines: Iterable[str]) -> Iterator[TableRow]:
    """Yield a row for each line that is not blank, with its line end and the blank lines behind it.

    Joined, the rows are the text, without blank lines in front of the first.
    """
    number, parts = 0, list[str]()
    for at, line in enumerate(lines, start=1):
        if line.strip():
            if parts:
                yield TableRow(("".join(parts),), None, number)
            number, parts = at, [line]
        elif parts:
            parts.append(line)
    if parts:
        yield TableRow(("".join(parts),), None, number)
