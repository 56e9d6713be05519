"""Honest splits: rows known by their text, what the splits have in common, and rows drawn by a seed.

Every draw ranks rows by a hash of their text and the seed. So it depends neither on the order of a file nor on which
other rows there are, and fewer rows are a part of more.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from regard.data.examples import Examples
from regard.data.stream import Protocol, Task
from regard.data.text_task import TextPairs, TextTask
from regard.errors import UserError

HELD_OUT = 0.1
"""The share of each class that is held out of training rows where there is no dev split."""

RESERVED_SPLIT = "any answer"
"""The class of all rows of a task whose answers are free."""

_NO_WORD = re.compile(r"[\W_]+")


class Sample(NamedTuple):
    """One row: its texts, its class by name, and the key of its text, which rows with the same text share.

    `answers`: of a row from text to text, what may be answered.
    """

    texts: tuple[str, ...]
    label: str
    key: str
    answers: tuple[str, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str], label: str) -> Sample:
        """The row with the key of all its texts."""
        texts = tuple(texts)
        return cls(texts, label, key_of(texts))


Samples = tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class RawTask:
    """A task as read, before anything is drawn or dropped: `dev` is None where it has to be held out of train.

    `free`: its answers are no classes, all rows are of the class `RESERVED_SPLIT`.
    """

    name: str
    labels: tuple[str, ...]
    train: Samples
    dev: Samples | None
    test: Samples
    source: str
    free: bool = False

    def __post_init__(self) -> None:
        """Check that there are two classes, rows of each to train on, and none of others."""
        if len(self.labels) < 2 and not self.free:
            found = ", ".join(self.labels) or "none"
            raise UserError(f"stream: expected at least two classes in {self.name!r}, got {found} ({self.source})")
        for name, rows in (("train", self.train), ("dev", self.dev), ("test", self.test)):
            if rows is not None and not rows:
                raise UserError(f"stream: expected rows in the {name} split of {self.name!r}, got none ({self.source})")
        if len({len(row.texts) for rows in (self.train, self.dev or (), self.test) for row in rows}) > 1:
            raise UserError(f"stream: expected one text in each row of {self.name!r}, or two in each, got both")
        trained = {row.label for row in self.train}
        missing = [label for label in self.labels if label not in trained]
        unseen = sorted({row.label for row in (*(self.dev or ()), *self.test)} - trained)
        if unseen:
            allowed = ", ".join(self.labels)
            raise UserError(
                f"stream: expected labels of train ({allowed}) in {self.name!r}, got {unseen[0]!r} beside it"
            )
        if missing:
            raise UserError(f"stream: expected rows of {missing[0]!r} in the train split of {self.name!r}, got none")


class CleanedSplits(NamedTuple):
    """The splits that a stream works with, `common` telling what they had in common and what was dropped for it."""

    name: str
    train: Samples
    dev: Samples
    test: Samples
    common: Mapping[str, int]


@dataclass
class _Counts:
    """Rows that another split has too, and later copies within a split, of one task."""

    train_in_dev: int = 0
    train_in_test: int = 0
    dev_in_test: int = 0
    copies_in_train: int = 0
    copies_in_dev: int = 0
    copies_in_test: int = 0
    train_in_other_tasks: int = 0
    dev_in_other_tasks: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"train": 0, "dev": 0})

    def as_record(self) -> dict[str, int]:
        counts = {name: value for name, value in vars(self).items() if name != "dropped"}
        return counts | {f"dropped_from_{name}": count for name, count in self.dropped.items()}


def key_of(texts: Sequence[str]) -> str:
    """A hash of the texts that letter case, punctuation, white space and Unicode's forms do not change."""
    plain = " ".join(unicodedata.normalize("NFKC", " ".join(texts)).casefold().split())
    bare = _NO_WORD.sub(" ", plain) if plain.isascii() else "".join(map(_or_space, plain))
    bare = " ".join(bare.split())
    return hashlib.sha256((bare or plain).encode()).hexdigest()[:32]


def check_disjoint(task: Task | TextTask) -> None:
    """Nothing, or a UserError: rows that are to choose something are among those that it is scored on."""
    scored = set(_keys(task.test))
    same = sum(key in scored for key in _keys(task.dev))
    if same:
        raise UserError(f"selection: expected dev rows of {task.name!r} that are no test rows, got {same} that are")


