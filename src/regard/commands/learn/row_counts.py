"""Sentences on the rows of a stream: left out, doubtful, or too alike."""

from collections.abc import Mapping
from typing import Any

from regard.data.missing_values import LEFT_OUT, MINUS_ONE
from regard.data.splits import AMBIGUOUS, NEAR_COPIES
from regard.report import labels
from regard.report.labels import pluralize

_BY_TASK = {
    LEFT_OUT: "Rows without a label or a text, which were left out",
    MINUS_ONE: "Rows with the label -1, taken as a class, which may mark rows without a label",
}
_OVERLAPS = {
    "dropped_from_train": "Training rows left out, whose text is there twice, or in dev or test of a task",
    "dropped_from_dev": "Dev rows left out, whose text is there twice, or in test of a task",
    AMBIGUOUS: "Texts with several labels, of which one at most is right",
    NEAR_COPIES: "Training rows that differ from a test row in punctuation or signs alone",
}

MAX_NAMED = 3
"""Tasks that a sentence names, at most."""


def describe_rows(stream: Mapping[str, Any]) -> list[str]:
    """Write one sentence for everything that was counted of the rows, from the metadata of the stream."""
    overlaps = labels.section(stream, "overlaps")
    by_task = [(title, labels.section(stream, name)) for name, title in _BY_TASK.items()]
    by_task += [
        (title, {task: labels.section(overlaps, task).get(name) for task in overlaps})
        for name, title in _OVERLAPS.items()
    ]
    by_task += _describe_limits(stream)
    return [
        f"{title}: {_name_tasks({task: count for task, count in counts.items() if count})}."
        for title, counts in by_task
        if any(counts.values())
    ]


def _describe_limits(stream: Mapping[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """Say of each split that limits cut what they do, and how many rows of each task; the limit where it is one."""
    train, test = (_count_beyond(stream, split) for split in ("train", "test"))
    by_class, drawn = labels.section(stream, "rows"), labels.section(stream, "drawn")
    rows = {task: sum(labels.section(labels.section(drawn, task), "test").values()) for task in test}
    return [
        (f"Training rows beyond --samples-per-class{_name_limit(by_class, train)}, not used", train),
        (f"Test rows beyond --max-eval-samples{_name_limit(rows, test)}, not scored", test),
    ]


def _name_limit(limits: Mapping[str, int | None], beyond: Mapping[str, int]) -> str:
    most = {limits.get(task) for task, count in beyond.items() if count}
    return f" {next(iter(most))}" if len(most) == 1 and None not in most else ""


def _count_beyond(stream: Mapping[str, Any], split: str) -> dict[str, int]:
    """Count the rows of each task in a split that there are but were not drawn."""
    available, drawn = (
        {task: sum(labels.section(labels.section(counted, task), split).values()) for task in counted}
        for counted in (labels.section(stream, "available"), labels.section(stream, "drawn"))
    )
    return {task: count - drawn.get(task, count) for task, count in available.items()}


def _name_tasks(counts: Mapping[str, int]) -> str:
    """Say how many rows the first tasks have, and how many all others have together."""
    named = ", ".join(f"{count} of {task}" for task, count in list(counts.items())[:MAX_NAMED])
    rest = list(counts.values())[MAX_NAMED:]
    return f"{named} and {sum(rest)} of {pluralize(len(rest), 'other task')}" if rest else named
