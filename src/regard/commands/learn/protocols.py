"""Differences between a stream's protocols: a row per task that differs, and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.report import labels
from regard.report.page import Heading, Part, Table, Text
from regard.report.words import format_value

KEY = "protocols"
"""Key of the differences in the stream's metadata."""
_SPLITS = ("train", "dev", "test")
_SHARED = ("dev_in_test", "train_in_test", "train_in_dev")
_HEAD = (
    *("Task", "Dev and test", "Dev in test", "Train in test", "Train in dev"),
    *("Paper: train, dev, test", "Clean: train, dev, test", "Dropped by clean"),
)
_ABOUT = (
    "Rows of the published files that occur in two splits, and the rows of each protocol before sampling. Paper keeps "
    "the files as published; dev is the test split if there is no other. Clean drops rows that a later split has, and "
    "takes dev from train where dev was test."
)
_REFUSED = " Clean refuses this stream: a split or a class would have no rows left."
_FILES = {True: "identical files", False: "two files", None: "incomplete"}


def make_protocol_parts(metadata: Mapping[str, Any]) -> list[Part]:
    """Make heading, description and table; nothing if the protocols are equal or unknown."""
    entries = labels.section(labels.section(metadata, "stream"), KEY)
    by_task = {str(name): entry for name, entry in entries.items() if isinstance(entry, Mapping)}
    different = {name: entry for name, entry in by_task.items() if entry.get("paper") != entry.get("clean")}
    if not different:
        return []
    rows = [(name, f"tested on {entry.get('evaluated')}", _cells(entry)) for name, entry in different.items()]
    rows += [(f"all {len(by_task)} tasks", "", _all(list(by_task.values())))] if len(by_task) > 1 else []
    description = _ABOUT + (_REFUSED if any(entry.get("clean") is None for entry in different.values()) else "")
    return [Heading("Protocols"), Text(description), Table(rows, _HEAD, "Differences between protocols")]


def _cells(entry: Mapping[str, Any]) -> list[str]:
    shared = [format_value(entry.get(name)) for name in _SHARED]
    return [_FILES.get(entry.get("identical"), "–"), *shared, *_sizes(entry), format_value(entry.get("dropped"))]


def _all(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sum over all tasks, including those without a difference."""
    known = [entry for entry in entries if entry.get("identical") is not None]
    identical = f"{sum(entry['identical'] is True for entry in known)} of {len(known)} the same"
    total = {name: _sum([entry.get(name) for entry in entries]) for name in (*_SHARED, "dropped")}
    sizes = {
        name: {split: _sum([labels.section(entry, name).get(split) for entry in entries]) for split in _SPLITS}
        for name in ("paper", "clean")
    }
    shared = [format_value(total[name]) for name in _SHARED]
    return [identical, *shared, *_sizes(sizes), format_value(total["dropped"])]


def _sum(numbers: Sequence[Any]) -> int | None:
    """Sum numbers; None if one is unknown."""
    return None if any(number is None for number in numbers) else sum(numbers)


def _sizes(entry: Mapping[str, Any]) -> list[str]:
    """Format the rows of each split, by protocol."""
    sizes = ([labels.section(entry, name).get(split) for split in _SPLITS] for name in ("paper", "clean"))
    return ["–" if None in counts else format_value(counts) for counts in sizes]
