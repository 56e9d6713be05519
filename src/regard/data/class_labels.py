"""Names of classes that the library datasets keeps beside the numbers of a Parquet file."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from regard.data.missing_values import is_minus_one, undo_float
from regard.data.rows import WHOLE
from regard.data.tables import TASK, Records, find_table_suffix, row_unit
from regard.errors import UserError

_NUMBER = re.compile(r"-?\d{1,9}(\.0+)?")


def read_class_names(path: Path, column: str) -> tuple[str, ...]:
    """Return the names of a `ClassLabel`, by number, as `Dataset.to_parquet` writes them; none of other columns."""
    if find_table_suffix(path.name) != ".parquet" or not path.is_file():
        return ()
    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        feature: Any = json.loads(metadata[b"huggingface"])["info"]["features"][column]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError):
        return ()
    is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return tuple(feature.get("names") or ()) if is_class else ()


def read_names_by_file(paths: Sequence[Path], column: str) -> dict[Path, tuple[str, ...]]:
    """Return the names of the classes of each of a task's files.

    A file without names has those of the others; unless these number classes in different orders, or names are whole
    numbers themselves, so that nobody knows what a number is.
    """
    found = {path: read_class_names(path, column) for path in paths}
    shared = () if _have_several_orders(found.values()) else _longest(found.values())
    return {path: names or shared for path, names in found.items()}


def name_classes(records: Records, path: Path, column: str, names: Sequence[str], option: str) -> Records:
    """Write the names of classes in the place of their numbers. Raises UserError if there is none for a number."""
    unit = row_unit(path)
    for number, values in records:
        if names and column in values:
            name = name_class(values[column], names, f"{path}, {unit} {number}", option)
            values = {**values, column: name}
        yield number, values


def name_class(label: Any, names: Sequence[str], location: str, option: str) -> Any:
    """Return the name of a class; what is no whole number, or −1 for no label, stays. Raises UserError."""
    written = str(undo_float(label)).strip()
    if is_minus_one(label) or not _NUMBER.fullmatch(written):
        return label
    number = int(written.partition(".")[0])
    if not 0 <= number < len(names):
        known = f"0 to {len(names) - 1} ({', '.join(names[:6])}{', …' * (len(names) > 6)})"
        raise UserError(f"{option}: expected the number of a class with a name, {known}, in {location}, got {label}")
    return names[number]


def read_same_names(paths: Sequence[Path], column: str) -> tuple[str, ...]:
    """Return the names of the classes of files that number them in one order; one may have further ones at its end.

    None where names are whole numbers themselves, so that nobody knows what a number is.

    Raises:
        UserError: Their orders differ.
    """
    found = {path: names for path in paths if (names := read_class_names(path, column))}
    if _have_several_orders(found.values()):
        told = " and ".join(f"{', '.join(names)} in {path}" for path, names in found.items())
        raise UserError(f"{TASK}: expected classes numbered in one order, got {told}")
    return _longest(found.values())


def _longest(names_of_files: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the file that has most; none if some are whole numbers themselves."""
    names = max(names_of_files, key=len, default=())
    return () if any(map(WHOLE.fullmatch, names)) else names


def _have_several_orders(names_of_files: Iterable[Sequence[str]]) -> bool:
    """Return whether a number has different names; files without any, or with further ones, do not matter."""
    return any(len(set(of_number) - {""}) > 1 for of_number in itertools.zip_longest(*names_of_files, fillvalue=""))
