"""Readers of tasks to train probes on: published ones, and a user's own tables."""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from regard.data import tables
from regard.data.class_labels import name_class, read_same_names
from regard.data.conll import read_conll
from regard.data.examples import Examples, Task, TaskKind
from regard.data.files import describe_file
from regard.data.missing_values import MissingValues, is_doubtful, is_minus_one, marks_none, warn_of_class
from regard.data.names_alike import warn_of_names_alike
from regard.data.rows import TextKey, describe_numbers
from regard.data.running_text import read_running_text
from regard.data.task_catalog import TASKS, WIKITEXT_TEST, TaskSpec
from regard.errors import UserError, check_choice, warn_user

_LONG_NUMBER = 20  # characters of labels that are sorted as names
TABLE_METRICS = ("accuracy", "f1", "mcc")


_Tables = tuple[tables.Table, tables.Table, str]
"""Training and validation rows of a task before labels are indexed, and where they come from."""


def read_task(
    name: str,
    folder: str | Path | None = None,
    *,
    rows: tuple[int | None, int | None] | None = None,
    seed: int = 0,
    text: str | None = None,
    label: str | None = None,
    validation: str | Path | None = None,
    metric: str | None = None,
    missing_values: MissingValues = "skip",
) -> Task:
    """Read a task of `TASKS`, or a table of the user's own (.jsonl, .csv, .tsv without quotes, or .parquet).

    Args:
        name: A name in `TASKS`, or the path of a table.
        folder: Folder of published files, plain or .gz; None reads the hub. They are looked for in folder/glue/CoLA,
            folder/CoLA and the folder itself, for each name of `TaskSpec.folders`. WikiText without training file has
            its validation file for training, and its test file for validation. For "lm" and "mlm" also a text file,
            whose last fifth of lines is held out.
        rows: Maximum numbers of training and validation rows, sampled with `seed` (None for all); fewer rows are a
            subset of more. Of running text, consecutive lines.
        seed: Of sampling and of holding out.
        text: Column of texts in a user's table, or two as "a,b"; "text" by default.
        label: Column of labels, strings or integers; "label" by default.
        validation: Second table for validation. By default a fifth of the rows is held out; each label keeps one.
        metric: "accuracy" (default), "f1" or "mcc".
        missing_values: "skip" rows of a user's table without a label or a text, with a warning and counted in
            `Task.left_out`, or "refuse" them. The label −1 of a table to validate on is none where no training row has
            it, with "skip-minus-one" everywhere.
    """
    check_choice("missing-values", missing_values, get_args(MissingValues))
    if rows is not None and any(count is not None and count < 1 for count in rows):
        raise UserError(f"rows: expected at least 1 for training and 1 for validation, got {rows[0]} and {rows[1]}")
    spec = None if tables.is_table(name) else _find_spec(name)
    kind: TaskKind = spec.kind if spec else "sequence"
    class_names: tuple[str, ...] = ()
    if spec is None:
        if folder is not None:
            raise UserError(f"folder: expected none with a file of your own ({name}), got {folder}")
        paths = [Path(path) for path in (name, validation) if path is not None]
        columns = _parse_columns(text, label)
        class_names = read_same_names(paths, columns.label)
        *splits, source = _read_user_table(paths, columns, seed, missing_values)
        _warn_of_user_labels(name, splits)
        metric = metric or "accuracy"
    else:
        if any(argument is not None for argument in (text, label, validation, metric)):
            raise UserError(f"task: expected text, label, validation and metric with a file only, got them with {name}")
        *splits, source = _read_published(name, spec, None if folder is None else Path(folder))
        metric = spec.metric
    labels, indices = _index_labels(spec.labels if spec else None, splits[0])
    named = _name_labels(labels, class_names, name)
    if spec is None:
        check_choice("metric", metric, TABLE_METRICS)
        if metric == "f1" and len(labels) != 2:
            raise UserError(f"metric: expected two classes for f1, got {len(labels)}")
    indices |= {label: index for index, label in enumerate(named)}
    train, held_out = (
        _sample(_to_examples(table, indices, class_names), rows and rows[number], kind, seed)
        for number, table in enumerate(splits)
    )
    return Task(
        name=name if spec else Path(name).name,
        kind=kind,
        labels=named,
        metric=metric,
        train=train,
        validation=held_out,
        source=source,
        left_out=0 if spec else sum(table.left_out for table in splits),
    )


