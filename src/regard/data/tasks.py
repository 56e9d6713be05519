"""The tasks of the paper, and a user's own, from files or the hub."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from regard.data import task_files
from regard.data.examples import Examples, Task, TaskKind
from regard.data.task_files import Columns, Row, Table
from regard.data.task_hub import read_hub
from regard.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TaskPreset:
    """How long a probe is trained, and on what: `rows` (train, validation) at most, None for all."""

    learning_rate: float
    batch_size: int
    epochs: int
    length: int
    rows: tuple[int | None, int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What is known of a task before it is read.

    `labels`: the classes in the order of their numbers; None where the training data says. `hub`: repository and
    configuration. `splits`: the names of training and validation there. `columns`: where they hold texts and label; for
    mlm the one column of running text. `folders`: what the folder with its files is called; `train` and `validation`:
    what the files are, the first found is read. `written`: the columns of those files, where they have names.
    """

    kind: TaskKind
    metric: str
    labels: tuple[str, ...] | None
    hub: tuple[str, str | None]
    splits: tuple[str, str] = ("train", "validation")
    columns: Columns | str
    folders: tuple[str, ...]
    train: tuple[str, ...] = ("train.tsv",)
    validation: tuple[str, ...] = ("dev.tsv",)
    written: Columns | None = None
    paper: TaskPreset
    laptop: TaskPreset = TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=64, rows=(1000, 500))


_GLUE = "nyu-mll/glue"
_CONLL: Mapping[str, Any] = {
    "kind": "token",
    "labels": None,
    "hub": ("lhoestq/conll2003", None),
    "folders": ("conll2003",),
    "train": ("train.txt", "eng.train"),
    "validation": ("valid.txt", "dev.txt", "eng.testa"),
}

_WIKITEXT: Mapping[str, Any] = {
    "kind": "mlm",
    "metric": "negative_log_perplexity",
    "labels": (),
    "hub": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "columns": "text",
    "folders": ("wikitext-103-raw", "wikitext-103", "wikitext-2-raw", "wikitext-2", "wikitext103", "wikitext2"),
    "train": ("wiki.train.raw", "wiki.train.tokens"),
    "validation": ("wiki.valid.raw", "wiki.valid.tokens"),
}

TASKS: Mapping[str, TaskSettings] = {
    "cola": TaskSettings(
        kind="sequence",
        metric="mcc",
        labels=("unacceptable", "acceptable"),
        hub=(_GLUE, "cola"),
        columns=Columns(("sentence",), "label"),
        folders=("CoLA",),
        written=Columns(("sentence",), "label", header=("source", "label", "mark", "sentence")),
        paper=TaskPreset(learning_rate=2e-5, batch_size=16, epochs=15, length=64),
        laptop=TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=32, rows=(1500, 600)),
    ),
    "sst2": TaskSettings(
        kind="sequence",
        metric="accuracy",
        labels=("negative", "positive"),
        hub=(_GLUE, "sst2"),
        columns=Columns(("sentence",), "label"),
        folders=("SST-2",),
        written=Columns(("sentence",), "label"),
        paper=TaskPreset(learning_rate=1e-4, batch_size=32, epochs=4, length=64),
        laptop=TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=48, rows=(1000, 500)),
    ),
    "mrpc": TaskSettings(
        kind="sequence",
        metric="f1",
        labels=("not_equivalent", "equivalent"),
        hub=(_GLUE, "mrpc"),
        columns=Columns(("sentence1", "sentence2"), "label"),
        folders=("MRPC",),
        written=Columns(("#1 String", "#2 String"), "Quality"),
        paper=TaskPreset(learning_rate=2e-5, batch_size=16, epochs=15, length=128),
        laptop=TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=96, rows=(1600, 408)),
    ),
    "mnli": TaskSettings(
        kind="sequence",
        metric="accuracy",
        labels=("entailment", "neutral", "contradiction"),
        hub=(_GLUE, "mnli"),
        splits=("train", "validation_mismatched"),
        columns=Columns(("premise", "hypothesis"), "label"),
        folders=("MNLI", "MNLI/original"),
        train=("train.tsv", "multinli_1.0_train.jsonl"),
        validation=("dev_mismatched.tsv", "multinli_1.0_dev_mismatched.jsonl"),
        written=Columns(("sentence1", "sentence2"), "gold_label"),
        paper=TaskPreset(learning_rate=2e-4, batch_size=8, epochs=4, length=256),
    ),
    "ner": TaskSettings(
        metric="entity_f1",
        columns=Columns(("tokens",), "ner_tags"),
        paper=TaskPreset(learning_rate=1e-4, batch_size=8, epochs=4, length=128),
        **_CONLL,
    ),
    "pos": TaskSettings(
        metric="token_f1",
        columns=Columns(("tokens",), "pos_tags"),
        paper=TaskPreset(learning_rate=5e-4, batch_size=8, epochs=4, length=128),
        **_CONLL,
    ),
    "mlm": TaskSettings(
        **_WIKITEXT,
        paper=TaskPreset(learning_rate=5e-4, batch_size=8, epochs=2, length=128),
    ),
    "lm": TaskSettings(
        **_WIKITEXT,
        paper=TaskPreset(learning_rate=5e-4, batch_size=8, epochs=2, length=128),
    ),
}
_HELD_OUT = ("wiki.test.raw", "wiki.test.tokens")  # what mlm validates on where there is no file to train on
TABLE_METRICS = ("accuracy", "f1", "mcc")


