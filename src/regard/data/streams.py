"""Streams for continual learning: the built-in ones, and a user's own."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from regard.data.benchmarks import Benchmark, TaskType
from regard.data.dataset_files import read_dataset, read_stdlib_tasks
from regard.data.instructions import candidate_folders, find_task_files, read_hub_task, read_instruction_task
from regard.data.joined_streams import join_streams
from regard.data.missing_values import LEFT_OUT, MINUS_ONE, MissingValues
from regard.data.names_alike import warn_of_labels_alike_between
from regard.data.rows import RawTask, hash_rank, make_classification_task, make_text_task
from regard.data.splits import DEV_FRACTION, clean_splits, compare_splits, sample_balanced, sample_proportional
from regard.data.stream import METRICS, Metric, Protocol, Stream, check_order
from regard.data.stream_catalog import STREAMS, StreamSpec
from regard.data.tables import is_table, list_suffixes
from regard.data.user_rows import INSTRUCTION
from regard.data.user_tasks import read_user_tasks
from regard.errors import UserError, check_choice, check_int

MissingTasks = Literal["refuse", "skip"]
STDLIB = "stdlib-split"

_SAVED_TO_DISK = (("dataset_dict.json",), ("dataset_info.json", "state.json"))
"""What a folder of Dataset.save_to_disk has: that of several splits, and that of one."""


def read_stream(
    name_or_path: str | Path,
    folder: str | Path | None = None,
    *,
    samples_per_class: int | None = None,
    max_eval_samples: int | None = None,
    order: str | Sequence[int] = "paper",
    seed: int = 0,
    protocol: Protocol = "clean",
    task_type: TaskType | None = None,
    missing_tasks: MissingTasks = "refuse",
    missing_values: MissingValues = "skip",
    instructions: bool = False,
    metric: Metric | None = None,
) -> Stream:
    """Read a built-in stream, or one of a user's own tasks.

    Rows are sampled by the seed; fewer rows are a subset of more. `metadata` has what the splits have in common
    (`overlaps`), and of instruction tasks what `files` contain and what `protocols` make of them.

    Args:
        name_or_path: A name in `STREAMS`, or a table or folder that `regard.data.user_tasks.read_user_tasks` reads; or
            several with commas between, which are joined (`regard.data.joined_streams`).
        folder: Folder of published files, see `regard.data.stream_catalog.DATASETS`; None for the hub.
        samples_per_class: Maximum number of training rows per class; None for the published number, or all rows of a
            user's own tasks and of the files of "long-sequence".
        max_eval_samples: Maximum number of test rows per task, and of dev rows; None for the published number.
        order: "paper", the name of a published order, "random" (by the seed), or published task indices, as "2-0-1";
            a name or indices are of the first of several streams.
        seed: Seed of sampled rows, and of a random order.
        protocol: "clean" without rows that splits share, or "paper"; see `regard.data.splits.clean_splits`.
        task_type: How to read tasks with instructions, and a user's own. By default the first way that the stream has.
        missing_tasks: "refuse" tasks without files, or "skip" them; `metadata["missing"]` names them.
        missing_values: "skip" rows of a user's own tasks without a label, an answer or a text, with a warning, or
            "refuse" them; `metadata["left_out"]` counts them by task. The label −1 is none where no training row of the
            task has it, with "skip-minus-one" everywhere; else it is a class, counted in `metadata["minus_one"]`.
        instructions: Put the definition of a task before the texts of classification. Those of a user's own tasks are
            put there in any case.
        metric: How answers to a user's own text-to-text tasks are scored; by default "rouge-l-unicode" if they are
            free, and "exact-match-unicode" if they are labels.
    """
    if len(parts := split_parts(str(name_or_path))) > 1:
        read = partial(
            read_stream,
            samples_per_class=samples_per_class,
            max_eval_samples=max_eval_samples,
            seed=seed,
            protocol=protocol,
            task_type=task_type,
            missing_tasks=missing_tasks,
            missing_values=missing_values,
            instructions=instructions,
            metric=metric,
        )
        one_each = _share_out(parts, folder, order)
        with _naming_first(parts[0]):
            return join_streams([read(part, own_folder, order=own_order) for part, own_folder, own_order in one_each])
    check_seed(seed)
    for option, count in (("samples_per_class", samples_per_class), ("max_eval_samples", max_eval_samples)):
        if count is not None:
            check_int(option, count, least=1)
    check_choice("protocol", protocol, get_args(Protocol))
    check_choice("missing-tasks", missing_tasks, get_args(MissingTasks))
    check_choice("missing-values", missing_values, get_args(MissingValues))
    if metric is not None:
        check_choice("metric", metric, METRICS)
    name, folder = str(name_or_path), None if folder is None else Path(folder)
    spec = STREAMS.get(name)
    benchmark = spec.benchmark if spec else None
    metadata: dict[str, Any] = {"published": spec.paper if spec else None}
    if spec is None:
        raw = _read_user(name, folder, seed, task_type, missing_values)
        metadata |= _describe_user(raw, name, instructions)
        if metric is not None and metadata["task_type"] != "generation":
            raise UserError(f"metric: expected none with {name!r}, whose tasks have classes, got {metric!r}")
    elif metric is not None:
        raise UserError(f"metric: expected none with {name!r}, which has its own, got {metric!r}")
    elif benchmark is None:
        _refuse_instructions(name, task_type, instructions)
        raw = _read_datasets(name, spec, folder)
    else:
        task_type = task_type or benchmark.task_types[0]
        raw = _read_instruction_tasks(spec, benchmark, folder, task_type, missing_tasks, instructions)
        metadata |= _describe_instruction_tasks(raw, spec, task_type, instructions)
    if samples_per_class is not None or spec is None:
        samples = [samples_per_class] * len(raw)
    else:
        samples = _published_samples(raw, spec, folder)
    if max_eval_samples is None and spec is not None:
        max_eval_samples = spec.max_eval_samples
    indices = _resolve_order(order, spec, [task.name for task in raw], seed)
    stream = assemble_stream(
        name if spec else Path(name).resolve().name,
        raw,
        metric=metric or (_choose_metrics(raw, benchmark) if metadata.get("task_type") == "generation" else None),
        samples_per_class=samples,
        max_eval_samples=max_eval_samples,
        seed=seed,
        protocol=protocol,
        dev_is_test=spec is not None,
        metadata=metadata,
    )
    return stream.reorder(indices)


def split_parts(names: str) -> tuple[str, ...]:
    """Return the streams that a text names, in order: several have commas between, unless it is a path itself."""
    if "," not in names or Path(names).exists():
        return (names,)
    return tuple(part.strip() for part in names.split(","))


def _share_out(
    parts: Sequence[str], folder: str | Path | None, order: str | Sequence[int]
) -> Iterator[tuple[str, str | Path | None, str | Sequence[int]]]:
    """Yield each of several streams with its folder and order.

    A folder is that of all published ones; where there is none, tasks of one's own are given it, and refuse it.
    """
    published = {part for part in parts if part in STREAMS and part != STDLIB}
    for part in parts:
        takes_folder = part in published if published else part != STDLIB
        is_shared = order in ("paper", "random") or part == parts[0]
        yield part, folder if takes_folder else None, order if is_shared else "paper"


@contextmanager
def _naming_first(part: str) -> Iterator[None]:
    """Let a `UserError` about an order say that it is of the first of several streams."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith("order: "):
            raise
        raise UserError(f"{error}; of several streams it is the order of the first ({part})") from None


