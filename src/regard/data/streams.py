"""Streams for continual learning: the built-in ones, and a user's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from regard.data.benchmarks import Benchmark, TaskForm
from regard.data.dataset_files import read_dataset
from regard.data.instructions import (
    InstructionSource,
    TaskInfo,
    candidate_folders,
    check_labels,
    find_task_files,
    read_hub_task,
    read_instruction_task,
)
from regard.data.protocols import compare_splits
from regard.data.rows import RawTask, hash_rank, make_classification_task, make_text_task
from regard.data.splits import DEV_FRACTION, TaskSplits, clean_splits, sample_balanced, sample_proportional
from regard.data.stdlib_texts import read_stdlib_tasks
from regard.data.stream import ClassificationTask, Metric, Protocol, Stream, TextTask, check_order
from regard.data.stream_catalog import DATASETS, STREAMS, StreamSpec
from regard.data.tables import is_table, list_suffixes
from regard.data.user_tasks import read_user_tasks
from regard.errors import UserError, check_choice, check_int

MissingTasks = Literal["refuse", "skip"]
STDLIB = "stdlib-split"


def read_stream(
    name_or_path: str | Path,
    folder: str | Path | None = None,
    *,
    samples_per_class: int | None = None,
    max_eval_samples: int | None = None,
    order: str | Sequence[int] = "paper",
    seed: int = 0,
    protocol: Protocol = "clean",
    task_type: TaskForm | None = None,
    missing_tasks: MissingTasks = "refuse",
    instructions: bool = False,
) -> Stream:
    """Read a built-in stream, or one of a user's own tasks.

    Rows are sampled by the seed; fewer rows are a subset of more. `metadata["overlaps"]` counts what the splits have in
    common, and for tasks with instructions `metadata["files"]` says what their files contain and
    `metadata["protocols"]` what each protocol makes of them (see `regard.data.protocols`).

    Args:
        name_or_path: A name in `STREAMS`, or a table or folder that `regard.data.user_tasks.read_user_tasks` reads.
        folder: Folder of published files, see `regard.data.stream_catalog.DATASETS`; None for the hub. The stream
            "stdlib-split" needs neither.
        samples_per_class: Maximum number of training rows per class. None for the published number, and for all rows of
            a user's own tasks and of the files of "long-sequence".
        max_eval_samples: Maximum number of test rows per task, and of dev rows, with the class frequencies of all rows.
            None for the published number.
        order: "paper", the name of a published order, "random" (by the seed), or published task indices, also as
            "2-0-1".
        protocol: "clean" drops training rows that dev or test of any task has, dev rows that a test split has, and
            repeated rows; a missing dev split is a tenth of each class of train. "paper" drops nothing; a missing dev
            split of a published data set is its test split.
        task_type: How to read tasks with instructions: "labels" or "text"; None for the first that the stream has.
        missing_tasks: "refuse" tasks without files, or "skip" them; `metadata["missing"]` names them.
        instructions: Put the definition of a task before the texts of classification.

    Raises:
        UserError: An argument, file, column, class or split is not as expected.
    """
    check_seed(seed)
    for name, count in (("samples_per_class", samples_per_class), ("max_eval_samples", max_eval_samples)):
        if count is not None:
            check_int(name, count, least=1)
    check_choice("protocol", protocol, get_args(Protocol))
    check_choice("missing_tasks", missing_tasks, get_args(MissingTasks))
    name = str(name_or_path)
    spec = STREAMS.get(name)
    if spec is not None and spec.benchmark is not None:
        tasks = _read_instruction_tasks(spec, spec.benchmark, folder, task_type, missing_tasks, instructions)
    else:
        _check_no_instructions(name, task_type, instructions)
        tasks = _SourceTasks(raw=_read_user(name, folder, seed) if spec is None else _read_datasets(name, spec, folder))
    indices = _resolve_order(order, spec, [task.name for task in tasks.raw], seed)
    if max_eval_samples is None and spec is not None:
        max_eval_samples = spec.max_eval_samples
    stream = assemble_stream(
        name if spec else Path(name).resolve().name,
        tasks.raw,
        infos=tasks.infos,
        metric=spec.benchmark.metric if spec and spec.benchmark else None,
        samples_per_class=(
            [samples_per_class] * len(tasks.raw) if samples_per_class is not None else _published_samples(spec, tasks)
        ),
        max_eval_samples=max_eval_samples,
        seed=seed,
        protocol=protocol,
        dev_is_test=spec is not None and name != STDLIB,
        metadata={"published": spec.paper if spec else None, **tasks.metadata},
    )
    return stream.reorder(indices)


def assemble_stream(
    name: str,
    raw: Sequence[RawTask],
    *,
    infos: Mapping[str, TaskInfo] | None = None,
    metric: Metric | None = None,
    samples_per_class: Sequence[int | None],
    max_eval_samples: int | None,
    seed: int,
    protocol: Protocol,
    dev_is_test: bool = False,
    metadata: Mapping[str, Any],
) -> Stream:
    """Make a stream of tasks as read: clean their splits and sample rows.

    Args:
        infos: Definitions of text-to-text tasks, which also need a `metric`; None for classification.
        samples_per_class: One number per task.
        dev_is_test: As in `regard.data.splits.clean_splits`, whose exceptions this raises.
    """
    available = clean_splits(raw, protocol, seed, dev_is_test=dev_is_test)
    comparison = compare_splits(raw, available, metadata.get("files", {}), protocol, seed)
    sampled = [
        _sample_splits(task, raw_task, count, max_eval_samples, seed)
        for task, raw_task, count in zip(available, raw, samples_per_class, strict=True)
    ]
    tasks: tuple[ClassificationTask | TextTask, ...]
    if infos is None:
        tasks = tuple(
            make_classification_task(task.name, task.labels, splits.by_split(), task.source)
            for task, splits in zip(raw, sampled, strict=True)
        )
    else:
        assert metric is not None, "text-to-text tasks have a metric"
        tasks = tuple(
            make_text_task(task, splits.by_split(), *infos[task.name], metric)
            for task, splits in zip(raw, sampled, strict=True)
        )
    return Stream(
        name=name,
        tasks=tasks,
        order=tuple(range(len(tasks))),
        seed=seed,
        protocol=protocol,
        metadata={
            **metadata,
            "rows": {task.name: count for task, count in zip(raw, samples_per_class, strict=True)},
            "eval_rows": max_eval_samples,
            "dev": _describe_dev(raw, protocol, dev_is_test),
            "available": {task.name: _count_classes(task) for task in available},
            "drawn": {task.name: _count_classes(task) for task in sampled},
            "overlaps": {task.name: dict(task.overlaps) for task in available},
            **({"protocols": comparison} if comparison else {}),
        },
    )


def check_seed(seed: Any) -> int:
    """Return the seed, or raise UserError if it is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed: expected a whole number, got {seed!r}")
    return seed


