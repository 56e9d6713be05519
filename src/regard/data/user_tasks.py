"""Readers of a user's own tasks: a table of all, or a folder with tables for each; rows have labels or free answers."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.data import tables
from regard.data.benchmarks import LONG_SEQUENCE, TaskType
from regard.data.class_labels import read_names_by_file
from regard.data.files import describe_file
from regard.data.instructions import format_prompt
from regard.data.missing_values import (
    MissingValues,
    find_complete,
    find_gaps,
    is_doubtful,
    is_minus_one,
    is_nothing,
    marks_none,
    undo_float,
    warn_of_class,
)
from regard.data.names_alike import warn_of_names_alike
from regard.data.rows import LabeledRow, RawTask, TextKey
from regard.data.splits import divide_rows
from regard.data.stream import SPLITS
from regard.data.user_rows import (
    LABEL,
    PAIR,
    PROMPT,
    Record,
    UserColumns,
    UserRow,
    find_columns,
    parse_name,
    read_located,
    read_rows,
)
from regard.errors import UserError, warn_user

SPLIT_NAMES = {"train": "train", "dev": "dev", "validation": "dev", "valid": "dev", "val": "dev", "test": "test"}
"""What a column or a file may call a split, and which split it is."""
USER_FRACTIONS = (0.1, 0.2)  # fractions of each class for dev and test in a table without splits
_WHOLE_NUMBER = re.compile(r"-?\d{1,4000}(\.0+)?")  # with .0 as pandas writes a column with a gap; int takes no more


def read_user_tasks(
    path: Path, seed: int, task_type: TaskType | None = None, missing_values: MissingValues = "skip"
) -> list[RawTask]:
    """Read tasks from a table or a folder.

    A table has the columns task, text and label or answer, and optionally text_pair, instruction and split. Without the
    column task its rows are one task, called as the file. Without the column split, the seed samples dev and test: a
    tenth and a fifth of each class; classes of one text or two are in train alone. The columns input and output, of
    instructions as they are published, are read as text and answer where these are missing. A folder has a folder per
    task with the tables train, test and optionally dev, with the same columns but task and split.

    Rows without a label, an answer or a text are left out with a warning, or refused, as `missing_values` says. The
    label −1 is none if no training row of the task has it or another negative one.

    Integer classes, also those written as 1.0, belong to one task and get its name as a prefix. Other classes with the
    same name are one class.

    An instruction is the first of two texts, the others are joined as the second. Text-to-text tasks are those without
    labels, or of the task type "generation", which writes labels where there are no answers; their prompts are those of
    the Long Sequence benchmark, or as they are in a column prompt.
    """
    if path.is_dir():
        return _read_folder(path, task_type, missing_values)
    every = read_located(path, task_type)
    columns = find_columns(every, task_type, str(path))
    has_splits = any("split" in record.values for record in every)
    places = [_place_record(record, has_splits) for record in every]
    marked, unpaired = _find_marked(every, columns, missing_values, places), _find_unpaired(every, columns, places)
    records = _drop_incomplete(every, columns, path, missing_values, marked, unpaired)
    tasks: dict[str, dict[str, list[UserRow]]] = {}
    only_task = None if any("task" in record.values for record in records) else path.name.lstrip(".").partition(".")[0]
    read = read_rows(records, columns, path, () if only_task is not None else ("task",))
    if only_task is not None:
        warn_user(f"stream: {path} has no column 'task': its rows are one task, {only_task!r}")
    for row, record in zip(read, records, strict=True):
        name = only_task
        if name is None:
            name = parse_name(record.values["task"], f"the name of a task in {record.location}")
        split = _find_split(record) if has_splits else "all"
        if split is None:
            got = record.values.get("split")
            raise UserError(f"stream: expected a split of {', '.join(SPLIT_NAMES)} in {record.location}, got {got!r}")
        tasks.setdefault(name, {}).setdefault(split, []).append(row)
    warn_of_names_alike(tasks, f"tasks of {path}")
    left_out = _count_left_out(every, records, only_task)
    if lost := next((name for name in left_out if name and name not in tasks), None):
        expected = f"expected rows with a text and a label of the task {lost!r} in {path}"
        raise UserError(f"stream: {expected}, none of {left_out[lost]} has both")
    source = describe_file(path)
    if not has_splits:
        dev_share, test_share = (f"{fraction:.0%}" for fraction in USER_FRACTIONS)
        source += f", {dev_share} (dev) and {test_share} (test) of each class drawn with seed {seed}"
    division = None if has_splits else (seed, path)
    return [_make_task(name, rows, source, columns, division, left_out=left_out[name]) for name, rows in tasks.items()]


def _drop_incomplete(
    records: list[Record],
    columns: UserColumns,
    path: Path,
    missing_values: MissingValues,
    marked: Collection[str],
    unpaired: Collection[str],
) -> list[Record]:
    """Drop rows without a label or a text, or refuse them.

    `marked` are the locations of those whose label is none, `unpaired` those of rows that lack the second text.
    """
    if missing_values == "refuse":
        if first := next((record.location for record in records if record.location in marked), None):
            raise UserError(f"stream: expected a label in {first}, got -1, which no training row of its task has")
        return records
    rows = [(values, location.removeprefix(f"{path}, ")) for values, location in records]
    at = {index for index, record in enumerate(records) if record.location in marked}
    may_lack = {
        columns.text: {index for index, record in enumerate(records) if columns.may_lack_text(record.values)},
        PAIR: {index for index, record in enumerate(records) if record.location not in unpaired},
    }
    texts = [columns.text, *([PAIR] if unpaired else [])]
    complete = find_complete(rows, columns.answer or "label", texts, path, tables.STREAM, at, may_lack)
    return [records[index] for index in complete]


def _place_record(record: Record, has_splits: bool) -> tuple[str, bool]:
    """Return the task of a row in a table, and whether it is trained on, or may be."""
    return str(record.values.get("task")).strip(), not has_splits or _find_split(record) == "train"


def _find_split(record: Record) -> str | None:
    """Return the split of a row in a table, whatever the case of its name; None for one that is none."""
    return SPLIT_NAMES.get(str(record.values.get("split")).strip().lower())


def _find_marked(
    records: Sequence[Record], columns: UserColumns, missing_values: MissingValues, places: Sequence[tuple[str, bool]]
) -> set[str]:
    """Return the locations of rows whose label −1 is none; `places` are their tasks and whether they are trained on."""
    if columns.answer is not None:
        return set()
    trained: dict[str, list[Any]] = defaultdict(list)
    for record, (task, is_trained) in zip(records, places, strict=True):
        has_text = missing_values == "refuse" or not is_nothing(record.values.get(columns.text))  # else left out
        if is_trained and (has_text or columns.may_lack_text(record.values)):
            trained[task].append(undo_float(record.values.get("label")))
    no_label = {task: missing_values == "skip-minus-one" or marks_none(labels) for task, labels in trained.items()}
    return {
        record.location
        for record, (task, _) in zip(records, places, strict=True)
        if no_label.get(task) and is_minus_one(record.values.get("label"))
    }


def _find_unpaired(records: Sequence[Record], columns: UserColumns, places: Sequence[tuple[str, bool]]) -> set[str]:
    """Return the locations of rows without a second text in tasks of classification where most rows have one."""
    second = [] if columns.is_text else [record.values.get(PAIR) for record in records]
    return {records[index].location for index in find_gaps(second, [task for task, _ in places])}


def _count_left_out(every: Sequence[Record], complete: Sequence[Record], only_task: str | None) -> Counter[str]:
    """Return how many rows of each task were left out; those without a task are of none ("")."""
    locations = {record.location for record in complete}
    left_out = [record.values.get("task") for record in every if record.location not in locations]
    if only_task is not None:
        return Counter({only_task: len(left_out)})
    return Counter("" if task is None else str(task).strip() for task in left_out)


def _read_folder(path: Path, task_type: TaskType | None, missing_values: MissingValues) -> list[RawTask]:
    files_by_task: dict[str, dict[str, Path]] = {}
    for folder in sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")):
        files = files_by_task[folder.name] = _find_split_files(folder)
        for split in ("train", "test"):
            if split not in files:
                expected = f"stream: expected {split} ({tables.list_suffixes()}) in {folder}, there is none"
                hint = "" if files else "; of a folder for each class, or of other files, make a table (text, label)"
                raise UserError(f"{expected}{hint}")
    if not files_by_task:
        names = [name for name in sorted(file.name for file in path.iterdir()) if tables.is_table(name)]
        splits = ", ".join(name for name in names if name.split(".")[0].lower() in SPLIT_NAMES)
        instead = f"put {splits} into {path}/TASK" if splits else "there is none"
        raise UserError(f"stream: expected a folder for each task, with train and test, in {path}; {instead}")
    records = {
        file: read_located(file, task_type, names)
        for files in files_by_task.values()
        for file, names in read_names_by_file(list(files.values()), LABEL).items()
    }
    every = [record for rows in records.values() for record in rows]
    columns = find_columns(every, task_type, str(path))
    named = {file: (name, split == "train") for name, files in files_by_task.items() for split, file in files.items()}
    places = [named[file] for file, rows in records.items() for _ in rows]
    marked, unpaired = _find_marked(every, columns, missing_values, places), _find_unpaired(every, columns, places)
    complete = {
        file: _drop_incomplete(rows, columns, file, missing_values, marked, unpaired) for file, rows in records.items()
    }
    return [
        _make_task(
            name,
            {split: read_rows(complete[file], columns, file) for split, file in files.items()},
            describe_file(path / name),
            columns,
            left_out=sum(len(records[file]) - len(complete[file]) for file in files.values()),
        )
        for name, files in files_by_task.items()
    ]


def _find_split_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(file.name.split(".")[0].lower())
        if not file.is_file() or not tables.is_table(file.name) or file.name.startswith("."):
            continue
        if split is None:
            warn_user(f"stream: {file} is not read: expected a name of {', '.join(SPLIT_NAMES)}")
            continue
        if split in files:
            names = f"{files[split].name} and {file.name}"
            raise UserError(f"stream: expected one file of {split} in {folder}, got {names}")
        files[split] = file
    return files


def _make_task(
    name: str,
    by_split: Mapping[str, Sequence[UserRow]],
    source: str,
    columns: UserColumns,
    division: tuple[int, Path] | None = None,
    *,
    left_out: int,
) -> RawTask:
    """Make a task whose classes are those of train: integers by size, then names by alphabet.

    With `division`, a seed and what messages call the table, its rows are divided into splits.
    """
    instructions = dict.fromkeys(row.instruction for rows in by_split.values() for row in rows)
    splits = {
        split: tuple(_prepare_row(row, columns, in_key=len(instructions) > 1) for row in rows)
        for split, rows in by_split.items()
    }
    if "" in instructions and len(instructions) > 1:
        location = next(row.location for rows in by_split.values() for row in rows if not row.instruction)
        raise UserError(f"stream: expected an instruction in each row of {name!r}, or in none, got none in {location}")
    minus_one = 0 if columns.is_text else _warn_of_labels(name, splits)
    if division is not None:
        seed, path = division
        divided = divide_rows(splits["all"], USER_FRACTIONS, seed, f"{name!r} of {path}")
        splits = dict(zip(SPLITS, divided, strict=True))
    labels = sorted({row.label for rows in splits.values() for row in rows})
    warn_of_names_alike(labels, f"labels of {name!r}")
    if not columns.is_text and all(_WHOLE_NUMBER.fullmatch(label) for label in labels):
        labels, splits = _name_integers(name, labels, splits)
    train = splits.get("train", ())
    train_labels = {row.label for row in train}
    return RawTask(
        name,
        tuple(label for label in labels if label in train_labels),
        train,
        splits.get("dev"),
        splits.get("test", ()),
        source,
        has_free_answers=columns.answer is not None,
        definition=next(iter(instructions)) if columns.is_text and len(instructions) == 1 else "",
        has_instructions="" not in instructions,
        left_out=left_out,
        minus_one=minus_one,
    )


def _warn_of_labels(name: str, splits: Mapping[str, Sequence[LabeledRow]]) -> int:
    """Warn of labels that may be no classes; return how many rows have the doubtful label −1."""
    labels = [row.label for rows in splits.values() for row in rows]
    tables.warn_of_labels(labels, repr(name), tables.STREAM)
    if not is_doubtful(labels):
        return 0
    count = sum(map(is_minus_one, labels))
    warn_of_class(count, repr(name), tables.STREAM)
    return count


def _name_integers(
    name: str, labels: Sequence[str], splits: Mapping[str, Sequence[LabeledRow]]
) -> tuple[list[str], dict[str, tuple[LabeledRow, ...]]]:
    """Return integer classes by size, and the rows, with the name of their task before each."""
    classes = {label: f"{name}/{label.partition('.')[0]}" for label in labels}
    named = {split: tuple(row._replace(label=classes[row.label]) for row in rows) for split, rows in splits.items()}
    return sorted(dict.fromkeys(classes.values()), key=lambda label: int(label.removeprefix(f"{name}/"))), named


def _prepare_row(row: UserRow, columns: UserColumns, *, in_key: bool) -> LabeledRow:
    """Put the instruction before the texts; it identifies the row as well if the task has several."""
    key, text = TextKey.of((row.instruction, *row.texts) if in_key else row.texts), " ".join(row.texts)
    texts = (row.instruction, text) if row.instruction else row.texts
    if columns.is_text:
        definition, text = (row.instruction, text) if text.strip() else ("", row.instruction)
        texts = (text if columns.text == PROMPT else format_prompt(LONG_SEQUENCE, definition, text),)
    return LabeledRow(texts, row.label, key, row.answers)
