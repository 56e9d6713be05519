"""Differences between a stream's protocols: a row per task that differs, and their sum."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.report import labels
from regard.report.page import Heading, Part, Table, Text
from regard.report.words import format_value

KEY = "protocols"
"""Key of the differences in the stream's metadata."""
_PROTOCOLS, _SPLITS = ("paper", "clean"), ("train", "dev", "test")
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
    rows = [
        (name, f"tested on {entry.get('evaluated')}", _cells(entry, _FILES.get(entry.get("identical"), "–")))
        for name, entry in different.items()
    ]
    if len(by_task) > 1:
        rows.append((f"all {len(by_task)} tasks", "", _sum_cells(list(by_task.values()))))
    description = _ABOUT + (_REFUSED if any(entry.get("clean") is None for entry in different.values()) else "")
    return [Heading("Protocols"), Text(description), Table(rows, _HEAD, "Differences between protocols")]


def _cells(entry: Mapping[str, Any], identical: str) -> list[str]:
    sizes = ([labels.section(entry, name).get(split) for split in _SPLITS] for name in _PROTOCOLS)
    texts = ["–" if None in counts else format_value(counts) for counts in sizes]
    shared = [format_value(entry.get(name)) for name in _SHARED]
    return [identical, *shared, *texts, format_value(entry.get("dropped"))]


def _sum_cells(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sum over all tasks, including those without a difference."""
    known = [entry["identical"] for entry in entries if entry.get("identical") is not None]
    total: dict[str, Any] = {name: _sum([entry.get(name) for entry in entries]) for name in (*_SHARED, "dropped")}
    for name in _PROTOCOLS:
        total[name] = {split: _sum([labels.section(entry, name).get(split) for entry in entries]) for split in _SPLITS}
    return _cells(total, f"{known.count(True)} of {len(known)} the same")


def _sum(numbers: Sequence[Any]) -> int | None:
    """Sum numbers; None if one is unknown."""
    return None if any(number is None for number in numbers) else sum(numbers)
