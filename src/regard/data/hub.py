"""Tasks from the Hugging Face hub, through the package `datasets`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from regard.data.tables import TASK, Columns, Table, TableRow
from regard.errors import UserError

CLIENTS = ("httpx2", "httpx", "requests")
"""Packages that huggingface_hub reaches the hub with, by its version."""


def read_hub(repository: str, config: str | None, split: str, columns: Columns | str, *, asked: str = TASK) -> Table:
    """The rows of one split: with a text and a label by their `columns`, or lines of the one column of running text.

    Class numbers become the names that the split has for them; rows labelled −1, which have none, are left out.
    `asked`: the name under which the user asked for them.

    Raises UserError where `datasets` is not installed, the hub cannot be reached, or a column is missing.
    """
    name = "/".join(part for part in (repository, config, split) if part)
    data = _load(repository, config, split, asked)
    wanted = (columns,) if isinstance(columns, str) else (*columns.texts, columns.label)
    missing = [column for column in wanted if column not in data.column_names]
    if missing:
        raise UserError(f"{asked}: expected the column '{missing[0]}' in {name}, found {', '.join(data.column_names)}")
    if isinstance(columns, str):
        lines = ((number, str(line).strip()) for number, line in enumerate(data[columns], start=1))
        return Table(name, tuple(TableRow((line,), None, number) for number, line in lines if line), "row", asked)
    texts = [data[column] for column in columns.texts]
    names = _class_names(data.features[columns.label])
    rows = []
    for number, (label, *parts) in enumerate(zip(data[columns.label], *texts, strict=True), start=1):
        if isinstance(label, list):
            if label:
                rows.append(TableRow(tuple(parts[0]), tuple(_named(tag, names) for tag in label), number))
        elif label != -1:
            rows.append(TableRow(tuple(parts), _named(label, names), number))
    return Table(name, tuple(rows), "row", asked)


def _load(repository: str, config: str | None, split: str, asked: str) -> Any:
    """The split as `datasets` has it."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"{asked}: expected a folder of files, or the package {error.name} for the hub: pip install 'regard[hub]'"
        ) from None
    try:
        return datasets.load_dataset(repository, config, split=split)
    except (OSError, ValueError, *network_errors(), datasets.exceptions.DatasetsError) as error:
        name = "/".join(part for part in (repository, config) if part)
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{asked}: expected {name} from the hub, or a folder of files; the hub gave: {said}") from None


def network_errors() -> tuple[type[Exception], ...]:
    """What the client that the hub is reached with raises: huggingface_hub went from requests over httpx to httpx2."""
    clients = (name for name in CLIENTS if importlib.util.find_spec(name) is not None)
    return tuple(importlib.import_module(name).HTTPError for name in clients)


def _class_names(feature: Any) -> list[str] | None:
    """The names that a split has for its class numbers; None where it has none."""
    names: list[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    return names


def _named(label: Any, names: list[str] | None) -> str:
    """The name of a class."""
    return str(label) if names is None else names[label]
