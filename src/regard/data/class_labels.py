"""Names of classes that the library datasets keeps beside the numbers of a Parquet file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from regard.data.tables import TASK, Records, find_table_suffix
from regard.errors import UserError


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


def name_classes(records: Records, path: Path, column: str) -> Records:
    """Write the names of classes in the place of their numbers, where a file has both."""
    names = read_class_names(path, column)
    for number, values in records:
        label = values.get(column)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
            values = {**values, column: names[label]}
        yield number, values


def check_same_names(paths: Sequence[Path], column: str) -> None:
    """Raise UserError if files number their classes in different orders; one may have further classes at its end."""
    found = {path: names for path in paths if (names := read_class_names(path, column))}
    if any(len(set(of_number)) > 1 for of_number in zip(*found.values(), strict=False)):
        told = " and ".join(f"{', '.join(names)} in {path}" for path, names in found.items())
        raise UserError(f"{TASK}: expected classes numbered in one order, got {told}")
