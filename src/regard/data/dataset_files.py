"""Readers of the tasks of streams: published data sets, Python's documentation, and a user's own tables and folders."""

import importlib
import inspect
import pkgutil
import platform
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.data import tables
from regard.data.hub import HUB_DATASETS
from regard.data.instructions import load_instances
from regard.data.rows import LabeledRow, LabeledRows, RawTask, hash_text
from regard.data.splits import divide_rows
from regard.data.stream import SPLITS
from regard.data.stream_catalog import DATASETS, DatasetFiles, DatasetSpec, StreamSpec
from regard.errors import UserError

DatasetRows = tuple[LabeledRows, LabeledRows, str]
"""Rows of a data set for training and testing, and where they come from."""


def read_dataset(name: str, folder: Path | None) -> DatasetRows:
    """Read a data set from the first of its published forms in a folder, or from the hub without one."""
    spec = DATASETS[name]
    if folder is None:
        train, test = HUB_DATASETS[name].read(tables.STREAM)
        train_rows, test_rows = (_label_rows(table, spec) for table in (train, test))
        return train_rows, test_rows, f"{train.name} (train), {test.name} (test: {spec.test_rows})"
    if not folder.is_dir():
        raise UserError(f"stream: expected a folder with the files of {name}, there is no {folder}")
    for files in spec.files:
        places = [folder / below for below in files.folders] + [folder] * (folder.name in files.folders)
        if paths := tables.find_split_files(places, (files.train,), (files.test,), tables.STREAM):
            return _read_files(spec, files, *paths)
    candidates = "; ".join(f"{' or '.join(files.folders)} with {files.train}" for files in spec.files)
    expected = f"the files of {name} in {folder}, packed with .gz or not: {candidates}"
    raise UserError(f"stream: expected {expected}; none is there")


def _read_files(spec: DatasetSpec, files: DatasetFiles, *paths: Path) -> DatasetRows:
    """Read both splits; if train has no titles at all, those of test are dropped."""
    train, test = (_READERS[files.format](path, files) for path in paths)
    note = ""
    if files.joins_texts:
        train, test = (_map_texts(table, lambda texts: (" ".join(filter(None, texts)),)) for table in (train, test))
        note = ", title and text as one text"
    elif files.format == "csv" and len(files.text_columns) == 2 and not any(row.texts[0] for row in train.rows):
        train, test = (_map_texts(table, lambda texts: texts[-1:]) for table in (train, test))
        note = ", without titles, which train lacks"
    source = f"{paths[0]} (train), {paths[1]} (test: {files.test_rows or spec.test_rows}){note}"
    train_rows, test_rows = (_label_rows(table, spec, files.first_class) for table in (train, test))
    return train_rows, test_rows, source


