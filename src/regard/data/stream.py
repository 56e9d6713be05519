"""What continual learning learns from: tasks that come one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from regard.data.examples import Examples
from regard.errors import UserError, check_choice

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
Protocol = Literal["clean", "paper"]


@dataclass(frozen=True, kw_only=True)
class ClassificationTask:
    """A task of classification: its examples, and the names of its classes, of which a label is the number.

    `source` says where the rows came from; `sha256` has a hash of each split's rows.
    """

    name: str
    labels: tuple[str, ...]
    train: Examples
    dev: Examples
    test: Examples
    source: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def split(self, name: Split) -> Examples:
        """The examples of a split."""
        found: Examples = getattr(self, name)
        return found


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Tasks in the order in which they come, all of classification or all from text to text.

    `order`: for each task its number among the tasks as published; `seed`: what rows, and an order that is not given,
    were drawn with; `record`: what else is known of how it was made (rows dropped, overlaps, files).
    """

    name: str
    tasks: tuple[ClassificationTask | TextTask, ...]
    order: tuple[int, ...]
    seed: int
    protocol: Protocol = "clean"
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there are tasks, each once, and an order of them."""
        names = [task.name for task in self.tasks]
        if not names:
            raise UserError("stream: expected at least one task, got none")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"stream: expected tasks with names of their own, {twice!r} is there twice")
        if len({isinstance(task, TextTask) for task in self.tasks}) > 1:
            raise UserError("stream: expected tasks of one sort, got some of classification and some from text to text")
        if sorted(self.order) != list(range(len(names))):
            raise UserError(f"order: expected each number from 0 to {len(names) - 1} once, got {_told(self.order)}")

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def text(self) -> bool:
        """Whether the tasks are from text to text."""
        return isinstance(self.tasks[0], TextTask)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The classes of all tasks in the order in which they come; those with the same name are the same class.

        None of tasks from text to text, whose labels are answers.
        """
        if self.text:
            return ()
        return tuple(dict.fromkeys(label for task in self.tasks for label in task.labels))

    def class_numbers(self, task: int) -> tuple[int, ...]:
        """For each label of a task its number among the classes of the stream.

        Raises UserError for tasks from text to text.
        """
        if self.text:
            raise UserError(f"stream: expected tasks of classification, those of {self.name!r} are from text to text")
        return tuple(self.classes.index(label) for label in self.tasks[task].labels)

    def ordered(self, order: Sequence[int]) -> Stream:
        """The stream with its tasks in another order, given by their numbers as published."""
        by_number = dict(zip(self.order, self.tasks, strict=True))
        if sorted(order) != sorted(by_number):
            raise UserError(f"order: expected each number from 0 to {len(self) - 1} once, got {_told(order)}")
        return replace(self, tasks=tuple(by_number[number] for number in order), order=tuple(order))


def _told(order: Sequence[int]) -> str:
    return ",".join(map(str, order)) or "none"


Metric = Literal["rouge-l", "exact-match"]


METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """The rows of a split: inputs, and for each the answers that are right, of which the first is trained on.

    Raises UserError where an input has no answer, an answer is empty, or there is another number of them.
    """

    inputs: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        """Check that each input has an answer."""
        if len(self.inputs) != len(self.targets):
            raise UserError(f"pairs: expected answers to {len(self.inputs)} inputs, got answers to {len(self.targets)}")
        targets: tuple[Any, ...] = self.targets
        for at, answers in enumerate(targets):
            if isinstance(answers, str) or not answers or not all(answer.strip() for answer in answers):
                raise UserError(f"pairs: expected a tuple of answers, none of them empty, in row {at}, got {answers!r}")

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A task from text to text: its rows are complete prompts, as a model reads them, and their answers.

    `metric`: what answers are scored by. `definition`: what the task says of itself, part of every prompt; `labels`:
    the answers there are, none where they are free. `kind`: what sort of task it is in its collection, as dialogue or
    summarisation. `source` says where the rows came from; `sha256` has a hash of each split's rows.
    """

    name: str
    train: TextPairs
    dev: TextPairs
    test: TextPairs
    metric: Metric
    definition: str = ""
    labels: tuple[str, ...] = ()
    kind: str = ""
    source: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the metric."""
        check_choice("metric", self.metric, METRICS)

    def split(self, name: Literal["train", "dev", "test"]) -> TextPairs:
        """The rows of a split."""
        found: TextPairs = getattr(self, name)
        return found