def assemble_stream(
    name: str,
    raw: Sequence[RawTask],
    *,
    metric: Metric | Sequence[Metric] | None = None,
    samples_per_class: Sequence[int | None],
    max_eval_samples: int | None,
    seed: int,
    protocol: Protocol,
    dev_is_test: bool = False,
    metadata: Mapping[str, Any],
) -> Stream:
    """Make a stream of tasks as read: clean their splits (see `clean_splits`) and sample rows.

    Tasks with a `metric`, one for all or one each, are text to text. `samples_per_class` has one number per task.
    """
    available = clean_splits(raw, protocol, seed, dev_is_test=dev_is_test)
    sampled = [
        _sample_splits(splits, task, count, max_eval_samples, seed)
        for splits, task, count in zip(available, raw, samples_per_class, strict=True)
    ]
    comparison = compare_splits(raw, available, protocol, seed)
    left_out = {task.name: task.left_out for task in raw if task.left_out}
    minus_one = {task.name: task.minus_one for task in raw if task.minus_one}
    metrics = [metric] * len(raw) if metric is None or isinstance(metric, str) else metric
    return Stream(
        name=name,
        tasks=tuple(
            make_text_task(task, metric) if metric else make_classification_task(task)
            for task, metric in zip(sampled, metrics, strict=True)
        ),
        order=tuple(range(len(raw))),
        seed=seed,
        protocol=protocol,
        metadata={
            **metadata,
            **({"files": {task.name: task.files for task in raw}} if any(task.files for task in raw) else {}),
            "rows": {task.name: count for task, count in zip(raw, samples_per_class, strict=True)},
            "eval_rows": max_eval_samples,
            "dev": _describe_dev(raw, protocol, dev_is_test),
            "available": {splits.name: _count_classes(splits) for splits in available},
            "drawn": {splits.name: _count_classes(splits) for splits in sampled},
            "overlaps": {splits.name: dict(splits.overlaps) for splits in available},
            **({LEFT_OUT: left_out} if left_out else {}),
            **({MINUS_ONE: minus_one} if minus_one else {}),
            **({"protocols": comparison} if comparison else {}),
        },
    )


