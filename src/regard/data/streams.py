"""The streams of continual learning: those built in, and a user's own, with honest splits."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from regard.data import stdlib_texts, task_files
from regard.data.splits import (
    HELD_OUT,
    RawTask,
    Sample,
    Samples,
    Settled,
    balanced,
    digest,
    divide,
    examples_of,
    proportional,
    settle,
)
from regard.data.stream import SPLITS, Protocol, Stream, Task
from regard.data.stream_files import Pool, read_data_set, read_own
from regard.data.stream_settings import DATA_SETS, STREAMS, StreamSettings, TaskOf
from regard.errors import UserError

STDLIB = "stdlib-split"
_STDLIB_SHARES = (0.15, 0.25)
_STDLIB_SEED = 0
"""The rows that test the embedded stream are the same whatever the seed."""


def read_stream(
    name_or_path: str | Path,
    folder: str | Path | None = None,
    *,
    rows: int | None = None,
    eval_rows: int | None = None,
    order: str | Sequence[int] = "paper",
    seed: int = 0,
    protocol: Protocol = "clean",
) -> Stream:
    """A stream by its name in `STREAMS`, or from a table or a folder of the user's own (`stream_files.read_own`).

    `folder`: where published files lie, in the forms of `stream_settings.DATA_SETS`; without it the hub is read.
    'stdlib-split' needs neither. `rows`: for training, at most so many a class (None: as published, 1245; all of a
    user's own); `eval_rows`: at most so many test rows a task, and as many dev rows, classes in the shares they have
    (None: all, or as published). Both are drawn by `seed`, fewer being a part of more. `order`: 'paper', 'random'
    (drawn by the seed), or numbers of tasks as published, also as '2-0-1'.

    `protocol`: 'clean' drops rows of train that dev or test of any task has, rows of dev that a test has, and copies;
    dev is held out of train where none is published: a tenth of each class. 'paper' drops nothing; dev is the split
    that is evaluated on, as published. What the splits have in common is counted in `record["overlaps"]` either way.

    Raises UserError for names, files, columns, classes, splits, orders and numbers that are not as they should be.
    """
    check_seed(seed)
    _check_rows("rows", rows)
    _check_rows("eval rows", eval_rows)
    if protocol not in get_args(Protocol):
        raise UserError(f"protocol: expected one of {', '.join(get_args(Protocol))}, got {protocol!r}")
    name = str(name_or_path)
    settings = STREAMS.get(name)
    if settings is None:
        raw = _own(name, folder, seed)
        numbers = _order(order, len(raw), seed)
    else:
        numbers = _order(order, len(settings.tasks), seed)
        raw = _built_in(name, settings, folder)
    count = len(raw)
    most = _published_rows(settings, count) if rows is None else [rows] * count
    evaluated = eval_rows if eval_rows is not None or settings is None else settings.eval_rows
    published_dev = settings is not None and name != STDLIB
    settled = settle(raw, protocol, seed, dev_is_test=published_dev)
    drawn = [_drawn(task, of, least, evaluated, seed) for task, of, least in zip(settled, raw, most, strict=True)]
    stream = Stream(
        name=name if settings else Path(name).resolve().name,
        tasks=tuple(_task(of, task) for of, task in zip(raw, drawn, strict=True)),
        order=tuple(range(count)),
        seed=seed,
        protocol=protocol,
        record={
            "published": settings.paper if settings else None,
            "rows": {task.name: least for task, least in zip(raw, most, strict=True)},
            "eval_rows": evaluated,
            "dev": _said_of_dev(raw, protocol, published_dev),
            "available": {task.name: _sizes(task) for task in settled},
            "drawn": {task.name: _sizes(task) for task in drawn},
            "overlaps": {task.name: dict(task.common) for task in settled},
        },
    )
    return stream.ordered(numbers)


def parse_order(text: str, count: int, seed: int) -> tuple[int, ...]:
    """The order of `count` tasks: 'paper' or '1' as published, 'random' drawn by the seed, or numbers as '2-0-1'.

    Raises UserError for what is no order of all tasks.
    """
    if text == "paper" or (text == "1" and count > 1):
        return tuple(range(count))
    if text == "random":
        check_seed(seed)
        return tuple(sorted(range(count), key=lambda task: hashlib.sha256(f"order {seed} {task}".encode()).digest()))
    parts = [part.strip() for part in text.replace(",", "-").split("-")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"order: expected paper, random or numbers of tasks as 2-0-1, got {text!r}")
    return _permutation([int(part) for part in parts], count)


def check_seed(seed: Any) -> int:
    """The seed; raises UserError where it is no whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed: expected a whole number, got {seed!r}")
    return seed


def _order(order: str | Sequence[int], count: int, seed: int) -> tuple[int, ...]:
    return parse_order(order, count, seed) if isinstance(order, str) else _permutation(order, count)


def _permutation(order: Sequence[int], count: int) -> tuple[int, ...]:
    """The order as it is, if each task is there once."""
    if any(isinstance(number, bool) or not isinstance(number, int) for number in order):
        raise UserError(f"order: expected numbers of tasks, got {list(order)!r}")
    if sorted(order) != list(range(count)):
        told = "-".join(map(str, order)) or "none"
        raise UserError(f"order: expected each number from 0 to {count - 1} once, got {told}")
    return tuple(order)


def _check_rows(name: str, rows: Any) -> None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise UserError(f"{name}: expected a whole number of at least 1, got {rows!r}")


def _own(name: str, folder: str | Path | None, seed: int) -> list[RawTask]:
    """The tasks of a user's table or folder."""
    path = Path(name)
    if not (path.exists() or task_files.is_table(name)):
        allowed = f"{', '.join(STREAMS)}, a file ({task_files.suffixes()}) or a folder with a folder for each task"
        raise UserError(f"stream: expected one of {allowed}; got {name!r}")
    if folder is not None:
        raise UserError(f"folder: expected none with tasks of your own ({name}), got {folder}")
    return read_own(path, seed)


def _built_in(name: str, settings: StreamSettings, folder: str | Path | None) -> list[RawTask]:
    """The tasks of a stream that is built in, each data set read once."""
    if name == STDLIB:
        return _standard_library(settings)
    place = None if folder is None else Path(folder)
    pools = {
        data: read_data_set(data, DATA_SETS[data], place) for data in dict.fromkeys(of.data for of in settings.tasks)
    }
    return [_part(of, pools[of.data]) for of in settings.tasks]


def _part(of: TaskOf, pool: Pool) -> RawTask:
    """The rows of a data set that are of a task's classes."""
    train, test = (tuple(row for row in rows if row.label in of.labels) for rows in (pool.train, pool.test))
    return RawTask(name=of.name, labels=of.labels, train=train, dev=None, test=test, source=pool.source)


def _standard_library(settings: StreamSettings) -> list[RawTask]:
    """Modules of the standard library as classes, split by the hash of the text."""
    texts = stdlib_texts.documentation(tuple(label for of in settings.tasks for label in of.labels))
    raw = []
    for of in settings.tasks:
        rows = tuple(Sample.of((text,), label) for label in of.labels for text in texts[label])
        train, dev, test = divide(rows, _STDLIB_SHARES, _STDLIB_SEED, of.name)
        raw.append(
            RawTask(name=of.name, labels=of.labels, train=train, dev=dev, test=test, source=stdlib_texts.source())
        )
    return raw


def _published_rows(settings: StreamSettings | None, count: int) -> list[int | None]:
    """For each task how many rows a class were trained on; None for all, as of a user's own."""
    if settings is None:
        return [None] * count
    return [None if of.all_rows else settings.rows for of in settings.tasks]


def _drawn(task: Settled, of: RawTask, rows: int | None, eval_rows: int | None, seed: int) -> Settled:
    """The task with the rows that are drawn of it; dev that was held out of train has no more of them than test."""
    test = proportional(task.test, eval_rows, seed)
    dev = proportional(task.dev, len(test) if of.dev is None and eval_rows is None else eval_rows, seed)
    return task._replace(train=balanced(task.train, rows, seed), dev=dev, test=test)


def _task(raw: RawTask, drawn: Settled) -> Task:
    """The task with numbers for classes."""
    parts: dict[str, Samples] = {"train": drawn.train, "dev": drawn.dev, "test": drawn.test}
    return Task(
        name=raw.name,
        labels=raw.labels,
        source=raw.source,
        sha256={split: digest(part) for split, part in parts.items()},
        **{split: examples_of(part, raw.labels) for split, part in parts.items()},
    )


def _sizes(task: Settled) -> dict[str, dict[str, int]]:
    """How many rows of each class a task has, split by split."""
    return {split: dict(sorted(Counter(row.label for row in getattr(task, split)).items())) for split in SPLITS}


def _said_of_dev(raw: Sequence[RawTask], protocol: Protocol, published: bool) -> str:
    """Where the dev split comes from."""
    if all(task.dev is not None for task in raw):
        return "a split of its own"
    if protocol == "paper" and published:
        return "the rows that are evaluated on, as published"
    return f"{HELD_OUT:.0%} of each class held out of train by the seed, where there is none"
