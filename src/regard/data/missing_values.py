"""Rows of a user's own tables that lack a label or a text: an empty cell, null, none in that line, or the label −1."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from regard.data.rows import NUMBER
from regard.errors import UserError, warn_user

MissingValues = Literal["skip", "skip-minus-one", "refuse"]
"""What becomes of rows without a label or a text; "skip-minus-one" takes the label −1 for none, wherever it stands."""
MINUS_ONE = "minus_one"
"""Key of the metadata of a stream: how many rows have the label −1, taken as a class."""
LEFT_OUT = "left_out"
"""Key of the metadata of a stream, or of a task's data: how many rows were left out."""

_NO_NUMBER = frozenset({"nan", "na", "n/a", "<na>", "#n/a", "null", "none"})
"""How programs write a cell that has no number, in lower case: pandas, R, spreadsheets."""


class NoNumber(float):
    """NaN, as a program wrote it into a cell that has no number."""

    written: str

    @classmethod
    def as_written(cls, written: str) -> "NoNumber":
        value = cls(math.nan)
        value.written = written
        return value

    def __repr__(self) -> str:
        return repr(self.written)


def blank_no_numbers(
    records: Sequence[tuple[int, dict[str, Any]]], label: str, place: object, option: str
) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a table with `NoNumber`s for labels as NaN and NA in tasks whose other labels are numbers.

    Among words these are classes, with a warning but for "none", which many tasks have.
    """
    by_task: dict[str, list[int]] = {}
    for index, (_, values) in enumerate(records):
        if isinstance(name := values.get(label), str) and name.strip().lower() in _NO_NUMBER:
            by_task.setdefault(str(values.get("task")).strip(), []).append(index)
    blank: set[int] = set()
    for task, indices in by_task.items():
        of_task = (values.get(label) for _, values in records if str(values.get("task")).strip() == task)
        names = {str(name).strip() for name in of_task if not is_nothing(name)}
        words = sorted(name for name in names if name.lower() in _NO_NUMBER)
        if len(names) > len(words) and all(map(NUMBER.fullmatch, names.difference(words))):
            blank.update(indices)
        elif doubtful := [name for name in words if name.lower() != "none"]:
            means = "as many tables mark rows without one: it is taken as a class; an empty cell is none"
            warn_user(f"{option}: rows of {place} have the label {doubtful[0]!r}, {means}")
    return [
        (line, {**values, label: NoNumber.as_written(values[label].strip())} if index in blank else values)
        for index, (line, values) in enumerate(records)
    ]


def find_complete(
    rows: Sequence[tuple[Mapping[str, Any], str]],
    label: str,
    texts: Sequence[str],
    path: Path,
    option: str,
    marked: Collection[int] = frozenset(),
    may_lack: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> list[int]:
    """Return the indices of the rows that have a label and all texts; warn of the number of others.

    A column that no row has is asked for nowhere, unless some rows may lack it.

    Args:
        rows: Values by column, and what messages call the place in the file.
        label: The column of labels or answers.
        texts: The columns of texts.
        path: The file.
        option: What messages begin with.
        marked: Indices of the rows whose label −1 is none.
        may_lack: Indices of the rows that are complete without a text, by its column.

    Raises:
        UserError: No row is complete.
    """
    empty: dict[str, list[int]] = {}
    for column in (label, *texts):
        complete_without = may_lack.get(column, ())
        if complete_without or any(column in values for values, _ in rows):
            blank = (index for index, (values, _) in enumerate(rows) if is_nothing(values.get(column)))
            empty[column] = [index for index in blank if index not in complete_without]
    left_out = {index for indices in empty.values() for index in indices}.union(marked)
    complete = [index for index in range(len(rows)) if index not in left_out]
    if not complete and rows:
        raise _none_complete(len(rows), empty, label, marked, path, option)
    if left_out:
        cells = {column: [rows[index][0].get(column) for index in indices] for column, indices in empty.items()}
        marks = [f"{_describe_nothing(values)} in the column {column!r}" for column, values in cells.items() if values]
        marks += [f"-1 in the column {label!r}"] if marked else []
        lost = f"{len(left_out)} of {len(rows)} rows have {' or '.join(marks)} and are left out"
        first = rows[min(left_out)][1]
        warn_user(f"{option}: {path}: {lost}, the first in {first} (missing-values=refuse stops there)")
    return complete


def _none_complete(
    count: int, empty: Mapping[str, Sequence[int]], label: str, marked: Collection[int], path: Path, option: str
) -> UserError:
    """Return the error of so many rows of which none is complete: labels are missing, or values of some columns."""
    if len({*empty.get(label, ()), *marked}) == count:
        expected, got = f"labels in the column {label!r} of {path}", f"none of {count} rows has one"
    else:
        lacking = [column for column, indices in empty.items() if indices or (marked and column == label)]
        several = len(lacking) > 1
        got = f"none of {count} rows has {'all' if several else 'one'}"
        expected = f"values in the column{'s' * several} {' and '.join(map(repr, lacking))} of {path}"
    return UserError(f"{option}: expected {expected}, {got}")


def _describe_nothing(cells: Sequence[Any]) -> str:
    """Say what is in empty cells, as it is written."""
    marks = {cell.written if isinstance(cell, NoNumber) else "nothing" for cell in cells}
    return " or ".join(sorted(marks, key=lambda mark: (mark == "nothing", mark)))


def find_gaps(values: Sequence[Any], tasks: Sequence[str]) -> list[int]:
    """Return the indices of the empty cells of a column in those tasks that have more full ones."""
    empty = [index for index, value in enumerate(values) if is_nothing(value)]
    sizes, lacking = Counter(tasks), Counter(tasks[index] for index in empty)
    return [index for index in empty if 2 * lacking[tasks[index]] < sizes[tasks[index]]]


def is_nothing(value: Any) -> bool:
    """Whether a cell of labels, answers or texts is empty: nothing, NaN, blanks, or a list of these."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list):
        return all(map(is_nothing, value))
    return value is None or (isinstance(value, str) and not value.strip())


def is_minus_one(value: Any) -> bool:
    """Whether a label is −1, also as text and written as −1.0."""
    return not isinstance(value, bool) and str(undo_float(value)).strip() in ("-1", "-1.0")


def marks_none(trained: Iterable[Any]) -> bool:
    """Whether −1 marks rows without a label, given the labels of training rows: none of these is negative.

    Published tables, as test files of GLUE, mark rows so. A label that no training row has cannot be learnt.
    """
    names = (str(label).strip() for label in trained)
    return not any(name.startswith("-") and NUMBER.fullmatch(name) for name in names)


def is_doubtful(labels: Iterable[Any]) -> bool:
    """Whether −1 is among labels and may mark rows without one: no other is negative, and there are two others."""
    names = {str(undo_float(label)).strip() for label in labels}
    others = {name for name in names if not is_minus_one(name)}
    return len(others) < len(names) and len(others) > 1 and marks_none(others)


def warn_of_class(count: int, place: object, option: str) -> None:
    """Warn of a number of rows with the label −1, which is taken as a class."""
    means = "as many tables mark rows without one: it is taken as a class"
    advice = "missing-values=skip-minus-one leaves them out"
    warn_user(f"{option}: {count} rows of {place} have the label -1, {means} ({advice})")


def undo_float(value: Any) -> Any:
    """Return a whole number that was written as a float as an integer, as pandas writes a column with a gap.

    True and False are returned as pandas writes them into a .csv.
    """
    if isinstance(value, bool):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