class _Splits(NamedTuple):
    """The tables of a task before their labels have numbers, and where they came from."""

    train: Table
    validation: Table
    source: str


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
) -> Task:
    """A task by its name in `TASKS`, or from a table of the user's own.

    `folder`: where its files lie, as published and packed with gzip or not. They are looked for in
    folder/glue/CoLA, folder/CoLA and folder itself, in this order and each name of `TaskSettings.folders` after the
    other; the first of these with a training file is read. WikiText without a file for training has its validation
    file for that, and its test file for validation; `source` says so. Without a folder the hub is read.

    A table is a file .jsonl, .csv, .tsv (no quotes) or .parquet. `text`: its column of texts ('text'), or two, 'a,b'.
    `label`: its column of labels ('label'), strings or whole numbers. `validation`: a second table; without it a
    fifth of the rows, drawn with `seed`, none of them the last of its label. `metric`: accuracy, f1 or mcc. Its
    classes are the labels of the training rows: numbers by size, then names by alphabet.

    `rows`: at most so many for training and validation, None for all, drawn with `seed`, in the order of the file,
    fewer being a part of more; of running text a stretch of that many lines.

    Raises UserError for names, files, columns and labels that are not there or not as they should be.
    """
    if rows is not None and any(count is not None and count < 1 for count in rows):
        raise UserError(f"rows: expected at least 1 for training and 1 for validation, got {rows[0]} and {rows[1]}")
    if task_files.is_table(name):
        if folder is not None:
            raise UserError(f"folder: expected none with a file of your own ({name}), got {folder}")
        settings = None
        splits = _own(Path(name), _columns(text, label), validation, seed)
    else:
        settings = _settings(name)
        if any(given is not None for given in (text, label, validation, metric)):
            raise UserError(f"task: expected text, label, validation and metric with a file only, got them with {name}")
        splits = _from_hub(settings) if folder is None else _from_folder(name, settings, Path(folder))
    kind = settings.kind if settings else "sequence"
    names = settings.labels if settings else None
    numbered, known = _numbers(names, splits.train)
    train, held_out = (
        _drawn(_examples(table, known), rows and rows[part], kind, seed)
        for part, table in enumerate((splits.train, splits.validation))
    )
    return Task(
        name=name if settings else Path(name).name,
        kind=kind,
        labels=numbered,
        metric=settings.metric if settings else _metric(metric, numbered),
        train=train,
        validation=held_out,
        source=splits.source,
        sha256=_digest(numbered, train, held_out),
    )


def _settings(name: str) -> TaskSettings:
    """The settings of a task by name."""
    if name not in TASKS:
        allowed = f"{', '.join(TASKS)}, or a file ({task_files.suffixes()})"
        raise UserError(f"task: expected one of {allowed}; got '{name}'")
    return TASKS[name]


def _columns(text: str | None, label: str | None) -> Columns:
    """The columns of a user's table."""
    texts = tuple(part.strip() for part in (text or "text").split(","))
    if len(texts) > 2 or not all(texts):
        raise UserError(f"text: expected one column or two apart by a comma, got '{text}'")
    return Columns(texts, label or "label")


def _metric(metric: str | None, labels: Sequence[str]) -> str:
    """The metric of a user's table."""
    if metric is not None and metric not in TABLE_METRICS:
        raise UserError(f"metric: expected one of {', '.join(TABLE_METRICS)}, got '{metric}'")
    if metric == "f1" and len(labels) != 2:
        raise UserError(f"metric: expected two classes for f1, got {len(labels)}")
    return metric or "accuracy"


def _own(path: Path, columns: Columns, validation: str | Path | None, seed: int) -> _Splits:
    """A user's table, with its second one or a fifth of it held out."""
    table = task_files.read_table(path, columns)
    if validation is not None:
        return _Splits(table, task_files.read_table(Path(validation), columns), f"{path}, {validation}")
    held_out = _held_out(table.rows, seed)
    if not held_out:
        raise UserError(
            f"task: expected two rows with one label in {path}, to hold one out for validation; there are none"
        )
    parts = ([row for at, row in enumerate(table.rows) if (at in held_out) is part] for part in (False, True))
    train, rest = (Table(str(path), tuple(part), table.unit) for part in parts)
    return _Splits(train, rest, f"{path}, {len(rest.rows)} rows held out with seed {seed}")