def check_seed(seed: Any) -> None:
    """Raise UserError if the seed is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed: expected a whole number, got {seed!r}")


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
    indices = tuple(map(int, parts))
    check_order(indices, count)
    return indices


def _resolve_order(order: str | Sequence[int], spec: StreamSpec | None, names: list[str], seed: int) -> tuple[int, ...]:
    """Return indices among `names`; missing tasks are left out of a published order."""
    if not isinstance(order, str):
        check_order(order, len(names))
        return tuple(order)
    orders = spec.orders if spec is not None else {}
    if orders and order in ("paper", "1", *orders):
        published = orders[order] if order in orders else next(iter(orders.values()))
        return tuple(names.index(name) for name in published if name in names)
    is_name = order.isdecimal() or (order != "random" and not re.fullmatch(r"[\d\s,-]+", order))
    if orders and is_name:
        allowed = f"paper, {', '.join(orders)}, random or numbers of tasks as 2-0-1"
        raise UserError(f"order: expected one of {allowed}, got {order!r}")
    return parse_order(order, len(names), seed)


def _read_user(
    name: str, folder: Path | None, seed: int, task_type: TaskType | None, missing_values: MissingValues
) -> list[RawTask]:
    path = Path(name)
    if not (path.exists() or is_table(name)):
        allowed = f"{', '.join(STREAMS)}, a file ({list_suffixes()}) or a folder with a folder for each task"
        raise UserError(f"stream: expected one of {allowed}; got {name!r}")
    if folder is not None:
        raise UserError(f"data: expected no folder of published files with tasks of your own ({name}), got {folder}")
    if task_type is not None:
        check_choice("task-type", task_type, get_args(TaskType))
    if any(all((path / name).is_file() for name in names) for names in _SAVED_TO_DISK):
        way = "write each split to a table: rows.to_parquet(…)"
        raise UserError(f"stream: expected a table or a folder of tables, {path} is of Dataset.save_to_disk; {way}")
    tasks = read_user_tasks(path, seed, task_type, missing_values)
    warn_of_labels_alike_between(tasks)
    return tasks


def _describe_user(raw: Sequence[RawTask], name: str, instructions: bool) -> dict[str, Any]:
    """Describe how a user's own tasks were read. Raises UserError if instructions are asked for that they lack."""
    has_instructions = any(task.has_instructions for task in raw)
    if instructions and not has_instructions:
        raise UserError(f"instructions: expected a column {' or '.join(INSTRUCTION)} in {name}, found none")
    is_text = any(row.answers for row in raw[0].train)
    return {"task_type": "generation" if is_text else "classification", "instructions": has_instructions}


def _choose_metrics(raw: Sequence[RawTask], benchmark: Benchmark | None) -> list[Metric]:
    """Return how answers are scored: as published; a user's by words, or exact matches, of any script."""
    if benchmark is None:
        return ["rouge-l-unicode" if raw[0].has_free_answers else "exact-match-unicode"] * len(raw)
    return [benchmark.metrics.get(task.name, benchmark.metric) for task in raw]


def _published_samples(raw: Sequence[RawTask], spec: StreamSpec, folder: Path | None) -> list[int | None]:
    """Return how many training rows a class of each task has; None for all, as of files with the published rows."""
    if spec.benchmark is None:
        return [None if task.all_rows else spec.samples_per_class for task in spec.tasks]
    return [None if folder is not None and not task.has_free_answers else spec.samples_per_class for task in raw]


def _refuse_instructions(name: str, task_type: TaskType | None, instructions: bool) -> None:
    """Refuse what only tasks with instructions have."""
    streams = ", ".join(stream for stream, spec in STREAMS.items() if spec.benchmark)
    if task_type not in (None, "classification"):
        raise UserError(f"task-type: expected classification with {name!r} (others: {streams}), got {task_type!r}")
    if instructions:
        raise UserError(f"instructions: expected none, or one of the streams {streams}, got {name!r}")


