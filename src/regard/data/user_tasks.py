"""Readers of a user's own stream tasks: a table with a column for the task, or a folder per task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.data.rows import LabeledRow, RawTask
from regard.data.splits import divide_rows
from regard.data.stream import SPLITS
from regard.data.tables import STREAM, check_columns, is_table, list_suffixes, read_records
from regard.errors import UserError

SPLIT_NAMES = {"train": "train", "dev": "dev", "validation": "dev", "valid": "dev", "test": "test"}
"""What a column or a file may call a split, and which split it is."""
DEV_AND_TEST_FRACTIONS = (0.1, 0.2)  # fractions of each class for dev and test in a table without splits


def read_user_tasks(path: Path, seed: int) -> list[RawTask]:
    """Read tasks from a table or a folder.

    A table has the columns task, text, label, and optionally text_pair and split. Tasks are in the order of their first
    rows. Without the column split, the seed samples dev and test: a tenth and a fifth of each class.

    A folder has a folder per task with the tables train, test and optionally dev, which have the columns text, label
    and optionally text_pair. A missing dev is held out of train later.

    Integer classes belong to one task and get its name as a prefix. Other classes with the same name are one class in
    all tasks.
    """
    if path.is_dir():
        return _read_folder(path)
    rows = _read_rows(path, ("task",))
    tasks: dict[str, dict[str, list[LabeledRow]]] = {}
    has_splits = any("split" in record for _, record, _ in rows)
    for row, record, location in rows:
        name = _parse_name(record["task"], f"the name of a task in {location}")
        split: Any = record.get("split")
        if has_splits and split not in SPLIT_NAMES:
            raise UserError(f"stream: expected a split of {', '.join(SPLIT_NAMES)} in {location}, got {split!r}")
        tasks.setdefault(name, {}).setdefault(SPLIT_NAMES[split] if has_splits else "all", []).append(row)
    if has_splits:
        return [_make_task(name, splits, str(path)) for name, splits in tasks.items()]
    dev_share, test_share = (f"{fraction:.0%}" for fraction in DEV_AND_TEST_FRACTIONS)
    source = f"{path}, {dev_share} (dev) and {test_share} (test) of each class drawn with seed {seed}"
    result = []
    for name, splits in tasks.items():
        divided = divide_rows(tuple(splits["all"]), DEV_AND_TEST_FRACTIONS, seed, f"{name!r} of {path}")
        result.append(_make_task(name, dict(zip(SPLITS, divided, strict=True)), source))
    return result


def _read_folder(path: Path) -> list[RawTask]:
    tasks = []
    for folder in sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")):
        files = _find_split_files(folder)
        for split in ("train", "test"):
            if split not in files:
                raise UserError(f"stream: expected a file {split} ({list_suffixes()}) in {folder}, there is none")
        splits = {split: [row for row, _, _ in _read_rows(file)] for split, file in files.items()}
        tasks.append(_make_task(folder.name, splits, str(folder)))
    if not tasks:
        raise UserError(f"stream: expected a folder for each task, with train and test, in {path}; there is none")
    return tasks


def _find_split_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(file.name.split(".")[0])
        if split is None or not file.is_file() or not is_table(file.name):
            continue
        if split in files:
            names = f"{files[split].name} and {file.name}"
            raise UserError(f"stream: expected one file of {split} in {folder}, got {names}")
        files[split] = file
    return files


def _make_task(name: str, by_split: Mapping[str, Sequence[LabeledRow]], source: str) -> RawTask:
    """Make a task whose classes are those of train: integers by size, then names by alphabet."""
    splits = {split: tuple(rows) for split, rows in by_split.items()}
    labels = sorted({row.label for rows in splits.values() for row in rows})
    if all(label.removeprefix("-").isdecimal() for label in labels):
        labels = [f"{name}/{label}" for label in sorted(labels, key=int)]
        for split, rows in splits.items():
            splits[split] = tuple(row._replace(label=f"{name}/{row.label}") for row in rows)
    train = splits.get("train", ())
    train_labels = {row.label for row in train}
    classes = tuple(label for label in labels if label in train_labels)
    return RawTask(name, classes, train, splits.get("dev"), splits.get("test", ()), source)


def _read_rows(path: Path, extra_columns: tuple[str, ...] = ()) -> list[tuple[LabeledRow, dict[str, Any], str]]:
    """Read the rows of a table, at least one, with their records, and their locations for messages."""
    unit = "row" if path.suffix == ".parquet" else "line"
    rows = []
    for number, record in read_records(path, STREAM):
        location = f"{path}, {unit} {number}"
        check_columns((*extra_columns, "text", "label"), record, location, STREAM)
        label = _parse_name(record["label"], f"a string or a whole number as label in {location}")
        row = LabeledRow.of(_parse_texts(record, location), label)
        rows.append((row, record, location))
    if not rows:
        raise UserError(f"stream: expected rows in {path}, found none")
    if all(_is_number(row.texts[0]) for row, _, _ in rows):
        raise UserError(f"stream: expected text in the column 'text' of {path}, got numbers alone")
    return rows


def _parse_texts(record: Mapping[str, Any], location: str) -> tuple[str, ...]:
    """Return one text or two; a text_pair that is null or empty is none."""
    text, pair = record["text"], record.get("text_pair")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"stream: expected text in the column 'text' of {location}, got {text!r}")
    if pair is None or pair == "":
        return (text,)
    if not isinstance(pair, str) or not pair.strip():
        raise UserError(f"stream: expected text in the column 'text_pair' of {location}, got {pair!r}")
    return text, pair


def _parse_name(value: Any, expected: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise UserError(f"stream: expected {expected}, got {value!r}")
    return str(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