def _held_out(rows: Sequence[Row], seed: int) -> set[int]:
    """The numbers of a fifth of the rows, at least one, drawn so that each label stays with a row to train on."""
    left = Counter(row.label for row in rows)
    chosen: set[int] = set()
    for at in _order(len(rows), seed):
        if len(chosen) < max(1, len(rows) // 5) and left[rows[at].label] > 1:
            chosen.add(at)
            left[rows[at].label] -= 1
    return chosen


def _from_hub(settings: TaskSettings) -> _Splits:
    """Both splits of a task from the hub."""
    train, validation = (read_hub(*settings.hub, split, settings.columns) for split in settings.splits)
    return _Splits(train, validation, f"{train.name}, {validation.name}")


def _from_folder(name: str, settings: TaskSettings, folder: Path) -> _Splits:
    """Both tables of a task from the files below a folder."""
    if not folder.is_dir():
        raise UserError(f"task: expected a folder with the files of {name}, there is no {folder}")
    places = [folder / above / below for above in ("glue", "") for below in settings.folders] + [folder]
    choices = [(settings.train, settings.validation)]
    if settings.kind == "mlm":
        choices.append((settings.validation, _HELD_OUT))
    for train, validation in choices:
        for place in places:
            if (first := _found(place, train)) is None:
                continue
            if (second := _found(place, validation)) is None:
                raise UserError(f"task: expected {' or '.join(validation)} (.gz) beside {first}, there is none")
            instead = ", no file for training" if train is not settings.train else ""
            source = f"{first} (training), {second} (validation){instead}"
            return _Splits(_read(name, settings, first), _read(name, settings, second), source)
    looked = ", ".join(settings.folders)
    raise UserError(
        f"task: expected {' or '.join(settings.train)} (.gz) in {folder} or below, in glue/ or {looked}; none is"
    )


def _found(place: Path, names: Sequence[str]) -> Path | None:
    """The first of the files that is there, unpacked before packed."""
    paths = (place / (name + packed) for name in names for packed in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _read(name: str, settings: TaskSettings, path: Path) -> Table:
    """The rows of one published file."""
    if settings.kind == "token":
        return task_files.read_conll(path, name)
    if settings.kind == "mlm":
        return task_files.read_lines(path)
    assert settings.written is not None, f"{name} does not say how its files are written"
    return task_files.read_sentences(path, settings.written)


def _numbers(names: tuple[str, ...] | None, train: Table) -> tuple[tuple[str, ...], dict[str, int]]:
    """The classes in the order of their numbers, and the number of each by every name it may be written with.

    Known classes may be written as their numbers, as GLUE does. Others come from the training rows: O first, then
    whole numbers by size, then names by alphabet.
    """
    if names is not None:
        return names, {written: at for at, name in enumerate(names) for written in (str(at), name)}
    found = {name for row in train.rows for name in ([row.label] if isinstance(row.label, str) else row.label or ())}
    ordered = tuple(sorted(found, key=_sort_key))
    if len(ordered) < 2:
        raise UserError(f"task: expected at least two classes in {train.name}, got {', '.join(ordered)}")
    return ordered, {name: at for at, name in enumerate(ordered)}


def _sort_key(name: str) -> tuple[bool, bool, int, str]:
    """O, then whole numbers by size, then names."""
    whole = name.removeprefix("-").isdecimal()
    return name != "O", not whole, int(name) if whole else 0, name


def _examples(table: Table, known: Mapping[str, int]) -> Examples:
    """The rows with numbers for labels; none for running text."""
    texts = tuple(row.texts for row in table.rows)
    if table.rows[0].label is None:
        return Examples(texts=texts, labels=())
    labels: list[int | tuple[int, ...]] = []
    for row in table.rows:
        written = (row.label,) if isinstance(row.label, str) else row.label or ()
        unknown = [name for name in written if name not in known]
        if unknown:
            allowed = ", ".join(list(known)[:12]) + (", …" if len(known) > 12 else "")
            raise UserError(f"task: expected a label of {allowed} in {table.place(row)}; got '{unknown[0]}'")
        numbers = tuple(known[name] for name in written)
        labels.append(numbers[0] if isinstance(row.label, str) else numbers)
    return Examples(texts=texts, labels=tuple(labels))


def _drawn(examples: Examples, most: int | None, kind: TaskKind, seed: int) -> Examples:
    """At most so many examples in their order; a stretch of running text."""
    count = len(examples)
    if most is None or most >= count:
        return examples
    if kind == "mlm":
        start = random.Random(seed).randrange(count - most + 1)
        return Examples(texts=examples.texts[start : start + most], labels=())
    chosen = sorted(_order(count, seed)[:most])
    return Examples(
        texts=tuple(examples.texts[at] for at in chosen), labels=tuple(examples.labels[at] for at in chosen)
    )


def _order(count: int, seed: int) -> list[int]:
    """The numbers up to `count` in an order that the seed gives."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _digest(labels: tuple[str, ...], *parts: Examples) -> str:
    """The sha256 over the classes and all texts and labels, each part and example apart from the next."""
    digest = hashlib.sha256(json.dumps(labels).encode())
    for part in parts:
        digest.update(f"\n{len(part)}\n".encode())
        for at, texts in enumerate(part.texts):
            digest.update(json.dumps([texts, part.labels[at] if part.labels else None]).encode() + b"\n")
    return digest.hexdigest()
