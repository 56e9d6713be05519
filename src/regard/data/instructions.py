"""Readers of tasks with instructions: a folder of train, dev and test for each task, one file a task, or the hub."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.data import task_files
from regard.data.instruction_settings import Benchmark, InstructionTask, SheetForm
from regard.data.splits import RESERVED_SPLIT, RawTask, Sample, Samples, divide_rows, key_of
from regard.data.task_files import NO_GOLD_LABEL, STREAM, Columns
from regard.data.task_hub import read_hub
from regard.errors import UserError

HELD_OUT_TEST = 0.2
"""The share of each class of the only file of a task that is held out of it to test on."""
ONE_FILE = (0.1, 0.1)
"""The shares of dev and test of a task in one file."""
_SEED = 0
"""Rows held out of a file are the same whatever the seed of a stream."""
_NAMES = ("train", "dev", "test")
_KINDS = {
    "dialogue generation": "dialogue",
    "summarization": "summarisation",
    "basic sentiment analysis": "sentiment",
    "sentiment analysis": "sentiment",
}


class Info(NamedTuple):
    """What a task from text to text is beside its rows."""

    definition: str
    kind: str


class SplitReader(NamedTuple):
    """A task as read; `files` tells what was found in its files, and what became of it."""

    raw: RawTask
    info: Info
    files: Mapping[str, Any]


class Sheet(NamedTuple):
    """A file of a task: what it says of itself, and its inputs with their answers.

    `unanswered`: how many rows had none, and were left out; `sha256` is that of the file.
    """

    path: Path
    info: Info
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    unanswered: int
    sha256: str


def read_sheet(path: Path) -> Sheet:
    """A file with a Definition and Instances of input and output, the latter a text or a list of texts.

    Raises UserError for a file that is none, an input that is empty, and where no row has an answer.
    """
    try:
        said = json.loads("\n".join(task_files.lines_of(path, STREAM)))
        written = [(row["input"], row["output"]) for row in said["Instances"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"stream: expected JSON with 'Instances' of 'input' and 'output' in {path}: {error!r}"
        ) from None
    rows = [_written(*row, f"{path}, row {number}") for number, row in enumerate(written, start=1)]
    answered = tuple(row for row in rows if row[1])
    if not answered:
        raise UserError(f"stream: expected rows with an answer in {path}, got {len(rows)} rows and none with one")
    info = Info(_first(said.get("Definition"), path).strip(), _kind(_first(said.get("Categories"), path)))
    return Sheet(path, info, answered, len(rows) - len(answered), hashlib.sha256(path.read_bytes()).hexdigest())


def files_of(folder: Path, benchmark: Benchmark, name: str) -> dict[str, Path]:
    """The files of a task by split, or one as 'all'; none where there are none."""
    for root in roots(folder, benchmark):
        found = {split: file for split in _NAMES if (file := _there(root / name / f"{split}.json")) is not None}
        if found:
            return found
        if (file := _there(root / f"{name}.json")) is not None:
            return {"all": file}
    return {}


def _there(path: Path) -> Path | None:
    """The file, or its packed form; None where there is neither."""
    return next((one for one in (path, path.with_name(f"{path.name}.gz")) if one.is_file()), None)


def roots(folder: Path, benchmark: Benchmark) -> tuple[Path, ...]:
    """Where the tasks of a benchmark may lie below a folder."""
    return folder / "CL_Benchmark" / benchmark.folder, folder / benchmark.folder, folder / "tasks", folder


def read_task(
    name: str,
    files: Mapping[str, Path],
    benchmark: Benchmark,
    *,
    task_type: SheetForm = "generation",
    definitions: bool = False,
) -> SplitReader:
    """A task from its files, `definitions` before the texts where it is read as classification.

    dev is left to be held out of train where all its rows are test rows. Where there is no test file, the dev file is
    it, since both are the same as published; where there is but one file, a fifth of each class is held out of it to
    test on, of rows that share their first part all or none. A file of all rows is divided: a tenth is dev, a tenth
    test.

    Raises UserError for files that are not as they should be, and answers that the task does not have.
    """
    sheets = {split: read_sheet(path) for split, path in files.items()}
    info = next(iter(sheets.values())).info
    task = benchmark.tasks.get(name)
    make = _free(benchmark, info) if task is None else _labelled(task, benchmark, info, task_type, definitions)
    rows = {split: _samples(sheet, make) for split, sheet in sheets.items()}
    if empty := next((split for split, found in rows.items() if not found), None):
        raise UserError(f"stream: expected rows with a label in {files[empty]}, got none")
    splits = _splits(name, rows, _groups(task, sheets.values()))
    labels = (RESERVED_SPLIT,) if task is None else task.labels
    raw = RawTask(
        name=name,
        labels=labels,
        train=splits.train,
        dev=splits.dev,
        test=splits.test,
        source=f"{', '.join(str(path) for path in files.values())} ({splits.evaluated})",
        free=task is None,
    )
    return SplitReader(raw, info, _record(sheets, rows, splits.evaluated))


def read_hub_task(task: InstructionTask) -> SplitReader:
    """A task of classification from the hub."""
    hub = task.hub
    known = {str(at): label for at, label in enumerate(task.labels)} | {label: label for label in task.labels}
    known |= dict(zip(hub.names, task.labels, strict=bool(hub.names)))
    found = []
    for split in hub.splits:
        table = read_hub(*hub.place, split, Columns(hub.columns, hub.label), asked=STREAM)
        samples = []
        for row in table.rows:
            if row.label not in known:
                raise UserError(
                    f"stream: expected a class of {', '.join(known)} in {table.place(row)}, got {row.label!r}"
                )
            parts = tuple(part or "" for part in row.texts)
            texts = tuple(made.format(*parts) for made in hub.texts or task.texts)
            samples.append(Sample(texts, known[row.label], _key(task, parts)))
        found.append(tuple(samples))
    source = f"{'/'.join(part for part in hub.place if part)} ({hub.splits[0]}, {hub.splits[1]}: {hub.evaluated})"
    raw = RawTask(name=task.name, labels=task.labels, train=found[0], dev=None, test=found[1], source=source)
    return SplitReader(raw, Info("", ""), {"evaluated": hub.evaluated})


def check_labels(name: str, labels: Sequence[str]) -> None:
    """Nothing, or a UserError: two labels of a task are the same text but for letter case, punctuation and spaces."""
    seen: dict[str, str] = {}
    for label in labels:
        bare = "".join(sign for sign in unicodedata.normalize("NFKC", label).casefold() if sign.isalnum())
        if bare in seen:
            same = f"{seen[bare]!r} and {label!r} are the same but for case, punctuation and spaces"
            raise UserError(f"labels: expected labels of {name!r} that differ in words, {same}")
        seen[bare] = label


# -- rows -----------------------------------------------------------------------------------------------

_Make = Callable[[str, tuple[str, ...], str], Sample | None]
"""A sample of an input, its answers and its place; None for one without a gold label."""


class _Splits(NamedTuple):
    train: Samples
    dev: Samples | None
    test: Samples
    evaluated: str


def _samples(sheet: Sheet, make: _Make) -> Samples:
    made = (make(*row, f"{sheet.path}, {row[0]!r:.40}") for row in sheet.rows)
    return tuple(sample for sample in made if sample is not None)


def _free(benchmark: Benchmark, info: Info) -> _Make:
    """Samples whose answers are free."""

    def make(written: str, answers: tuple[str, ...], place: str) -> Sample:
        return Sample((prompt(benchmark, info.definition, written),), RESERVED_SPLIT, key_of((written,)), answers)

    return make


def _labelled(
    task: InstructionTask, benchmark: Benchmark, info: Info, task_type: SheetForm, definitions: bool
) -> _Make:
    """Samples of a task with labels: texts for an encoder, or a prompt and its answer."""
    pattern = re.compile(task.parts, re.DOTALL)

    def make(written: str, answers: tuple[str, ...], place: str) -> Sample | None:
        label = answers[0]
        if label == NO_GOLD_LABEL:
            return None
        if label not in task.labels or len(answers) > 1:
            raise UserError(f"stream: expected one answer of {', '.join(task.labels)} in {place}, got {answers!r}")
        if (match := pattern.match(written)) is None:
            raise UserError(f"stream: expected the parts of an input of {task.name} in {place}: {task.parts!r}")
        key = _key(task, match.groups())
        if task_type == "generation":
            return Sample((prompt(benchmark, info.definition, written),), label, key, answers)
        texts = tuple(made.format(*match.groups()) for made in task.texts)
        if definitions and info.definition:
            texts = (info.definition, " ".join(texts))
        return Sample(texts, label, key)

    return make


def prompt(benchmark: Benchmark, definition: str, written: str) -> str:
    """The complete prompt, as a model reads it."""
    if not definition:
        return benchmark.headless.format(input=written)
    return benchmark.prompt.format(definition=definition, input=written)


def _key(task: InstructionTask, parts: Sequence[str]) -> str:
    return key_of(parts[-1:] if task.body and parts[-1].strip() else parts)


def _splits(name: str, rows: Mapping[str, Samples], groups: Mapping[str, str]) -> _Splits:
    """What is trained on and tested on, from the files that there are."""
    held_out = f"{HELD_OUT_TEST:.0%} of {'the rows, by their first parts,' if groups else 'each class'} of the"
    if "all" in rows:
        train, dev, test = divide_rows(rows["all"], ONE_FILE, _SEED, repr(name))
        return _Splits(train, dev, test, f"{ONE_FILE[1]:.0%} of the only file")
    if len(rows) == 1:
        ((only, found),) = rows.items()
        train, test = _held_out(name, found, groups)
        return _Splits(train, None, test, f"{held_out} {only} file, the only one")
    if "train" not in rows:
        train, test = _held_out(name, rows["test"], groups)
        return _Splits(train, None, test, f"{held_out} test file, there is no train file")
    if "test" not in rows:
        return _Splits(rows["train"], None, rows["dev"], "the dev file, there is no test file")
    tested = {row.key for row in rows["test"]}
    dev = rows.get("dev", ())
    own = any(row.key not in tested for row in dev)
    return _Splits(rows["train"], dev if own else None, rows["test"], "the test file")


def _held_out(name: str, rows: Samples, groups: Mapping[str, str]) -> tuple[Samples, Samples]:
    """The rows without a fifth of each class, and those; of rows in groups whole groups."""
    if not groups:
        train, test = divide_rows(rows, (HELD_OUT_TEST,), _SEED, repr(name))
        return train, test
    sizes = Counter(groups[row.key] for row in rows)
    chosen: set[str] = set()
    for group in sorted(sizes, key=lambda group: hashlib.sha256(f"groups {_SEED} {group}".encode()).digest()):
        if sum(sizes[one] for one in chosen) >= HELD_OUT_TEST * len(rows):
            break
        chosen.add(group)
    parts = (tuple(row for row in rows if (groups[row.key] in chosen) == held) for held in (False, True))
    train, test = parts
    return train, test


def _groups(task: InstructionTask | None, sheets: Iterable[Sheet]) -> dict[str, str]:
    """The group of each row by its key, where rows share their first part."""
    if task is None or not task.grouped:
        return {}
    pattern = re.compile(task.parts, re.DOTALL)
    matches = (match for sheet in sheets for written, _ in sheet.rows if (match := pattern.match(written)))
    return {_key(task, match.groups()): key_of(match.groups()[:1]) for match in matches}


def _record(sheets: Mapping[str, Sheet], rows: Mapping[str, Samples], evaluated: str) -> dict[str, Any]:
    """What the files hold and have in common, before anything is divided or dropped."""
    keys = {split: {row.key for row in rows.get(split, ())} for split in _NAMES}

    def shared(split: str, other: str) -> int:
        return sum(row.key in keys[other] for row in rows.get(split, ()))

    both = "dev" in sheets and "test" in sheets
    return {
        "evaluated": evaluated,
        "rows": {split: len(found) for split, found in rows.items()},
        "no_gold_label": {split: len(sheet.rows) - len(rows[split]) for split, sheet in sheets.items()},
        "no_answer": {split: sheet.unanswered for split, sheet in sheets.items()},
        "identical_dev_test": sheets["dev"].sha256 == sheets["test"].sha256 if both else None,
        "dev_in_test": shared("dev", "test"),
        "train_in_dev": shared("train", "dev"),
        "train_in_test": shared("train", "test"),
    }


def _written(said: Any, output: Any, place: str) -> tuple[str, tuple[str, ...]]:
    """The input and its answers, those that are empty left out."""
    answers = [output] if isinstance(output, str) else output
    if not isinstance(said, str) or not said.strip():
        raise UserError(f"stream: expected text as input in {place}, got {said!r}")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"stream: expected a text or a list of texts as output in {place}, got {output!r}")
    return said, tuple(answer for answer in answers if answer.strip())


def _first(said: Any, path: Path) -> str:
    """A text, or the first of a list of texts; '' where there is none."""
    found = (said[0] if said else "") if isinstance(said, list) else "" if said is None else said
    if not isinstance(found, str):
        raise UserError(f"stream: expected text, or a list of texts, in the head of {path}, got {said!r}")
    return found


def _kind(category: str) -> str:
    return _KINDS.get(category.strip().casefold(), category.strip().casefold())