def _read_datasets(name: str, spec: StreamSpec, folder: Path | None) -> list[RawTask]:
    if name == STDLIB:
        return read_stdlib_tasks(spec)
    rows = {dataset: read_dataset(dataset, folder) for dataset in dict.fromkeys(task.dataset for task in spec.tasks)}
    raw = []
    for task in spec.tasks:
        *splits, source = rows[task.dataset]
        train, test = (tuple(row for row in split if row.label in task.labels) for split in splits)
        raw.append(RawTask(name=task.name, labels=task.labels, train=train, dev=None, test=test, source=source))
    return raw


def _read_instruction_tasks(
    spec: StreamSpec,
    benchmark: Benchmark,
    folder: Path | None,
    task_type: TaskType,
    missing_tasks: MissingTasks,
    instructions: bool,
) -> list[RawTask]:
    check_choice("task-type", task_type, benchmark.task_types)
    if instructions and task_type == "generation":
        raise UserError("instructions: expected none with the task type generation, whose prompts have them anyway")
    names = [task.name for task in spec.tasks]
    if folder is not None:
        files = {name: paths for name in names if (paths := find_task_files(folder, benchmark, name))}
        if not files:
            folders = ", ".join(str(path) for path in candidate_folders(folder, benchmark))
            raise UserError(f"stream: expected a folder of train.json and test.json for each task in one of {folders}")
        missing = ", ".join(name for name in names if name not in files)
        if missing and missing_tasks == "refuse":
            advice = "to leave them out, skip what is missing (missing-tasks=skip)"
            raise UserError(f"stream: expected files of every task in {folder}, got none of {missing}; {advice}")
        options: dict[str, Any] = {"task_type": task_type, "definitions": instructions}
        raw = [read_instruction_task(name, paths, benchmark, **options) for name, paths in files.items()]
    elif task_type == "generation" or instructions:
        raise UserError("folder: expected one with the published files, the hub has no definitions of these tasks")
    else:
        raw = [read_hub_task(benchmark.tasks[name]) for name in names]
    for task in raw:
        check_labels(task.name, task.labels)
    return raw


def _describe_instruction_tasks(
    raw: Sequence[RawTask], spec: StreamSpec, task_type: TaskType, instructions: bool
) -> dict[str, Any]:
    """Describe how tasks with instructions were read."""
    available = {task.name for task in raw}
    return {
        "task_type": task_type,
        "instructions": instructions or task_type == "generation",
        "missing": tuple(task.name for task in spec.tasks if task.name not in available),
    }


def check_labels(name: str, labels: Sequence[str]) -> None:
    """Raise UserError if two labels of a task differ only in letter case, punctuation and spaces."""
    by_letters: dict[str, str] = {}
    for label in labels:
        letters = "".join(sign for sign in unicodedata.normalize("NFKC", label).casefold() if sign.isalnum())
        if letters in by_letters:
            same = f"{by_letters[letters]!r} and {label!r} are the same but for case, punctuation and spaces"
            raise UserError(f"labels: expected labels of {name!r} that differ in words, {same}")
        by_letters[letters] = label


def _sample_splits(
    splits: RawTask, raw: RawTask, samples_per_class: int | None, max_eval_samples: int | None, seed: int
) -> RawTask:
    """Sample rows; a dev split that was held out of train has at most as many as test."""
    test = sample_proportional(splits.test, max_eval_samples, seed)
    max_dev = len(test) if raw.dev is None and max_eval_samples is None else max_eval_samples
    return replace(
        splits,
        train=sample_balanced(splits.train, samples_per_class, seed),
        dev=sample_proportional(splits.by_split()["dev"], max_dev, seed),
        test=test,
    )


def _count_classes(task: RawTask) -> dict[str, dict[str, int]]:
    return {split: dict(sorted(Counter(row.label for row in rows).items())) for split, rows in task.by_split().items()}


def _describe_dev(raw: Sequence[RawTask], protocol: Protocol, dev_is_test: bool) -> str:
    if all(task.dev is not None for task in raw):
        return "a split of its own"
    if protocol == "paper" and dev_is_test:
        return "the rows that are evaluated on, as published"
    return f"{DEV_FRACTION:.0%} of each class held out of train by the seed, where there is none"