def sample_balanced(rows: Samples, most: int | None, seed: int) -> Samples:
    """At most so many rows of each class, in their order; None for all."""
    if most is None:
        return rows
    ranks = _ranks(rows, seed, "rows")
    return tuple(row for row, rank in zip(rows, ranks, strict=True) if rank < most)


def sample_proportional(rows: Samples, most: int | None, seed: int) -> Samples:
    """At most so many rows in their order, classes in the shares that they have among all; None for all."""
    if most is None or most >= len(rows):
        return rows
    sizes = Counter(row.label for row in rows)
    ranks = _ranks(rows, seed, "rows")
    places = [((rank + 0.5) / sizes[row.label], row.label, row.key) for row, rank in zip(rows, ranks, strict=True)]
    chosen = set(sorted(range(len(rows)), key=places.__getitem__)[:most])
    return tuple(row for at, row in enumerate(rows) if at in chosen)


def divide_rows(rows: Samples, shares: Sequence[float], seed: int, name: str) -> tuple[Samples, ...]:
    """The rows in parts: what is left first, then one part a share of each class, at least one text of it in each.

    Rows with the same text and class stay together. `name`: what the rows are called in messages.

    Raises UserError for a class with fewer texts than there are parts.
    """
    keys = {label: sorted({row.key for row in rows if row.label == label}) for label in {row.label for row in rows}}
    part_of: dict[tuple[str, str], int] = {}
    for label, found in sorted(keys.items()):
        if len(found) <= len(shares):
            need = f"at least {len(shares) + 1} texts of {label!r} in {name}"
            raise UserError(f"stream: expected {need}, one for each split, got {len(found)}")
        found.sort(key=lambda key: _drawn("split", seed, key))
        end = len(found)
        for part, share in reversed(list(enumerate(shares, start=1))):
            start = end - max(1, int(share * len(found)))
            part_of |= {(label, key): part for key in found[start:end]}
            end = start
    count = len(shares) + 1
    return tuple(tuple(row for row in rows if part_of.get((row.label, row.key), 0) == part) for part in range(count))


def clean_splits(
    tasks: Sequence[RawTask], protocol: Protocol, seed: int, *, dev_is_test: bool = False
) -> list[CleanedSplits]:
    """The splits of all tasks of a stream, what they have in common counted and, unless 'paper', dropped.

    'clean': train loses what dev or test of any task has, and later copies of its own rows; dev loses what test of any
    task has, and its copies; test stays as it is. A dev split that is missing is a tenth of each class of train,
    drawn by the seed from what is left. 'paper': nothing is dropped, and a dev split that is missing is the test
    rows where `dev_is_test`.

    Raises UserError where nothing is left of a split or of a class to train on.
    """
    counts = {task.name: _Counts() for task in tasks}
    tests = _Owners(tasks, "test")
    held = [_with_dev(task, tests, counts[task.name], protocol, seed, dev_is_test) for task in tasks]
    devs = _Owners(held, "dev")
    settled = []
    for task in held:
        count = counts[task.name]
        same = dev_is_test and task.dev == task.test
        _count_common(task, tests, devs, count, same)
        if protocol == "clean":
            task = _clean(task, tests, devs, count)
        settled.append(CleanedSplits(task.name, task.train, task.dev or (), task.test, count.as_record()))
    return settled


def pairs_of(rows: Samples) -> TextPairs:
    """The rows from text to text: their prompts and answers."""
    return TextPairs(inputs=tuple(row.texts[0] for row in rows), targets=tuple(row.answers for row in rows))


def examples_of(rows: Samples, labels: Sequence[str]) -> Examples:
    """The rows with their classes as numbers into `labels`."""
    number = {label: at for at, label in enumerate(labels)}
    return Examples(texts=tuple(row.texts for row in rows), labels=tuple(number[row.label] for row in rows))


def sha256_of_rows(rows: Samples) -> str:
    """The sha256 over texts and classes of the rows, or their answers, in their order."""
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps([row.texts, row.answers or row.label]).encode() + b"\n")
    return found.hexdigest()


def _keys(rows: Examples | TextPairs) -> list[str]:
    """The key of each row's text."""
    texts = rows.texts if isinstance(rows, Examples) else tuple((text,) for text in rows.inputs)
    return [key_of(of) for of in texts]


