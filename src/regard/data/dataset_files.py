"""Readers of what streams are made of: data sets in their published files, and a user's own tables of tasks."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.data import tables
from regard.data.hub import read_hub
from regard.data.splits import LabeledRow, LabeledRows, RawTask, divide_rows, hash_text
from regard.data.stream_catalog import DatasetFiles, DatasetSpec
from regard.data.tables import NO_GOLD_LABEL, STREAM
from regard.errors import UserError

SPLIT_NAMES = {"train": "train", "dev": "dev", "validation": "dev", "valid": "dev", "test": "test"}
"""What a column or a file may call a split, and which it is."""
HELD_OUT_FRACTIONS = (0.1, 0.2)
"""The shares of dev and test, drawn from each class of a table that does not say its splits."""


class DatasetRows(NamedTuple):
    """The rows of a data set to train and to test on, and where they came from."""

    train: LabeledRows
    test: LabeledRows
    source: str


# -- data sets as published -----------------------------------------------------------------------------


def read_dataset(name: str, settings: DatasetSpec, folder: Path | None) -> DatasetRows:
    """A data set from the hub, or from its files below a folder.

    The first of its published forms that has a training file is read, both splits from the same place: sources are
    never mixed. Raises UserError where there is none, naming what was looked for.
    """
    if folder is None:
        return _from_hub(settings)
    if not folder.is_dir():
        raise UserError(f"stream: expected a folder with the files of {name}, there is no {folder}")
    for files in settings.files:
        for place in [folder / below for below in files.folders] + [folder] * (folder.name in files.folders):
            if (train := _found(place, files.train)) is None:
                continue
            if (test := _found(place, files.test)) is None:
                raise UserError(f"stream: expected {' or '.join(files.test)} (.gz) beside {train}, there is none")
            return _from_files(settings, files, train, test)
    looked = "; ".join(f"{' or '.join(files.folders)} with {' or '.join(files.train)}" for files in settings.files)
    raise UserError(
        f"stream: expected the files of {name} in {folder}, packed with .gz or not: {looked}; none is there"
    )


def _from_hub(settings: DatasetSpec) -> DatasetRows:
    """Both splits from the hub."""
    tables = [read_hub(*settings.hub, split, settings.columns, asked=STREAM) for split in settings.splits]
    train, test = (
        _samples(((row.texts, row.label, table.place(row)) for row in table.rows), settings, 0) for table in tables
    )
    return DatasetRows(train, test, f"{tables[0].name} (train), {tables[1].name} (test: {settings.evaluated})")


def _from_files(settings: DatasetSpec, files: DatasetFiles, train: Path, test: Path) -> DatasetRows:
    """Both splits from files; where train has no titles at all, those of test are left out."""
    read = _FORMS[files.form]
    rows, tested = list(read(train, files)), list(read(test, files))
    said = ""
    if files.joined:
        rows, tested, said = _joined(rows), _joined(tested), ", title and text as one text"
    elif files.form == "csv" and len(files.fields) == 2 and not any(texts[0] for texts, *_ in rows):
        rows, tested, said = _untitled(rows), _untitled(tested), ", without titles, which train lacks"
    source = f"{train} (train), {test} (test: {files.evaluated or settings.evaluated}){said}"
    return DatasetRows(_samples(rows, settings, files.first), _samples(tested, settings, files.first), source)


_Written = tuple[tuple[str, ...], Any, str]
"""Texts, the label as it is written, and the place for messages."""


def _joined(rows: Iterable[_Written]) -> list[_Written]:
    return [((" ".join(text for text in texts if text),), label, place) for texts, label, place in rows]


def _untitled(rows: Iterable[_Written]) -> list[_Written]:
    return [(texts[-1:], label, place) for texts, label, place in rows]


def _samples(rows: Iterable[_Written], settings: DatasetSpec, first: int) -> LabeledRows:
    """The rows with classes by name; those without any text are left out."""
    numbers = {str(at + first): label for at, label in enumerate(settings.labels)}
    known = numbers | dict(settings.words) | {label: label for label in settings.labels}
    samples = []
    for written, label, place in rows:
        if label not in known:
            allowed = ", ".join([*settings.labels, *numbers])
            raise UserError(f"stream: expected a class of {allowed} in {place}, got {label!r}")
        texts = tuple(text or "" for text in written)
        if any(text.strip() for text in texts):
            key = hash_text(texts[-1:] if settings.body and texts[-1].strip() else texts)
            samples.append(LabeledRow(texts, known[label], key))
    return tuple(samples)


def _found(place: Path, names: Sequence[str]) -> Path | None:
    """The first of the files that is there, unpacked before packed."""
    paths = (place / (name + packed) for name in names for packed in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _csv(path: Path, files: DatasetFiles) -> Iterator[_Written]:
    """Zhang et al.'s rows: class and texts; a first line of names is passed over, the titles may be missing."""
    reader = csv.reader(io.StringIO("\n".join(tables.read_text_lines(path, STREAM))), strict=True)
    full = max(files.fields) + 1
    try:
        for fields in reader:
            place = f"{path}, line {reader.line_num}"
            if reader.line_num == 1 and fields and not fields[0].isdecimal():
                continue
            if len(fields) >= full:
                yield tuple(fields[at] for at in files.fields), fields[0], place
            elif len(fields) == 2 and len(files.fields) == 2:
                yield ("", fields[1]), fields[0], place
            elif fields:
                raise UserError(f"stream: expected a class and {full - 1} columns in {place}, got {len(fields)} in all")
    except csv.Error as error:
        raise UserError(f"stream: expected CSV in {path}, line {reader.line_num}: {error}") from None