def _name_labels(labels: tuple[str, ...], class_names: Sequence[str], location: str) -> tuple[str, ...]:
    """Return labels with the names of classes in the place of numbers. UserError if two of them are one class."""
    if not class_names:
        return labels
    named = tuple(name_class(label, class_names, location, tables.TASK) for label in labels)
    if len(set(named)) < len(named):
        raise UserError(f"{tables.TASK}: expected each class written in one way, got {', '.join(labels)} in {location}")
    return named


def _find_spec(name: str) -> TaskSpec:
    if name not in TASKS:
        allowed = f"{', '.join(TASKS)}, or a file ({tables.list_suffixes()})"
        hint = tables.find_json_hint(name) or "; running text is the data of the task lm"
        raise UserError(f"task: expected one of {allowed}; got '{name}'{hint if Path(name).is_file() else ''}")
    return TASKS[name]


def _warn_of_user_labels(name: str, splits: Sequence[tables.Table]) -> None:
    """Warn of labels of a user's table that may be no classes, or one class in two ways of writing."""
    labels = [row.label for table in splits for row in table.rows]
    tables.warn_of_labels(map(str, labels), name, tables.TASK)
    warn_of_names_alike(sorted(set(map(str, labels))), f"labels of {name}", tables.TASK)
    if is_doubtful(row.label for row in splits[0].rows):
        warn_of_class(sum(map(is_minus_one, labels)), name, tables.TASK)


def _parse_columns(text: str | None, label: str | None) -> tables.Columns:
    texts = tuple(part.strip() for part in (text or "text").split(","))
    if len(texts) > 2 or not all(texts):
        raise UserError(f"text: expected one column or two apart by a comma, got '{text}'")
    return tables.Columns(texts, label or "label")


def _read_user_table(
    paths: Sequence[Path], columns: tables.Columns, seed: int, missing_values: MissingValues
) -> _Tables:
    """Read a table to train on, and one to validate on or a part of it."""
    path, table = paths[0], tables.read_table(paths[0], columns, missing_values=missing_values)
    if len(paths) > 1:
        if missing_values == "skip" and marks_none(row.label for row in table.rows):
            missing_values = "skip-minus-one"  # as in test files of GLUE
        held = tables.read_table(paths[1], columns, missing_values=missing_values)
        _warn_of_shared_texts(held, table)
        return table, held, f"{path}, {paths[1]}"
    held_out = _hold_out(table.rows, seed)
    if not held_out:
        why = describe_numbers([str(row.label) for row in table.rows])
        expected = f"expected two texts with one label in {path}, one for validation"
        raise UserError(f"task: {expected}; there are none{why}")
    train, rest = (
        replace(table, rows=tuple(row for index, row in enumerate(table.rows) if (index in held_out) is part))
        for part in (False, True)
    )
    rest = replace(rest, left_out=0)  # which were counted in the other
    return train, rest, f"{describe_file(path)}, {len(rest.rows)} rows held out with seed {seed}"