class _Owners:
    """Which tasks have a text in one of their splits."""

    def __init__(self, tasks: Sequence[RawTask], split: str) -> None:
        self._of: dict[str, set[str]] = {}
        for task in tasks:
            for row in getattr(task, split) or ():
                self._of.setdefault(row.key, set()).add(task.name)

    def __contains__(self, key: str) -> bool:
        return key in self._of

    def own(self, key: str, task: str) -> bool:
        """Whether the task itself has it."""
        return task in self._of.get(key, ())

    def other(self, key: str, task: str) -> bool:
        """Whether another task has it."""
        return bool(self._of.get(key, set()) - {task})


def _with_dev(
    task: RawTask, tests: _Owners, count: _Counts, protocol: Protocol, seed: int, dev_is_test: bool
) -> RawTask:
    """The task with a dev split; for 'clean' it is held out of rows that no test split has."""
    if task.dev is not None:
        return task
    if protocol == "paper" and dev_is_test:
        return replace(task, dev=task.test)
    pool = task.train
    if protocol == "clean":
        _count_train(task, tests, count)
        pool = _once(tuple(row for row in pool if row.key not in tests))
        count.dropped["train"] += len(task.train) - len(pool)
        _check_left(task, "train", pool)
    train, dev = divide_rows(pool, (HELD_OUT,), seed, f"the train split of {task.name!r}")
    return replace(task, train=train, dev=dev)


def _count_train(task: RawTask, tests: _Owners, count: _Counts) -> None:
    """Count what train has in common with test splits, and its copies."""
    count.train_in_test += sum(tests.own(row.key, task.name) for row in task.train)
    count.train_in_other_tasks += sum(tests.other(row.key, task.name) for row in task.train)
    count.copies_in_train += len(task.train) - len(_once(task.train))


def _count_common(task: RawTask, tests: _Owners, devs: _Owners, count: _Counts, same: bool) -> None:
    """Count what the splits of one task have in common with each other and with those of other tasks."""
    dev = task.dev or ()
    _count_train(task, tests, count)
    count.train_in_dev = sum(devs.own(row.key, task.name) for row in task.train)
    count.train_in_other_tasks += sum(
        devs.other(row.key, task.name) and not tests.other(row.key, task.name) for row in task.train
    )
    count.copies_in_dev, count.copies_in_test = len(dev) - len(_once(dev)), len(task.test) - len(_once(task.test))
    count.dev_in_test = len(dev) if same else sum(tests.own(row.key, task.name) for row in dev)
    count.dev_in_other_tasks = sum(tests.other(row.key, task.name) for row in dev)


def _clean(task: RawTask, tests: _Owners, devs: _Owners, count: _Counts) -> RawTask:
    """The task without rows of train and dev that a later split has, or that are there before."""
    dev = _once(tuple(row for row in task.dev or () if row.key not in tests))
    train = _once(tuple(row for row in task.train if row.key not in tests and row.key not in devs))
    count.dropped["train"] += len(task.train) - len(train)
    count.dropped["dev"] += len(task.dev or ()) - len(dev)
    if not dev:
        raise UserError(
            f"stream: expected dev rows in {task.name!r} that are not test rows, got none: leave dev out to have it "
            "held out of train, or ask for the protocol 'paper'"
        )
    _check_left(task, "train", train)
    return replace(task, train=train, dev=dev)


def _check_left(task: RawTask, split: str, rows: Samples) -> None:
    """Raises UserError where a class has no rows left."""
    left = {row.label for row in rows}
    gone = [label for label in task.labels if label not in left]
    if gone:
        raise UserError(
            f"stream: expected rows of {gone[0]!r} in the {split} split of {task.name!r} that no dev or test split has,"
            " got none"
        )


def _once(rows: Samples) -> Samples:
    """The rows without later ones of the same text."""
    first: dict[str, Sample] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return tuple(first.values())


def _or_space(sign: str) -> str:
    """A letter, a mark on one, or a digit; a space for anything else."""
    return sign if unicodedata.category(sign)[0] in "LMN" else " "


def _ranks(rows: Samples, seed: int, purpose: str) -> list[int]:
    """The place of each row among those of its class, in an order that the seed and the texts give."""
    seen: Counter[str] = Counter()
    ranks = [0] * len(rows)
    for at in sorted(range(len(rows)), key=lambda at: _drawn(purpose, seed, rows[at].key)):
        ranks[at] = seen[rows[at].label]
        seen[rows[at].label] += 1
    return ranks


def _drawn(purpose: str, seed: int, key: str) -> bytes:
    """What rows are ranked by."""
    return hashlib.sha256(f"{purpose} {seed} {key}".encode()).digest()