def _sentences(path: Path, files: DatasetFiles) -> Iterator[_Written]:
    """The rows of GLUE, and of jsonl with the same columns."""
    assert files.columns is not None, "a file of sentences has names of its columns"
    table = tables.read_sentences(path, files.columns, STREAM)
    return ((row.texts, row.label, table.place(row)) for row in table.rows)


def _instructions(path: Path, files: DatasetFiles) -> Iterator[_Written]:
    """The rows of a benchmark of instructions: each input holds 'Part: text' line by line, and the output is the class.

    A part that an input lacks is ''. Rows labelled '-' are left out.
    """
    assert files.columns is not None, "instructions say what the parts of an input are called"
    try:
        instances = json.loads("\n".join(tables.read_text_lines(path, STREAM)))["Instances"]
        pairs = [(str(row["input"]), str(row["output"])) for row in instances]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"stream: expected JSON with 'Instances' of 'input' and 'output' in {path}: {error!r}"
        ) from None
    parts = files.columns.texts
    pattern = re.compile("".join(rf"(?:{re.escape(part)}: (.*?)\s*)?" for part in parts) + r"\Z", re.DOTALL)
    for number, (written, label) in enumerate(pairs, start=1):
        place = f"{path}, row {number}"
        if (match := pattern.match(written)) is None:
            raise UserError(
                f"stream: expected {', '.join(f'{part}:' for part in parts)} in {place}, got {written!r:.60}"
            )
        if label != NO_GOLD_LABEL:
            yield tuple(text or "" for text in match.groups()), label, place


_FORMS: Mapping[str, Callable[[Path, DatasetFiles], Iterable[_Written]]] = {
    "csv": _csv,
    "sentences": _sentences,
    "instructions": _instructions,
}

# -- a user's own ---------------------------------------------------------------------------------------


def read_user_tasks(path: Path, seed: int) -> list[RawTask]:
    """The tasks of a table with the columns task, text, label (and text_pair, split), or of a folder of folders.

    A table: tasks in the order in which they are first met. Without a column `split`, dev and test are drawn by the
    seed: a tenth and a fifth of each class. A folder: one folder a task, by name, with train and test and perhaps dev
    as tables of the columns text, label (and text_pair). A missing dev is left to be held out of train.

    Classes that are whole numbers are the task's own and get its name before them; others with the same name are the
    same class in all tasks.

    Raises UserError for what is missing, texts that are none, and splits of other names.
    """
    if path.is_dir():
        return _own_folder(path)
    rows = _own_rows(path, ("task",))
    tasks: dict[str, dict[str, list[LabeledRow]]] = {}
    split_of = any("split" in row.record for row in rows)
    for row in rows:
        split = _own_split(row) if split_of else "all"
        tasks.setdefault(_own_task(row), {}).setdefault(split, []).append(row.sample)
    return [_own_parts(name, parts, path, seed) for name, parts in tasks.items()]


class _OwnRow(NamedTuple):
    sample: LabeledRow
    record: Mapping[str, Any]
    place: str


def _own_folder(path: Path) -> list[RawTask]:
    """The tasks of a folder with a folder for each."""
    tasks = []
    for below in sorted(below for below in path.iterdir() if below.is_dir() and not below.name.startswith(".")):
        files = _own_files(below)
        missing = [split for split in ("train", "test") if split not in files]
        if missing:
            allowed = tables.suffixes()
            raise UserError(f"stream: expected a file {missing[0]} ({allowed}) in {below}, there is none")
        parts = {split: tuple(row.sample for row in _own_rows(file)) for split, file in files.items()}
        tasks.append(_own_task_of(below.name, parts, str(below)))
    if not tasks:
        raise UserError(f"stream: expected a folder for each task, with train and test, in {path}; there is none")
    return tasks


