"""Streams of tasks for continual learning: classification tasks, text-to-text tasks, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args

from regard.data.examples import Examples
from regard.errors import UserError, check_choice

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
Protocol = Literal["clean", "paper"]
Metric = Literal[
    "rouge-l", "rouge-l-unicode", "exact-match", "exact-match-unicode", "accuracy", "choice", "edit-similarity", "sari"
]
METRICS: tuple[Metric, ...] = get_args(Metric)
Rows = TypeVar("Rows")


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """Inputs and their correct answers; the first answer of each input is trained on."""

    inputs: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise UserError(f"pairs: expected answers to {len(self.inputs)} inputs, got answers to {len(self.targets)}")
        targets: tuple[Any, ...] = self.targets
        for row, answers in enumerate(targets):
            if isinstance(answers, str) or not answers or not all(answer.strip() for answer in answers):
                expected = f"a tuple of answers, none of them empty, in row {row}"
                raise UserError(f"pairs: expected {expected}, got {answers!r}")

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        """Say how many there are, without their text."""
        return f"TextPairs({len(self)} rows)"


@dataclass(frozen=True, kw_only=True)
class _StreamTask(Generic[Rows]):
    """The splits of a task, where their rows come from, and the hash of the rows of each split."""

    name: str
    train: Rows
    dev: Rows
    test: Rows
    source: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def split(self, name: Split) -> Rows:
        return getattr(self, name)

    def all_texts(self) -> Iterator[str]:
        """Iterate over the texts of all rows, also prompts and answers."""
        for split in SPLITS:
            rows: Any = self.split(split)
            if isinstance(rows, TextPairs):
                yield from rows.inputs
                yield from (answer for answers in rows.targets for answer in answers)
            else:
                yield from (text for texts in rows.texts for text in texts)


@dataclass(frozen=True, kw_only=True)
class ClassificationTask(_StreamTask[Examples]):
    """A task of classification; `labels` are the class names in the order of their indices."""

    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextTask(_StreamTask[TextPairs]):
    """A text-to-text task, with complete prompts as inputs."""

    metric: Metric  # how answers are scored
    definition: str = ""  # instruction of the task, which is part of every prompt
    labels: tuple[str, ...] = ()  # possible answers; empty if answers are free
    kind: str = ""  # category of the task in its collection, such as "dialogue" or "summarisation"

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Tasks in training order, all of classification or all text to text."""

    name: str
    tasks: tuple[ClassificationTask | TextTask, ...]
    order: tuple[int, ...]  # for each task its index in the published order
    seed: int  # of sampled rows and of a random order
    protocol: Protocol = "clean"
    metadata: Mapping[str, Any] = field(default_factory=dict)  # how it was made: dropped rows, overlaps, files

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if not names:
            raise UserError("stream: expected at least one task, got none")
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise UserError(f"stream: expected tasks of different names, {duplicate!r} is there twice")
        if len({isinstance(task, TextTask) for task in self.tasks}) > 1:
            raise UserError("stream: expected tasks of one sort, got some of classification and some from text to text")
        check_order(self.order, len(names))

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def text(self) -> bool:
        return isinstance(self.tasks[0], TextTask)

    def all_texts(self) -> Iterator[str]:
        """Iterate over the texts of all rows, also prompts and answers."""
        for task in self.tasks:
            yield from task.all_texts()

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Classes of all tasks in order; classes with the same name are one class. Empty for text-to-text tasks."""
        if self.text:
            return ()
        return tuple(dict.fromkeys(label for task in self.tasks for label in task.labels))

    def class_indices(self, task: int) -> tuple[int, ...]:
        """Return the index in `classes` of each label of a task."""
        if self.text:
            raise UserError(f"stream: expected tasks of classification, those of {self.name!r} are from text to text")
        return tuple(self.classes.index(label) for label in self.tasks[task].labels)

    def reorder(self, order: Sequence[int]) -> Stream:
        """Return the stream in another order, given by indices in the published order."""
        by_index = dict(zip(self.order, self.tasks, strict=True))
        check_order(order, len(self))
        return replace(self, tasks=tuple(by_index[index] for index in order), order=tuple(order))


def check_order(order: Sequence[int], count: int) -> None:
    """Raise UserError if an order does not have each of `count` tasks once."""
    if any(isinstance(index, bool) or not isinstance(index, int) for index in order):
        raise UserError(f"order: expected numbers of tasks, got {list(order)!r}")
    if sorted(order) != list(range(count)):
        text = "-".join(map(str, order)) or "none"
        raise UserError(f"order: expected each number from 0 to {count - 1} once, got {text}")
