"""Streams made of others: tasks made of classes of one stream each, and tasks held out."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from regard.data.rows import LabeledRow, LabeledRows, RawTask, TextKey, hash_rank, make_classification_task
from regard.data.splits import rank_key
from regard.data.stream import SPLITS, ClassificationTask, Stream, TextTask
from regard.data.streams import check_seed
from regard.errors import UserError, check_int

MIN_SPLIT_ROWS = 4  # of a class, in each split of a task made of classes


class _ClassRows(NamedTuple):
    """Rows of a class by split, their source and their stream."""

    rows: Mapping[str, list[LabeledRow]]
    source: str
    stream: str

    @property
    def max_tasks(self) -> int:
        """The number of tasks that the rows are enough for."""
        return min(len(split_rows) // MIN_SPLIT_ROWS for split_rows in self.rows.values())


_ClassPool = dict[str, _ClassRows]  # classes of a stream by name, all with the same number of texts per row


def split_classes(streams: Sequence[Stream], count: int, seed: int = 0, *, classes: int = 2) -> Stream:
    """Make `count` classification tasks of `classes` classes of one stream each; no row is in two tasks.

    If there are more tasks than classes, a class is in several tasks, each time with other classes and other rows; its
    rows are divided evenly, at least four per class and split. No two tasks have the same classes, and classes
    are used as evenly as their rows allow (`metadata["uses"]`). Rows that an earlier stream or split has are dropped.
    """
    check_seed(seed)
    check_int("tasks", count, least=1)
    check_int("classes", classes, least=2)
    if not streams or any(stream.text for stream in streams):
        raise UserError("streams: expected streams of classification, at least one, got none or one from text to text")
    pools = _collect_classes(streams)
    selected = _select_classes(pools, count, classes, seed)
    uses = Counter((index, label) for index, labels in selected for label in labels)
    shares = {key: _divide_evenly(pools[key[0]][key[1]], parts, seed) for key, parts in uses.items()}
    tasks = []
    for number, (index, labels) in enumerate(selected):
        parts = [shares[index, label].pop() for label in labels]
        name = f"{number:03d}-{re.sub(r'[^0-9a-z]+', '-', '-'.join(labels).casefold())}"
        splits: dict[str, Any] = {split: tuple(row for part in parts for row in part[split]) for split in SPLITS}
        source = pools[index][labels[0]].source
        tasks.append(make_classification_task(RawTask(name=name, labels=labels, source=source, **splits)))
    uses_by_name: Counter[str] = Counter()
    for (index, label), number in sorted(uses.items()):
        uses_by_name[f"{pools[index][label].stream}: {label}"] += number
    return Stream(
        name=f"{'+'.join(stream.name for stream in streams)}-{count}",
        tasks=tuple(tasks),
        order=tuple(range(count)),
        seed=seed,
        metadata={"of": tuple(stream.name for stream in streams), "uses": dict(uses_by_name)},
    )


def _collect_classes(streams: Sequence[Stream]) -> list[_ClassPool]:
    """Collect the classes of each stream, without rows of an earlier stream or split; test rows come first."""
    seen: set[TextKey] = set()
    pools: dict[tuple[int, int], _ClassPool] = {}
    for index, stream in enumerate(streams):
        sources = {label: task.source for task in stream.tasks for label in task.labels}
        for split in reversed(SPLITS):
            for task in stream.tasks:
                assert isinstance(task, ClassificationTask), "checked by the caller"
                examples = task.split(split)
                for texts, label in zip(examples.texts, examples.labels, strict=True):
                    row = LabeledRow.of(texts, task.labels[label])
                    if row.key not in seen:
                        seen.add(row.key)
                        pool = pools.setdefault((index, len(row.texts)), {})
                        empty = _ClassRows({name: [] for name in SPLITS}, sources[row.label], stream.name)
                        pool.setdefault(row.label, empty).rows[split].append(row)
    return list(pools.values())


def _select_classes(pools: Sequence[_ClassPool], count: int, size: int, seed: int) -> list[tuple[int, tuple[str, ...]]]:
    """Select the pool and the `size` classes of each task: those used least, no combination twice."""
    uses: Counter[tuple[int, str]] = Counter()
    selected: list[tuple[int, tuple[str, ...]]] = []
    while len(selected) < count:
        candidates = []
        for index, pool in enumerate(pools):
            ranks = {
                label: (number, hash_rank("classes", seed, f"{number} {index} {label}"))
                for label, rows in pool.items()
                if (number := uses[index, label]) < rows.max_tasks
            }
            free = sorted(ranks, key=ranks.__getitem__)
            used = {frozenset(labels) for number, labels in selected if number == index}
            labels = next((labels for labels in combinations(free, size) if frozenset(labels) not in used), None)
            if labels is not None:
                most_used = max(uses[index, label] for label in labels)
                candidates.append((most_used, hash_rank("tasks", seed, f"{len(selected)} {index}"), index, labels))
        if not candidates:
            raise UserError(f"tasks: expected classes and rows for {count} tasks, there are enough for {len(selected)}")
        *_, index, labels = min(candidates)
        uses.update((index, label) for label in labels)
        selected.append((index, labels))
    return selected


def _divide_evenly(rows_of_class: _ClassRows, parts: int, seed: int) -> list[dict[str, LabeledRows]]:
    splits = rows_of_class.rows.items()
    order = {split: sorted(rows, key=lambda row: rank_key("rows", seed, row.key)) for split, rows in splits}
    return [{split: tuple(rows[part::parts]) for split, rows in order.items()} for part in range(parts)]


def hold_out_tasks(stream: Stream, names: Sequence[str]) -> tuple[Stream, tuple[ClassificationTask | TextTask, ...]]:
    """Return the stream without some tasks (`metadata["unseen"]`), and these, which are never trained on."""
    all_names = [task.name for task in stream.tasks]
    unknown = [name for name in names if name not in all_names]
    if unknown or not names or len(set(names)) == len(all_names):
        text = unknown[0] if unknown else ", ".join(names) or "none"
        raise UserError(f"unseen: expected some of the tasks {', '.join(all_names)}, but not all, got {text}")
    remaining = [index for index, name in enumerate(all_names) if name not in names]
    order = [stream.order[index] for index in remaining]
    held_out = tuple(dict.fromkeys(names))
    shorter = replace(
        stream,
        tasks=tuple(stream.tasks[index] for index in remaining),
        order=tuple(sorted(order).index(number) for number in order),
        metadata={**stream.metadata, "unseen": held_out},
    )
    return shorter, tuple(stream.tasks[all_names.index(name)] for name in held_out)