def _own_files(folder: Path) -> dict[str, Path]:
    """The files of a task by split."""
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(file.name.split(".")[0])
        if split is None or not file.is_file() or not tables.is_table(file.name):
            continue
        if split in files:
            raise UserError(
                f"stream: expected one file of {split} in {folder}, got {files[split].name} and {file.name}"
            )
        files[split] = file
    return files


def _own_parts(name: str, parts: Mapping[str, Sequence[LabeledRow]], path: Path, seed: int) -> RawTask:
    """A task of a table from its rows by split, or by one 'all' to be split."""
    if "all" not in parts:
        return _own_task_of(name, {split: tuple(rows) for split, rows in parts.items()}, str(path))
    dev, test = (f"{share:.0%}" for share in HELD_OUT_FRACTIONS)
    train, *drawn = divide_rows(tuple(parts["all"]), HELD_OUT_FRACTIONS, seed, f"{name!r} of {path}")
    source = f"{path}, {dev} (dev) and {test} (test) of each class drawn with seed {seed}"
    return _own_task_of(name, {"train": train, "dev": drawn[0], "test": drawn[1]}, source)


def _own_task_of(name: str, parts: Mapping[str, LabeledRows], source: str) -> RawTask:
    """The task; its classes are those of train: numbers by size, then names by alphabet."""
    found = {row.label for rows in parts.values() for row in rows}
    if all(_whole(label) for label in found):
        rename = {label: f"{name}/{label}" for label in found}
        parts = {split: tuple(row._replace(label=rename[row.label]) for row in rows) for split, rows in parts.items()}
        labels = tuple(rename[label] for label in sorted(found, key=int) if _in(parts, rename[label]))
    else:
        labels = tuple(sorted(label for label in found if _in(parts, label)))
    return RawTask(
        name=name,
        labels=labels,
        train=parts.get("train", ()),
        dev=parts.get("dev"),
        test=parts.get("test", ()),
        source=source,
    )


def _in(parts: Mapping[str, LabeledRows], label: str) -> bool:
    """Whether train has rows of a class."""
    return any(row.label == label for row in parts.get("train", ()))


def _whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def _own_rows(path: Path, also: tuple[str, ...] = ()) -> list[_OwnRow]:
    """The rows of a table, at least one; `also`: columns that it needs beside text and label."""
    unit = "row" if path.suffix == ".parquet" else "line"
    rows = []
    for number, record in tables.read_records(path, STREAM):
        place = f"{path}, {unit} {number}"
        missing = [name for name in (*also, "text", "label") if name not in record]
        if missing:
            found = ", ".join(map(str, record)) or "none"
            raise UserError(f"stream: expected the column '{missing[0]}' in {place}, found {found}")
        rows.append(
            _OwnRow(LabeledRow.of(_own_texts(record, place), _own_label(record["label"], place)), record, place)
        )
    if not rows:
        raise UserError(f"stream: expected rows in {path}, found none")
    if all(_number(row.sample.texts[0]) for row in rows):
        raise UserError(f"stream: expected text in the column 'text' of {path}, got numbers alone")
    return rows


def _own_texts(record: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """One text or two; a text_pair that is null or empty is none."""
    text, pair = record["text"], record.get("text_pair")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"stream: expected text in the column 'text' of {place}, got {text!r}")
    if pair is None or pair == "":
        return (text,)
    if not isinstance(pair, str) or not pair.strip():
        raise UserError(f"stream: expected text in the column 'text_pair' of {place}, got {pair!r}")
    return text, pair


def _own_label(label: Any, place: str) -> str:
    if isinstance(label, bool) or not isinstance(label, (str, int)) or not str(label).strip():
        raise UserError(f"stream: expected a string or a whole number as label in {place}, got {label!r}")
    return str(label)


def _own_task(row: _OwnRow) -> str:
    name = row.record["task"]
    if isinstance(name, bool) or not isinstance(name, (str, int)) or not str(name).strip():
        raise UserError(f"stream: expected the name of a task in {row.place}, got {name!r}")
    return str(name)


def _own_split(row: _OwnRow) -> str:
    split = row.record.get("split")
    if split not in SPLIT_NAMES:
        raise UserError(f"stream: expected a split of {', '.join(SPLIT_NAMES)} in {row.place}, got {split!r}")
    return SPLIT_NAMES[split]


def _number(text: str) -> bool:
    """Whether a text is nothing but a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
