"""Rows of stream tasks: their texts and labels, hashes that identify and rank them, and tasks made of them."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from regard.data.examples import Examples
from regard.data.stream import SPLITS, ClassificationTask, Metric, Split, Stream, TextPairs, TextTask
from regard.errors import UserError

FREE_ANSWER = "any answer"  # the class of all rows of a task with free answers
_NON_WORD = re.compile(r"[\W_]+")


class TextKey(NamedTuple):
    """What identifies the text of a row: rows with the same key have the same text."""

    words: str  # from `hash_words`; rows are ranked by it, and near copies share it
    text: str  # from `hash_text`

    @classmethod
    def of(cls, texts: Sequence[str], *, match_last: bool = False) -> TextKey:
        """Make the key of all texts, or by `match_last` of the last unless it is blank."""
        if match_last and texts[-1].strip():
            texts = texts[-1:]
        text = _normalize(texts)
        return cls(_hash(_keep_words(text)), _hash(text))


class LabeledRow(NamedTuple):
    """One row of a task."""

    texts: tuple[str, ...]
    label: str  # class name
    key: TextKey
    answers: tuple[str, ...] = ()  # correct answers of a text-to-text row

    @classmethod
    def of(cls, texts: Iterable[str], label: str) -> LabeledRow:
        texts = tuple(texts)
        return cls(texts, label, TextKey.of(texts))


LabeledRows = tuple[LabeledRow, ...]


@dataclass(frozen=True)
class RawTask:
    """A task as rows: as read, and after rows are dropped and sampled."""

    name: str
    labels: tuple[str, ...]
    train: LabeledRows
    dev: LabeledRows | None  # None if dev rows have to be held out of train
    test: LabeledRows
    source: str
    has_free_answers: bool = False  # answers are no classes; all rows have the class `FREE_ANSWER`
    definition: str = ""  # instruction of a text-to-text task, if all rows have the same
    has_instructions: bool = False  # whether rows of a user's own task have one
    kind: str = ""  # category of a text-to-text task
    files: Mapping[str, Any] = field(default_factory=dict)  # what the files contain, and how they were divided
    overlaps: dict[str, int] = field(default_factory=dict)  # what the splits had in common before rows were dropped
    left_out: int = 0  # rows of a user's own task that were left out: no label or no text
    minus_one: int = 0  # rows whose label −1 is taken as a class, although it may mark rows without one

    def __post_init__(self) -> None:
        if len(self.labels) < 2 and not self.has_free_answers:
            labels = ", ".join(map(repr, self.labels)) or "none"
            raise UserError(f"stream: expected at least two classes in {self.name!r}, got {labels} ({self.source})")
        for name, rows in (("train", self.train), ("dev", self.dev), ("test", self.test)):
            if rows is not None and not rows:
                why = f", {self.left_out} rows of the task have no label or no text" if self.left_out else ""
                expected = f"expected rows in the {name} split of {self.name!r}"
                raise UserError(f"stream: {expected}, got none ({self.source}{why})")
        if len({len(row.texts) for rows in self.by_split().values() for row in rows}) > 1:
            raise UserError(f"stream: expected one text in each row of {self.name!r}, or two in each, got both")
        train_labels = {row.label for row in self.train}
        later = [row.label for row in (*(self.dev or ()), *self.test)]
        if unknown := sorted(set(later) - train_labels):
            allowed = ", ".join(self.labels[:12]) + (", …" if len(self.labels) > 12 else "")
            got = f"{unknown[0]!r} beside it" + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
            where = f" in {sum(label not in train_labels for label in later)} of {len(later)} rows of dev and test"
            why = describe_numbers([*later, *(row.label for row in self.train)])
            raise UserError(f"stream: expected labels of train ({allowed}) in {self.name!r}, got {got}{where}{why}")
        missing = [label for label in self.labels if label not in train_labels]
        if missing:
            raise UserError(f"stream: expected rows of {missing[0]!r} in the train split of {self.name!r}, got none")

    def by_split(self) -> dict[str, LabeledRows]:
        """Return the rows of each split; a missing dev split has none."""
        return {"train": self.train, "dev": self.dev or (), "test": self.test}


NUMBER = re.compile(r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?")  # also with a decimal comma
WHOLE = re.compile(r"[-+]?\d+([.,]0*)?")


def describe_numbers(labels: Sequence[str]) -> str:
    """Say that labels are measurements rather than classes: decimal numbers, or numbers most of which differ."""
    names, numbers = set(labels), {label.rpartition("/")[2] for label in labels}
    is_decimal = not all(map(WHOLE.fullmatch, numbers))
    if not all(map(NUMBER.fullmatch, numbers)) or not (is_decimal or 2 * len(names) > len(labels)):
        return ""
    told = f"{len(names)} different numbers as labels of {len(labels)} rows"
    return f": {told}, each a class of its own; regression is not served"


def hash_text(texts: Sequence[str]) -> str:
    """Hash texts without regard to case, spaces and Unicode form."""
    return _hash(_normalize(texts))


def hash_words(texts: Sequence[str]) -> str:
    """Hash texts without regard to punctuation and signs either, unless there is nothing else."""
    return _hash(_keep_words(_normalize(texts)))


def hash_rows(rows: Examples | TextPairs) -> list[str]:
    """Hash the text of each row, as `hash_text`."""
    return [hash_text(texts) for texts in (rows.texts if isinstance(rows, Examples) else zip(rows.inputs))]


def _keep_words(text: str) -> str:
    if text.isascii():
        words = _NON_WORD.sub(" ", text)
    else:  # keep letters, marks and digits
        words = "".join(sign if unicodedata.category(sign)[0] in "LMN" else " " for sign in text)
    return " ".join(words.split()) or text


def _normalize(texts: Sequence[str]) -> str:
    return " ".join(unicodedata.normalize("NFKC", " ".join(texts)).casefold().split())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def hash_rank(purpose: str, seed: int, key: object) -> bytes:
    """Return a hash to sort by: a random order that does not depend on the other keys."""
    return hashlib.sha256(f"{purpose} {seed} {key}".encode()).digest()


def make_classification_task(raw: RawTask) -> ClassificationTask:
    """Make a task of rows, with class indices for labels."""
    index = {label: number for number, label in enumerate(raw.labels)}
    examples: dict[str, Any] = {
        split: Examples(texts=tuple(row.texts for row in rows), labels=tuple(index[row.label] for row in rows))
        for split, rows in raw.by_split().items()
    }
    return _add_hashes(ClassificationTask(name=raw.name, labels=raw.labels, source=raw.source, **examples))


def make_text_task(raw: RawTask, metric: Metric) -> TextTask:
    """Make a text-to-text task of rows."""
    fields: dict[str, Any] = {
        split: TextPairs(inputs=tuple(row.texts[0] for row in rows), targets=tuple(row.answers for row in rows))
        for split, rows in raw.by_split().items()
    }
    labels = () if raw.has_free_answers else raw.labels
    fields |= {"definition": raw.definition, "kind": raw.kind, "source": raw.source}
    return _add_hashes(TextTask(name=raw.name, metric=metric, labels=labels, **fields))


def add_row_hashes(stream: Stream) -> Stream:
    """Add the hash of each split, by which a resumed run recognizes its stream."""
    return replace(stream, tasks=tuple(_add_hashes(task) for task in stream.tasks))


_Task = TypeVar("_Task", bound=ClassificationTask | TextTask)


def _add_hashes(task: _Task) -> _Task:
    return replace(task, sha256={split: _hash_split(task, split) for split in SPLITS})


def _hash_split(task: ClassificationTask | TextTask, split: Split) -> str:
    """Return the SHA-256 of texts and answers, or else class names, in order."""
    rows: Iterable[tuple[Any, Any]]
    if isinstance(task, TextTask):
        pairs = task.split(split)
        rows = (((text,), answers) for text, answers in zip(pairs.inputs, pairs.targets, strict=True))
    else:
        examples, names = task.split(split), dict(enumerate(task.labels))
        labels = (names.get(label, repr(label)) for label in examples.labels)
        rows = zip(examples.texts, labels, strict=True)
    digest = hashlib.sha256()
    for texts, answer in rows:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"stream: expected a tuple of texts in each row, {task.name} {split} has {texts!r}")
        digest.update(json.dumps([texts, answer]).encode() + b"\n")
    return digest.hexdigest()