def _hold_out(rows: Sequence[tables.TableRow], seed: int) -> set[int]:
    """Sample the indices of a fifth of the rows, at least one, such that each label keeps a row.

    Rows with the same text stay together: none is trained on that is held out.
    """
    remaining = Counter(row.label for row in rows)
    keys = [TextKey.of(row.texts) for row in rows]
    copies: dict[TextKey, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        copies[key].append(index)
    held_out: set[int] = set()
    order = [copies[keys[index]] for index in _shuffled_range(len(rows), seed)]
    fits = [same for same in order if len(same) <= max(1, len(rows) // 5)]
    for same in fits or sorted(order, key=len)[:1]:
        labels = Counter(rows[copy].label for copy in same)
        has_room = not held_out or len(held_out) + len(same) <= len(rows) // 5
        if same[0] not in held_out and has_room and all(remaining[label] > count for label, count in labels.items()):
            held_out.update(same)
            remaining -= labels
    return held_out


def _warn_of_shared_texts(table: tables.Table, train: tables.Table) -> None:
    """Warn of texts that a table to validate on has from the table to train on."""
    known = {TextKey.of(row.texts) for row in train.rows}
    if shared := sum(TextKey.of(row.texts) in known for row in table.rows):
        problem = f"{shared} of {len(table.rows)} rows of {table.name} have texts of {train.name}, trained on"
        warn_user(f"validation: {problem}")


def _read_published(name: str, spec: TaskSpec, folder: Path | None) -> _Tables:
    if folder is None:
        train_table, validation_table = spec.hub.read()
        return train_table, validation_table, f"{train_table.name}, {validation_table.name}"
    if spec.kind == "mlm" and folder.is_file():
        return _split_text(folder)
    if not folder.is_dir():
        expected = f"a folder with the files of {name}" + (", or a text file" if spec.kind == "mlm" else "")
        got = f"{folder} is a file" if folder.is_file() else f"there is no {folder}"
        raise UserError(f"data: expected {expected}; {got}")
    folders = [folder / parent / below for parent in ("glue", "") for below in spec.folders] + [folder]
    choices = [(spec.train, spec.validation)]
    if spec.kind == "mlm":
        choices.append((spec.validation, WIKITEXT_TEST))
    for train, validation in choices:
        if paths := tables.find_split_files(folders, train, validation, tables.TASK):
            note = ", no file for training" if train is not spec.train else ""
            source = f"{paths[0]} (training), {paths[1]} (validation){note}"
            return _read_file(name, spec, paths[0]), _read_file(name, spec, paths[1]), source
    places = f"{folder} or below, in glue/ or {', '.join(spec.folders)}"
    raise UserError(f"task: expected {' or '.join(spec.train)} (.gz) in {places}; none is")


def _split_text(path: Path) -> _Tables:
    """Read a file of running text, whose last fifth of lines is to validate on."""
    table = read_running_text(path)
    held_out = max(1, len(table.rows) // 5)
    if held_out >= len(table.rows):
        raise UserError(f"data: expected at least two lines that are not blank in {path}, got {len(table.rows)}")
    train, rest = (replace(table, rows=rows) for rows in (table.rows[:-held_out], table.rows[-held_out:]))
    return train, rest, f"{describe_file(path)}, the last {held_out} of {len(table.rows)} lines held out"


def _read_file(name: str, spec: TaskSpec, path: Path) -> tables.Table:
    if spec.kind == "token":
        return read_conll(path, name)
    if spec.kind == "mlm":
        return read_running_text(path)
    assert spec.file_columns is not None, f"{name} does not name the columns of its files"
    return tables.read_sentences(path, spec.file_columns)


def _index_labels(labels: tuple[str, ...] | None, train: tables.Table) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes in order, and the index of each by every name it may be written with.

    Known classes may be written as indices, as in GLUE. Others come from the training rows: O first, then integers by
    size, then names by alphabet.
    """
    if labels is not None:
        return labels, {written: index for index, label in enumerate(labels) for written in (str(index), label)}
    names = {name for row in train.rows for name in _split_label(row)}
    ordered = tuple(sorted(names, key=_sort_key))
    if len(ordered) < 2:
        raise UserError(f"task: expected at least two classes in {train.name}, got {', '.join(map(repr, ordered))}")
    return ordered, {name: index for index, name in enumerate(ordered)}


def _split_label(row: tables.TableRow) -> tuple[str, ...]:
    return (row.label,) if isinstance(row.label, str) else row.label or ()


def _sort_key(name: str) -> tuple[bool, bool, int, str]:
    is_integer = len(name) < _LONG_NUMBER and name.removeprefix("-").isdecimal()
    return name != "O", not is_integer, int(name) if is_integer else 0, name


def _to_examples(table: tables.Table, indices: Mapping[str, int], class_names: Sequence[str]) -> Examples:
    """Return rows with the indices of their labels, which may be written as numbers of classes that have names."""
    texts = tuple(row.texts for row in table.rows)
    if table.rows[0].label is None:
        return Examples(texts=texts, labels=())
    labels: list[int | tuple[int, ...]] = []
    for row in table.rows:
        names = _split_label(row)
        if class_names and names[0] not in indices:
            names = (str(name_class(names[0], class_names, table.locate(row), tables.TASK)),)
        unknown = [name for name in names if name not in indices]
        if unknown:
            allowed = ", ".join(list(indices)[:12]) + (", …" if len(indices) > 12 else "")
            raise UserError(f"task: expected a label of {allowed} in {table.locate(row)}; got '{unknown[0]}'")
        row_labels = tuple(indices[name] for name in names)
        labels.append(row_labels[0] if isinstance(row.label, str) else row_labels)
    return Examples(texts=texts, labels=tuple(labels))


def _sample(examples: Examples, max_rows: int | None, kind: TaskKind, seed: int) -> Examples:
    """Sample at most `max_rows` examples in order; of running text consecutive lines."""
    count = len(examples)
    if max_rows is None or max_rows >= count:
        return examples
    if kind == "mlm":
        start = random.Random(seed).randrange(count - max_rows + 1)
        return Examples(texts=examples.texts[start : start + max_rows], labels=())
    selected = sorted(_shuffled_range(count, seed)[:max_rows])
    texts, labels = (tuple(column[index] for index in selected) for column in (examples.texts, examples.labels))
    return Examples(texts=texts, labels=labels)


def _shuffled_range(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