# -- order ----------------------------------------------------------------------------------------------


def parse_order(text: str, count: int, seed: int) -> tuple[int, ...]:
    """Parse the order of `count` tasks: "paper" or "1", "random" by the seed, or indices as "2-0-1"."""
    if text == "paper" or (text == "1" and count > 1):
        return tuple(range(count))
    if text == "random":
        check_seed(seed)
        return tuple(sorted(range(count), key=lambda task: hash_rank("order", seed, task)))
    parts = [part.strip() for part in text.replace(",", "-").split("-")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"order: expected paper, random or numbers of tasks as 2-0-1, got {text!r}")
    return _check_permutation([int(part) for part in parts], count)


def _resolve_order(
    order: str | Sequence[int], spec: StreamSpec | None, names: Sequence[str], seed: int
) -> tuple[int, ...]:
    """Return indices among `names`; missing tasks are left out of a published order."""
    if not isinstance(order, str):
        return _check_permutation(order, len(names))
    orders = spec.orders if spec is not None else {}
    if orders and order in ("paper", "1", *orders):
        published = orders[order] if order in orders else next(iter(orders.values()))
        return tuple(names.index(name) for name in published if name in names)
    is_name = order.isdecimal() or (order != "random" and not re.fullmatch(r"[\d\s,-]+", order))
    if orders and is_name:
        allowed = f"paper, {', '.join(orders)}, random or numbers of tasks as 2-0-1"
        raise UserError(f"order: expected one of {allowed}, got {order!r}")
    return parse_order(order, len(names), seed)


def _check_permutation(order: Sequence[int], count: int) -> tuple[int, ...]:
    if any(isinstance(index, bool) or not isinstance(index, int) for index in order):
        raise UserError(f"order: expected numbers of tasks, got {list(order)!r}")
    check_order(order, count)
    return tuple(order)


# -- reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SourceTasks:
    """Tasks as read.

    Attributes:
        infos: Definitions of text-to-text tasks.
        all_published: Whether all training rows of classification tasks are published.
    """

    raw: list[RawTask]
    infos: Mapping[str, TaskInfo] | None = None
    all_published: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def _read_user(name: str, folder: str | Path | None, seed: int) -> list[RawTask]:
    """Read a user's table or folder."""
    path = Path(name)
    if not (path.exists() or is_table(name)):
        allowed = f"{', '.join(STREAMS)}, a file ({list_suffixes()}) or a folder with a folder for each task"
        raise UserError(f"stream: expected one of {allowed}; got {name!r}")
    if folder is not None:
        raise UserError(f"data: expected no folder of published files with tasks of your own ({name}), got {folder}")
    return read_user_tasks(path, seed)


def _read_datasets(name: str, spec: StreamSpec, folder: str | Path | None) -> list[RawTask]:
    """Read the tasks of a built-in stream, each data set once."""
    if name == STDLIB:
        return read_stdlib_tasks(spec)
    place = None if folder is None else Path(folder)
    datasets = {task.dataset: None for task in spec.tasks}
    rows = {dataset: read_dataset(dataset, DATASETS[dataset], place) for dataset in datasets}
    raw = []
    for task in spec.tasks:
        dataset = rows[task.dataset]
        train, test = (
            tuple(row for row in split if row.label in task.labels) for split in (dataset.train, dataset.test)
        )
        raw.append(RawTask(name=task.name, labels=task.labels, train=train, dev=None, test=test, source=dataset.source))
    return raw


