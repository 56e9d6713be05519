"""Readers of published data sets, from the hub or from their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from regard.data.instructions import load_instances
from regard.data.rows import LabeledRow, LabeledRows, hash_text
from regard.data.stream_catalog import DatasetFiles, DatasetSpec
from regard.data.tables import NO_GOLD_LABEL, STREAM, Table, find_split_files, read_csv_fields, read_sentences
from regard.errors import UserError


class DatasetRows(NamedTuple):
    """Rows of a data set for training and testing, and where they come from."""

    train: LabeledRows
    test: LabeledRows
    source: str


class _FileRow(NamedTuple):
    """A row as written: `label` is a class name or index; `location` is for messages."""

    texts: tuple[str, ...]
    label: str
    location: str


def read_dataset(name: str, spec: DatasetSpec, folder: Path | None) -> DatasetRows:
    """Read a data set from its files below a folder, or from the hub without one.

    The first published form with a training file is read; both splits come from the same place.

    Raises:
        UserError: No files are found, or they have another format.
    """
    if folder is None:
        train, test = spec.hub.read(STREAM)
        train_rows, test_rows = (_label_rows(_iterate_table(table), spec, 0) for table in (train, test))
        return DatasetRows(train_rows, test_rows, f"{train.name} (train), {test.name} (test: {spec.test_rows})")
    if not folder.is_dir():
        raise UserError(f"stream: expected a folder with the files of {name}, there is no {folder}")
    for files in spec.files:
        places = [folder / below for below in files.folders] + [folder] * (folder.name in files.folders)
        if paths := find_split_files(places, files.train, files.test, STREAM):
            return _read_files(spec, files, *paths)
    candidates = "; ".join(f"{' or '.join(files.folders)} with {' or '.join(files.train)}" for files in spec.files)
    raise UserError(
        f"stream: expected the files of {name} in {folder}, packed with .gz or not: {candidates}; none is there"
    )


def _read_files(spec: DatasetSpec, files: DatasetFiles, train_file: Path, test_file: Path) -> DatasetRows:
    """Read both splits; if train has no titles at all, those of test are dropped."""
    read = _READERS[files.format]
    train, test = list(read(train_file, files)), list(read(test_file, files))
    note = ""
    if files.joins_texts:
        train, test = (
            [row._replace(texts=(" ".join(text for text in row.texts if text),)) for row in rows]
            for rows in (train, test)
        )
        note = ", title and text as one text"
    elif files.format == "csv" and len(files.text_columns) == 2 and not any(row.texts[0] for row in train):
        train, test = ([row._replace(texts=row.texts[-1:]) for row in rows] for rows in (train, test))
        note = ", without titles, which train lacks"
    source = f"{train_file} (train), {test_file} (test: {files.test_rows or spec.test_rows}){note}"
    train_rows, test_rows = (_label_rows(rows, spec, files.first_class) for rows in (train, test))
    return DatasetRows(train_rows, test_rows, source)


def _label_rows(rows: Iterable[_FileRow], spec: DatasetSpec, first_class: int) -> LabeledRows:
    """Name the classes of rows and drop those without text."""
    by_index = {str(index): label for index, label in enumerate(spec.labels, start=first_class)}
    names = by_index | dict(spec.synonyms) | {label: label for label in spec.labels}
    result = []
    for row in rows:
        if row.label not in names:
            allowed = ", ".join([*spec.labels, *by_index])
            raise UserError(f"stream: expected a class of {allowed} in {row.location}, got {row.label!r}")
        texts = tuple(text or "" for text in row.texts)
        if any(text.strip() for text in texts):
            key = hash_text(texts[-1:] if spec.match_last_text and texts[-1].strip() else texts)
            result.append(LabeledRow(texts, names[row.label], key))
    return tuple(result)


def _iterate_table(table: Table) -> Iterator[_FileRow]:
    return (_FileRow(row.texts, str(row.label), table.locate(row)) for row in table.rows)


def _read_csv(path: Path, files: DatasetFiles) -> Iterator[_FileRow]:
    """Read Zhang et al.'s rows of class and texts; a header is skipped, and titles may be missing."""
    num_columns = max(files.text_columns) + 1
    for number, fields in read_csv_fields(path, STREAM):
        location = f"{path}, line {number}"
        if number == 1 and fields and not fields[0].isdecimal():
            continue
        if len(fields) >= num_columns:
            yield _FileRow(tuple(fields[column] for column in files.text_columns), fields[0], location)
        elif len(fields) == 2 and len(files.text_columns) == 2:
            yield _FileRow(("", fields[1]), fields[0], location)
        elif fields:
            raise UserError(
                f"stream: expected a class and {num_columns - 1} columns in {location}, got {len(fields)} in all"
            )


def _read_sentences(path: Path, files: DatasetFiles) -> Iterator[_FileRow]:
    """Read the rows of GLUE, or of .jsonl with the same columns."""
    assert files.columns is not None, "files of sentences have column names"
    return _iterate_table(read_sentences(path, files.columns, STREAM))


def _read_instructions(path: Path, files: DatasetFiles) -> Iterator[_FileRow]:
    """Read inputs of lines "Part: text", whose output is the class; missing parts are "".

    Rows labeled "-" are dropped.
    """
    assert files.columns is not None, "files of instructions name the parts of an input"
    parts = files.columns.texts
    pattern = re.compile("".join(rf"(?:{re.escape(part)}: (.*?)\s*)?" for part in parts) + r"\Z", re.DOTALL)
    _, instances = load_instances(path)
    for number, (text, label) in enumerate(instances, start=1):
        location = f"{path}, row {number}"
        if (match := pattern.match(str(text))) is None:
            names = ", ".join(f"{part}:" for part in parts)
            raise UserError(f"stream: expected {names} in {location}, got {str(text)!r:.60}")
        if str(label) != NO_GOLD_LABEL:
            yield _FileRow(tuple(part or "" for part in match.groups()), str(label), location)


_READERS: Mapping[str, Callable[[Path, DatasetFiles], Iterable[_FileRow]]] = {
    "csv": _read_csv,
    "sentences": _read_sentences,
    "instructions": _read_instructions,
}