def _map_texts(table: tables.Table, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> tables.Table:
    return replace(table, rows=tuple(row._replace(texts=change(row.texts)) for row in table.rows))


def _label_rows(table: tables.Table, spec: DatasetSpec, first_class: int = 0) -> LabeledRows:
    by_index = {str(index): label for index, label in enumerate(spec.labels, start=first_class)}
    names = by_index | dict(spec.synonyms) | {label: label for label in spec.labels}
    result = []
    for row in table.rows:
        if row.label not in names:
            allowed = ", ".join([*spec.labels, *by_index])
            raise UserError(f"stream: expected a class of {allowed} in {table.locate(row)}, got {row.label!r}")
        texts = tuple(text or "" for text in row.texts)
        if any(text.strip() for text in texts):
            result.append(LabeledRow(texts, names[row.label], hash_text(texts, match_last=spec.match_last_text)))
    return tuple(result)


def _read_csv(path: Path, files: DatasetFiles) -> tables.Table:
    """Read Zhang et al.'s rows of class and texts; a header is skipped, and titles may be missing."""
    num_columns = max(files.text_columns) + 1
    rows = []
    for number, fields in tables.read_csv_fields(path, tables.STREAM):
        if number == 1 and fields and not fields[0].isdecimal():
            continue
        if len(fields) >= num_columns:
            rows.append(tables.TableRow(tuple(fields[column] for column in files.text_columns), fields[0], number))
        elif len(fields) == 2 and len(files.text_columns) == 2:
            rows.append(tables.TableRow(("", fields[1]), fields[0], number))
        elif fields:
            expected = f"a class and {num_columns - 1} columns in {path}, line {number}"
            raise UserError(f"stream: expected {expected}, got {len(fields)} in all")
    return tables.Table(str(path), tuple(rows), option=tables.STREAM)


def _read_instructions(path: Path, files: DatasetFiles) -> tables.Table:
    """Read inputs of lines "Part: text", whose output is the class, not "-"; missing parts are ""."""
    parts = files.columns.texts
    pattern = re.compile("".join(rf"(?:{re.escape(part)}: (.*?)\s*)?" for part in parts) + r"\Z", re.DOTALL)
    _, instances = load_instances(path)
    rows = []
    for number, (text, label) in enumerate(instances, start=1):
        if (match := pattern.match(str(text))) is None:
            names = ", ".join(f"{part}:" for part in parts)
            raise UserError(f"stream: expected {names} in {path}, row {number}, got {str(text)!r:.60}")
        if str(label) != tables.NO_GOLD_LABEL:
            rows.append(tables.TableRow(match.groups(""), str(label), number))
    return tables.Table(str(path), tuple(rows), "row", tables.STREAM)


_READERS: Mapping[str, Callable[[Path, DatasetFiles], tables.Table]] = {
    "csv": _read_csv,
    "sentences": lambda path, files: tables.read_sentences(path, files.columns, tables.STREAM),
    "instructions": _read_instructions,
}


MIN_WORDS = 6  # documentation of fewer words is dropped
_STDLIB_FRACTIONS = (0.15, 0.25)
_SEED = 0  # dev and test rows do not depend on the seed of a stream
_SKIPPED_MODULES = re.compile(r"(^|\.)(__main__|test|tests|_.*)(\.|$)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def read_stdlib_tasks(spec: StreamSpec) -> list[RawTask]:
    """Read tasks whose classes are modules of the standard library."""
    texts = read_documentation(tuple(label for task in spec.tasks for label in task.labels))
    source = f"documentation of the standard library of Python {platform.python_version()}"
    tasks = []
    for task in spec.tasks:
        rows = tuple(LabeledRow.of((text,), label) for label in task.labels for text in texts[label])
        train, dev, test = divide_rows(rows, _STDLIB_FRACTIONS, _SEED, task.name)
        tasks.append(RawTask(name=task.name, labels=task.labels, train=train, dev=dev, test=test, source=source))
    return tasks


def read_documentation(modules: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Read the documentation of functions, classes and methods by module, sorted by their qualified names.

    A text is an object's own name and its docstring. A package includes its public submodules that can be imported.
    Dotted names that begin with the module's own lose it, so that the class is not in the text. Docstrings that are
    repeated, that two modules share, of fewer than `MIN_WORDS` words, or with a memory address are dropped.
    """
    by_module = {module: _read_module(module) for module in modules}
    uses = Counter(key for texts in by_module.values() for key in texts)
    result = {}
    for module, texts in by_module.items():
        result[module] = tuple(text for key, text in texts.items() if uses[key] == 1)
        if not result[module]:
            problem = f"Python's module {module}, found none (python -OO has none)"
            raise UserError(f"stream: expected docstrings in {problem}")
    return result


def _read_module(name: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    own_name = re.compile(rf"\b{re.escape(name)}\.(?:\w+\.)*(?=\w)")
    for module in _iterate_modules(name):
        for object_name, value in _iterate_objects(module, name):
            docstring = getattr(value, "__doc__", None)
            if not isinstance(docstring, str) or _ADDRESS.search(docstring):
                continue
            docstring = own_name.sub("", inspect.cleandoc(docstring)).strip()
            if len(re.findall(r"\w+", docstring)) >= MIN_WORDS:
                texts.setdefault(hash_text((docstring,)), f"{object_name}: {docstring}")
    return texts


def _iterate_modules(name: str) -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"stream: expected the module {name} in this Python: {error}") from None
        yield module
        for below in sorted(info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}.")):
            if _SKIPPED_MODULES.search(below):
                continue
            try:
                importlib.import_module(below)
            except ImportError:
                continue
            yield from _iterate_modules(below)


def _iterate_objects(module: ModuleType, owner: str) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        origin = str(getattr(value, "__module__", None)).lstrip("_")
        if not (inspect.isclass(value) or inspect.isroutine(value)) or not f"{origin}.".startswith(f"{owner}."):
            continue
        yield name, value
        if inspect.isclass(value):
            for method, attribute in sorted(vars(value).items()):
                function = attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute
                if method != "__doc__" and (inspect.isroutine(function) or isinstance(function, property)):
                    yield method, function


SPLIT_NAMES = {"train": "train", "dev": "dev", "validation": "dev", "valid": "dev", "test": "test"}
"""What a column or a file may call a split, and which split it is."""
USER_FRACTIONS = (0.1, 0.2)  # fractions of each class for dev and test in a table without splits


def read_user_tasks(path: Path, seed: int) -> list[RawTask]:
    """Read tasks from a table or a folder.

    A table has the columns task, text, label, and optionally text_pair and split. Without the column split, the seed
    samples dev and test: a tenth and a fifth of each class. A folder has a folder per task with the tables train, test
    and optionally dev, which have the columns text, label and optionally text_pair.

    Integer classes belong to one task and get its name as a prefix. Other classes with the same name are one class.
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
    dev_share, test_share = (f"{fraction:.0%}" for fraction in USER_FRACTIONS)
    source = f"{path}, {dev_share} (dev) and {test_share} (test) of each class drawn with seed {seed}"
    result = []
    for name, splits in tasks.items():
        divided = divide_rows(tuple(splits["all"]), USER_FRACTIONS, seed, f"{name!r} of {path}")
        result.append(_make_task(name, dict(zip(SPLITS, divided, strict=True)), source))
    return result


def _read_folder(path: Path) -> list[RawTask]:
    tasks = []
    for folder in sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")):
        files = _find_split_files(folder)
        for split in ("train", "test"):
            if split not in files:
                file = f"{split} ({tables.list_suffixes()})"
                raise UserError(f"stream: expected a file {file} in {folder}, there is none")
        splits = {split: [row for row, _, _ in _read_rows(file)] for split, file in files.items()}
        tasks.append(_make_task(folder.name, splits, str(folder)))
    if not tasks:
        raise UserError(f"stream: expected a folder for each task, with train and test, in {path}; there is none")
    return tasks


def _find_split_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(file.name.split(".")[0])
        if split is None or not file.is_file() or not tables.is_table(file.name):
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
    unit = "row" if path.suffix == ".parquet" else "line"
    rows = []
    for number, record in tables.read_records(path, tables.STREAM):
        location = f"{path}, {unit} {number}"
        tables.check_columns((*extra_columns, "text", "label"), record, location, tables.STREAM)
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
    columns = ["text"] if record.get("text_pair") in (None, "") else ["text", "text_pair"]
    for column in columns:
        if not isinstance(record[column], str) or not record[column].strip():
            raise UserError(f"stream: expected text in the column '{column}' of {location}, got {record[column]!r}")
    return tuple(record[column] for column in columns)


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