def _check_no_instructions(name: str, task_type: TaskForm | None, instructions: bool) -> None:
    """Raise UserError for options that only streams with instructions have."""
    streams = ", ".join(name for name, spec in STREAMS.items() if spec.benchmark is not None)
    if task_type not in (None, "labels"):
        raise UserError(f"task_type: expected labels, or one of the streams {streams}, got {task_type!r} with {name!r}")
    if instructions:
        raise UserError(f"instructions: expected none, or one of the streams {streams}, got {name!r}")


def _read_instruction_tasks(
    spec: StreamSpec,
    benchmark: Benchmark,
    folder: str | Path | None,
    task_type: TaskForm | None,
    missing_tasks: MissingTasks,
    instructions: bool,
) -> _SourceTasks:
    """Read the tasks of a benchmark from its files, or those of classification from the hub."""
    task_type = task_type or benchmark.forms[0]
    check_choice("task_type", task_type, benchmark.forms)
    if instructions and task_type == "text":
        raise UserError("instructions: expected none with the task type text, whose prompts have them anyway")
    names = [task.name for task in spec.tasks]
    if folder is None:
        if task_type == "text" or instructions:
            raise UserError("folder: expected one with the published files, the hub has no definitions of these tasks")
        sources = [read_hub_task(benchmark.tasks[name]) for name in names]
    else:
        sources = _read_task_files(names, benchmark, Path(folder), task_type, missing_tasks, instructions)
    for source in sources:
        check_labels(source.raw.name, source.raw.labels)
    available = {source.raw.name for source in sources}
    return _SourceTasks(
        raw=[source.raw for source in sources],
        infos={source.raw.name: source.info for source in sources} if task_type == "text" else None,
        all_published=folder is not None,
        metadata={
            "form": task_type,
            "instructions": instructions or task_type == "text",
            "missing": tuple(name for name in names if name not in available),
            "files": {source.raw.name: source.files for source in sources},
        },
    )


def _read_task_files(
    names: Sequence[str],
    benchmark: Benchmark,
    folder: Path,
    task_type: TaskForm,
    missing_tasks: MissingTasks,
    instructions: bool,
) -> list[InstructionSource]:
    """Read the tasks that have files."""
    files = {name: find_task_files(folder, benchmark, name) for name in names}
    missing = [name for name in names if not files[name]]
    if len(missing) == len(names):
        folders = ", ".join(str(path) for path in candidate_folders(folder, benchmark))
        raise UserError(f"stream: expected a folder of train.json and test.json for each task in one of {folders}")
    if missing and missing_tasks == "refuse":
        raise UserError(
            f"stream: expected files of every task in {folder}, got none of {', '.join(missing)}; to leave them out, "
            "skip what is missing (missing_tasks=skip)"
        )
    return [
        read_instruction_task(name, files[name], benchmark, form=task_type, definitions=instructions)
        for name in names
        if files[name]
    ]


def _published_samples(spec: StreamSpec | None, tasks: _SourceTasks) -> list[int | None]:
    """Return the published number of training rows per class of each task; None for all."""
    if spec is None:
        return [None] * len(tasks.raw)
    if spec.benchmark is not None:
        all_rows = [tasks.all_published and not task.has_free_answers for task in tasks.raw]
    else:
        all_rows = [task.all_rows for task in spec.tasks]
    return [None if every_row else spec.samples_per_class for every_row in all_rows]


# -- sampling -------------------------------------------------------------------------------------------


def _sample_splits(
    splits: TaskSplits, raw: RawTask, samples_per_class: int | None, max_eval_samples: int | None, seed: int
) -> TaskSplits:
    """Sample rows; a dev split that was held out of train has at most as many as test."""
    test = sample_proportional(splits.test, max_eval_samples, seed)
    max_dev = len(test) if raw.dev is None and max_eval_samples is None else max_eval_samples
    return splits._replace(
        train=sample_balanced(splits.train, samples_per_class, seed),
        dev=sample_proportional(splits.dev, max_dev, seed),
        test=test,
    )


def _count_classes(splits: TaskSplits) -> dict[str, dict[str, int]]:
    """Count the rows of each class by split."""
    return {
        split: dict(sorted(Counter(row.label for row in rows).items())) for split, rows in splits.by_split().items()
    }


def _describe_dev(raw: Sequence[RawTask], protocol: Protocol, dev_is_test: bool) -> str:
    """Say where the dev split comes from."""
    if all(task.dev is not None for task in raw):
        return "a split of its own"
    if protocol == "paper" and dev_is_test:
        return "the rows that are evaluated on, as published"
    return f"{DEV_FRACTION:.0%} of each class held out of train by the seed, where there is none"
