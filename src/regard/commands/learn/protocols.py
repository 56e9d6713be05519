"""What the protocols of a stream differ in: a row for each task in which they do, and one for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.report import labels
from regard.report.page import Heading, Part, Table, Text
from regard.report.words import format_value

KEY = "protocols"
"""Where the record of a stream tells it."""
_SPLITS = ("train", "dev", "test")
_SHARED = ("dev_in_test", "train_in_test", "train_in_dev")
_HEAD = (
    *("Task", "Dev and test", "Dev in test", "Train in test", "Train in dev"),
    *("Paper: train, dev, test", "Clean: train, dev, test", "Dropped by clean"),
)
_ABOUT = (
    "Rows of the published files that are in two splits, and the rows of each protocol before any are drawn. Paper "
    "keeps them as published, dev being the test rows where it has no others; clean drops what a later split has, and "
    "holds dev out of train where it was test."
)
_REFUSED = " Here clean refuses this stream: a split or a class would be left without rows."
_FILES = {True: "the same, byte for byte", False: "two files", None: "not both there"}

Row = Mapping[str, Any]


def protocols(record: Mapping[str, Any]) -> list[Part]:
    """The heading, how to read it, and the table; nothing where the protocols are alike, or it is not known."""
    told = labels.section(labels.section(record, "stream"), KEY)
    every = {str(name): one for name, one in told.items() if isinstance(one, Mapping)}
    apart = {name: one for name, one in every.items() if one.get("paper") != one.get("clean")}
    if not apart:
        return []
    rows = [(name, f"tested on {one.get('evaluated')}", _cells(one)) for name, one in apart.items()]
    rows += [(f"all {len(every)} tasks", "", _all(list(every.values())))] if len(every) > 1 else []
    about = _ABOUT + (_REFUSED if any(one.get("clean") is None for one in apart.values()) else "")
    return [Heading("Protocols"), Text(about), Table(rows, _HEAD, "What the protocols differ in")]


def _cells(one: Row) -> list[str]:
    shared = [format_value(one.get(name)) for name in _SHARED]
    return [_FILES.get(one.get("identical"), "–"), *shared, *_sizes(one), format_value(one.get("dropped"))]


def _all(every: Sequence[Row]) -> list[str]:
    """The sums over all tasks, also those in which nothing differs."""
    both = [one for one in every if one.get("identical") is not None]
    same = f"{sum(one['identical'] is True for one in both)} of {len(both)} the same"
    total = {name: _sum([one.get(name) for one in every]) for name in (*_SHARED, "dropped")}
    sizes = {
        name: {split: _sum([labels.section(one, name).get(split) for one in every]) for split in _SPLITS}
        for name in ("paper", "clean")
    }
    shared = [format_value(total[name]) for name in _SHARED]
    return [same, *shared, *_sizes(sizes), format_value(total["dropped"])]


def _sum(numbers: Sequence[Any]) -> int | None:
    """Their sum; None where one is not known."""
    return None if any(one is None for one in numbers) else sum(numbers)


def _sizes(one: Row) -> list[str]:
    """The rows of each split, by protocol."""
    found = ([labels.section(one, name).get(split) for split in _SPLITS] for name in ("paper", "clean"))
    return ["–" if None in sizes else format_value(sizes) for sizes in found]
