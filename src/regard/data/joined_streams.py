"""Streams one behind the other, as a model meets them that learns on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from regard.data.rows import add_row_hashes, hash_rows
from regard.data.stream import SPLITS, ClassificationTask, Split, Stream, TextTask
from regard.errors import UserError

PARTS, SHARED = "parts", "rows_shared_by_parts"
"""Keys of a joined stream's metadata: tasks of each part, and rows that were dropped since an earlier part has them."""


def join_streams(parts: Sequence[Stream]) -> Stream:
    """Return the tasks of some streams as one, each stream in its own order.

    Earlier parts stay as they are. With the protocol "clean" rows of a later part are dropped that would be both
    trained on and evaluated on: its training rows that are dev or test rows before, and its dev and test rows that are
    training rows before. All are of one protocol and seed. Raises UserError if two tasks have the same name or are of
    different sorts, or nothing is left of a split.
    """
    if len(parts) == 1:
        return parts[0]
    names = [task.name for part in parts for task in part.tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        holders = " and ".join(part.name for part in parts if twice in {task.name for task in part.tasks})
        raise UserError(f"stream: expected other tasks in each part, {twice!r} is in {holders}; give new tasks alone")
    tasks, order, shared = list(parts[0].tasks), list(parts[0].order), dict[str, dict[str, int]]()
    for part in parts[1:]:
        if part.protocol == "clean":
            part, dropped = _drop_shared_rows(part, tasks)
            shared |= dropped
        order += [len(tasks) + index for index in part.order]
        tasks += part.tasks
    metadata = dict(parts[0].metadata)
    for part in parts[1:]:  # what is told of each task by its name: overlaps, files, numbers of rows
        metadata |= {
            name: {**metadata.get(name, {}), **value}
            for name, value in part.metadata.items()
            if isinstance(value, Mapping)
        }
        if "missing" in part.metadata:
            metadata["missing"] = (*metadata.get("missing", ()), *part.metadata["missing"])
    metadata |= {PARTS: [len(part) for part in parts], SHARED: shared}
    name = " + ".join(part.name for part in parts)
    return replace(parts[0], name=name, tasks=tuple(tasks), order=tuple(order), metadata=metadata)


def first_part(stream: Stream) -> Stream:
    """Return the first of the streams that a stream was joined of; itself if it is one."""
    count = stream.metadata.get(PARTS, [len(stream)])[0]
    return replace(stream, tasks=stream.tasks[:count], order=stream.order[:count])


def _drop_shared_rows(
    part: Stream, before: Sequence[ClassificationTask | TextTask]
) -> tuple[Stream, dict[str, dict[str, int]]]:
    trained = _keys(before, ("train",))
    evaluated = _keys(before, tuple(split for split in SPLITS if split != "train"))
    tasks, dropped = [], dict[str, dict[str, int]]()
    for task in part.tasks:
        kept: dict[str, Any] = {
            split: _without(task, split, trained if split != "train" else evaluated) for split in SPLITS
        }
        counts: dict[str, int] = {split: len(task.split(split)) - len(kept[split]) for split in SPLITS}
        if any(counts.values()):
            dropped[task.name] = counts
            task = replace(task, **kept)
        tasks.append(task)
    return add_row_hashes(replace(part, tasks=tuple(tasks))), dropped


def _keys(tasks: Sequence[ClassificationTask | TextTask], splits: Sequence[Split]) -> set[str]:
    return {key for task in tasks for split in splits for key in hash_rows(task.split(split))}


def _without(task: ClassificationTask | TextTask, split: Split, banned: Collection[str]) -> Any:
    """Return the rows of a split that are not banned. Raises UserError if none is left."""
    rows: Any = task.split(split)
    kept = [index for index, key in enumerate(hash_rows(rows)) if key not in banned]
    if len(rows) and not kept:
        raise UserError(f"stream: all {split} rows of {task.name} are in other splits of the tasks before it")
    return replace(rows, **{one.name: tuple(getattr(rows, one.name)[index] for index in kept) for one in fields(rows)})
