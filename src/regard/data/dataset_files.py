"""Readers of the tasks of streams: published data sets, and Python's documentation."""

import functools
import importlib
import inspect
import pkgutil
import platform
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.data import tables
from regard.data.hub import HUB_DATASETS
from regard.data.instructions import load_instances
from regard.data.rows import LabeledRow, LabeledRows, RawTask, TextKey, hash_words
from regard.data.splits import divide_rows
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
            result.append(LabeledRow(texts, names[row.label], TextKey.of(texts, match_last=spec.match_last_text)))
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


@functools.cache
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
                texts.setdefault(hash_words((docstring,)), f"{object_name}: {docstring}")
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
