"""The streams of continual learning: those built in, and a user's own, with honest splits."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from regard.data import stdlib_texts, task_files
from regard.data.instruction_settings import Benchmark, SheetForm
from regard.data.instructions import Info, SplitReader, check_labels, files_of, read_hub_task, read_task, roots
from regard.data.splits import (
    HELD_OUT,
    CleanedSplits,
    RawTask,
    Sample,
    Samples,
    clean_splits,
    divide_rows,
    examples_of,
    pairs_of,
    sample_balanced,
    sample_proportional,
    sha256_of_rows,
)
from regard.data.stream import SPLITS, Protocol, Stream, Task
from regard.data.stream_files import RowPool, read_data_set, read_own
from regard.data.stream_settings import DATA_SETS, STREAMS, StreamSettings, SubsetTask
from regard.data.text_task import Metric, TextTask
from regard.errors import UserError, check_choice

Missing = Literal["refuse", "skip"]
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
    task_type: SheetForm | None = None,
    missing_tasks: Missing = "refuse",
    instructions: bool = False,
) -> Stream:
    """A stream by its name in `STREAMS`, or from a table or a folder of the user's own (`stream_files.read_own`).

    `folder`: where published files lie, in the forms of `stream_settings.DATA_SETS`; without it the hub is read.
    'stdlib-split' needs neither. `rows`: for training, at most so many a class (None: as published, 1245; all of a
    user's own, and of the files of 'long-sequence'); `eval_rows`: at most so many test rows a task, and as many dev
    rows, classes in the shares they have (None: all, or as published). Both are drawn by `seed`, fewer being a part of
    more. `order`: 'paper', a published order by its name (`StreamSettings.orders`), 'random' (drawn by the seed), or
    numbers of tasks as published, also as '2-0-1'.

    `protocol`: 'clean' drops rows of train that dev or test of any task has, rows of dev that a test has, and copies;
    dev is held out of train where none is published: a tenth of each class. 'paper' drops nothing; dev is the split
    that is evaluated on, as published. What the splits have in common is counted in `record["overlaps"]` either way.

    For tasks with instructions, 'long-sequence' and 'superni': `task_type` is 'classification' or 'generation'
    (from text to text, with the published prompts), None for the first that the stream has; `instructions` puts the
    definition of a task before the texts of classification. `missing_tasks`: 'refuse' tasks without any files, or
    'skip' them, which `record["missing"]` then names; orders are the published ones without them. What the files held,
    and what was divided for want of one, is in `record["files"]`; what the protocols make of each task, in
    `record["protocols"]` (`text_streams.protocols_compared`), for which no file is read again.

    Raises UserError for names, files, columns, classes, splits, orders and numbers that are not as they should be.
    """
    check_seed(seed)
    _check_rows("rows", rows)
    _check_rows("eval rows", eval_rows)
    check_choice("protocol", protocol, get_args(Protocol))
    check_choice("missing-tasks", missing_tasks, get_args(Missing))
    name = str(name_or_path)
    settings = STREAMS.get(name)
    if settings is not None and settings.benchmark is not None:
        found = _with_instructions(settings, settings.benchmark, folder, task_type, missing_tasks, instructions)
    else:
        _check_plain(name, task_type, instructions)
        found = _Found(raw=_own(name, folder, seed) if settings is None else _built_in(name, settings, folder))
    numbers = _numbers(order, settings, [task.name for task in found.raw], seed)
    evaluated = eval_rows if eval_rows is not None or settings is None else settings.eval_rows
    most = _published_rows(settings, found) if rows is None else [rows] * len(found.raw)
    stream = assemble_stream(
        name if settings else Path(name).resolve().name,
        found.raw,
        infos=found.infos,
        metric=settings.benchmark.metric if settings and settings.benchmark else None,
        rows=most,
        eval_rows=evaluated,
        seed=seed,
        protocol=protocol,
        dev_is_test=settings is not None and name != STDLIB,
        record={"published": settings.paper if settings else None, **found.record},
    )
    return stream.ordered(numbers)


def assemble_stream(
    name: str,
    raw: Sequence[RawTask],
    *,
    infos: Mapping[str, Info] | None = None,
    metric: Metric | None = None,
    rows: Sequence[int | None],
    eval_rows: int | None,
    seed: int,
    protocol: Protocol,
    dev_is_test: bool = False,
    record: Mapping[str, Any],
) -> Stream:
    """The stream of tasks as read: what splits have in common counted and dropped, rows drawn, in the order given.

    From text to text where there are `infos` of the tasks, which then have a `metric`; `rows` is one number a task.
    `dev_is_test` as in `splits.settle`. Raises UserError as that does.
    """
    settled = clean_splits(raw, protocol, seed, dev_is_test=dev_is_test)
    both = _protocols(raw, settled, record.get("files", {}), protocol, seed)
    drawn = [_drawn(task, of, least, eval_rows, seed) for task, of, least in zip(settled, raw, rows, strict=True)]
    made: Any
    if infos is None:
        made = tuple(_task(of, task) for of, task in zip(raw, drawn, strict=True))
    else:
        assert metric is not None, "tasks from text to text have a metric"
        made = tuple(_text_task(of, task, infos[of.name], metric) for of, task in zip(raw, drawn, strict=True))
    return Stream(
        name=name,
        tasks=made,
        order=tuple(range(len(made))),
        seed=seed,
        protocol=protocol,
        record={
            **record,
            "rows": {task.name: least for task, least in zip(raw, rows, strict=True)},
            "eval_rows": eval_rows,
            "dev": _said_of_dev(raw, protocol, dev_is_test),
            "available": {task.name: _sizes(task) for task in settled},
            "drawn": {task.name: _sizes(task) for task in drawn},
            "overlaps": {task.name: dict(task.common) for task in settled},
            **({"protocols": both} if both else {}),
        },
    )


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


def _numbers(
    order: str | Sequence[int], settings: StreamSettings | None, names: Sequence[str], seed: int
) -> tuple[int, ...]:
    """The order of the tasks by their numbers among `names`; a published order without the tasks that are not there."""
    orders = settings.orders if settings is not None else {}
    if isinstance(order, str) and (order in orders or (orders and order in ("paper", "1"))):
        published = orders[order] if order in orders else next(iter(orders.values()))
        return tuple(names.index(name) for name in published if name in names)
    words = isinstance(order, str) and order != "random" and not re.fullmatch(r"[\d\s,-]+", order)
    if orders and (words or (isinstance(order, str) and order.isdecimal())):
        allowed = f"paper, {', '.join(orders)}, random or numbers of tasks as 2-0-1"
        raise UserError(f"order: expected one of {allowed}, got {order!r}")
    return parse_order(order, len(names), seed) if isinstance(order, str) else _permutation(order, len(names))


def check_seed(seed: Any) -> int:
    """The seed; raises UserError where it is no whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed: expected a whole number, got {seed!r}")
    return seed


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
        raise UserError(f"data: expected no folder of published files with tasks of your own ({name}), got {folder}")
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


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The tasks of a stream as read; `infos` of those from text to text, `all_rows` where all of train is published."""

    raw: list[RawTask]
    infos: Mapping[str, Info] | None = None
    all_rows: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)


def _check_plain(name: str, task_type: SheetForm | None, instructions: bool) -> None:
    """Nothing, or a UserError: something is asked of a stream without instructions that only others have."""
    with_them = ", ".join(name for name, settings in STREAMS.items() if settings.benchmark is not None)
    if task_type not in (None, "classification"):
        raise UserError(
            f"task-type: expected classification, or one of the streams {with_them}, got {task_type!r} with {name!r}"
        )
    if instructions:
        raise UserError(f"instructions: expected none, or one of the streams {with_them}, got {name!r}")


def _with_instructions(
    settings: StreamSettings,
    benchmark: Benchmark,
    folder: str | Path | None,
    task_type: SheetForm | None,
    missing_tasks: Missing,
    instructions: bool,
) -> _Found:
    """The tasks of a benchmark from its files, or those of classification from the hub."""
    task_type = task_type or benchmark.task_types[0]
    check_choice("task-type", task_type, benchmark.task_types)
    if instructions and task_type == "generation":
        raise UserError("instructions: expected none with the task type generation, whose prompts have them anyway")
    names = [of.name for of in settings.tasks]
    if folder is None:
        if task_type == "generation" or instructions:
            raise UserError("folder: expected one with the published files, the hub has no definitions of these tasks")
        reads = [read_hub_task(benchmark.tasks[name]) for name in names]
    else:
        reads = _from_files(names, benchmark, Path(folder), task_type, missing_tasks, instructions)
    for read in reads:
        check_labels(read.raw.name, read.raw.labels)
    there = {read.raw.name for read in reads}
    record = {
        "task_type": task_type,
        "instructions": instructions or task_type == "generation",
        "missing": tuple(name for name in names if name not in there),
        "files": {read.raw.name: read.files for read in reads},
    }
    infos = {read.raw.name: read.info for read in reads} if task_type == "generation" else None
    return _Found(raw=[read.raw for read in reads], infos=infos, all_rows=folder is not None, record=record)


def _from_files(
    names: Sequence[str],
    benchmark: Benchmark,
    folder: Path,
    task_type: SheetForm,
    missing_tasks: Missing,
    instructions: bool,
) -> list[SplitReader]:
    """The tasks that have files. Raises UserError where one has none, unless those are to be skipped, or none has."""
    files = {name: files_of(folder, benchmark, name) for name in names}
    lacking = [name for name in names if not files[name]]
    if len(lacking) == len(names):
        looked = ", ".join(str(root) for root in roots(folder, benchmark))
        raise UserError(f"stream: expected a folder of train.json and test.json for each task in one of {looked}")
    if lacking and missing_tasks == "refuse":
        raise UserError(
            f"stream: expected files of every task in {folder}, got none of {', '.join(lacking)}; to leave them out, "
            "skip what is missing (missing-tasks=skip)"
        )
    return [
        read_task(name, files[name], benchmark, task_type=task_type, definitions=instructions)
        for name in names
        if files[name]
    ]


def _part(of: SubsetTask, pool: RowPool) -> RawTask:
    """The rows of a data set that are of a task's classes."""
    train, test = (tuple(row for row in rows if row.label in of.labels) for rows in (pool.train, pool.test))
    return RawTask(name=of.name, labels=of.labels, train=train, dev=None, test=test, source=pool.source)


def _standard_library(settings: StreamSettings) -> list[RawTask]:
    """Modules of the standard library as classes, split by the hash of the text."""
    texts = stdlib_texts.documentation(tuple(label for of in settings.tasks for label in of.labels))
    raw = []
    for of in settings.tasks:
        rows = tuple(Sample.of((text,), label) for label in of.labels for text in texts[label])
        train, dev, test = divide_rows(rows, _STDLIB_SHARES, _STDLIB_SEED, of.name)
        raw.append(
            RawTask(name=of.name, labels=of.labels, train=train, dev=dev, test=test, source=stdlib_texts.source())
        )
    return raw


def _published_rows(settings: StreamSettings | None, found: _Found) -> list[int | None]:
    """For each task how many rows a class were trained on; None for all, as of a user's own."""
    if settings is None:
        return [None] * len(found.raw)
    if settings.benchmark is not None:
        return [None if found.all_rows and not task.free else settings.rows for task in found.raw]
    return [None if of.all_rows else settings.rows for of in settings.tasks]


def _drawn(task: CleanedSplits, of: RawTask, rows: int | None, eval_rows: int | None, seed: int) -> CleanedSplits:
    """The task with the rows that are drawn of it; dev that was held out of train has no more of them than test."""
    test = sample_proportional(task.test, eval_rows, seed)
    dev = sample_proportional(task.dev, len(test) if of.dev is None and eval_rows is None else eval_rows, seed)
    return task._replace(train=sample_balanced(task.train, rows, seed), dev=dev, test=test)


def _task(raw: RawTask, drawn: CleanedSplits) -> Task:
    """The task with numbers for classes."""
    parts: dict[str, Samples] = {"train": drawn.train, "dev": drawn.dev, "test": drawn.test}
    return Task(
        name=raw.name,
        labels=raw.labels,
        source=raw.source,
        sha256={split: sha256_of_rows(part) for split, part in parts.items()},
        **{split: examples_of(part, raw.labels) for split, part in parts.items()},
    )


def _text_task(raw: RawTask, drawn: CleanedSplits, info: Info, metric: Metric) -> TextTask:
    """The task from text to text."""
    parts: dict[str, Samples] = {"train": drawn.train, "dev": drawn.dev, "test": drawn.test}
    return TextTask(
        name=raw.name,
        metric=metric,
        definition=info.definition,
        labels=() if raw.free else raw.labels,
        kind=info.kind,
        source=raw.source,
        sha256={split: sha256_of_rows(part) for split, part in parts.items()},
        **{split: pairs_of(part) for split, part in parts.items()},
    )


def _sizes(task: CleanedSplits) -> dict[str, dict[str, int]]:
    """How many rows of each class a task has, split by split."""
    return {split: dict(sorted(Counter(row.label for row in getattr(task, split)).items())) for split in SPLITS}


def _said_of_dev(raw: Sequence[RawTask], protocol: Protocol, published: bool) -> str:
    """Where the dev split comes from."""
    if all(task.dev is not None for task in raw):
        return "a split of its own"
    if protocol == "paper" and published:
        return "the rows that are evaluated on, as published"
    return f"{HELD_OUT:.0%} of each class held out of train by the seed, where there is none"


def _protocols(
    raw: Sequence[RawTask], settled: Sequence[CleanedSplits], files: Mapping[str, Any], protocol: Protocol, seed: int
) -> dict[str, Any]:
    """By task the fields of `text_streams.Compared`, from rows that have been read; {} where files are not known."""
    if any(set(files.get(task.name, {})) <= {"evaluated"} for task in raw):
        return {}
    clean: Sequence[CleanedSplits | None] = settled
    if protocol == "paper":
        try:
            clean = clean_splits(raw, "clean", seed, dev_is_test=True)
        except UserError:  # a split or a class would be left without rows, which is no mistake with 'paper'
            clean = [None] * len(raw)
    return {task.name: _compared(task, of, files[task.name]) for task, of in zip(raw, clean, strict=True)}


def _compared(task: RawTask, clean: CleanedSplits | None, files: Mapping[str, Any]) -> dict[str, Any]:
    dev = task.test if task.dev is None else task.dev
    return {
        "identical": files["identical_dev_test"],
        **{name: files[name] for name in ("dev_in_test", "train_in_test", "train_in_dev", "evaluated")},
        "published": files["rows"],
        "paper": {"train": len(task.train), "dev": len(dev), "test": len(task.test)},
        "clean": None if clean is None else {split: len(getattr(clean, split)) for split in SPLITS},
        "dropped": None if clean is None else sum(clean.common[f"dropped_from_{split}"] for split in ("train", "dev")),
    }
