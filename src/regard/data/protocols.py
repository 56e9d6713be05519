"""What the protocols "paper" and "clean" make of the published files of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.data.rows import RawTask
from regard.data.splits import TaskSplits, clean_splits
from regard.data.stream import SPLITS, Protocol, Stream
from regard.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ProtocolComparison:
    """What the files of a task have in common, and the rows that each protocol takes of them.

    Attributes:
        identical: Whether dev and test are the same file byte by byte; None if one is missing.
        published: Number of rows by file.
        paper, clean: Number of rows by split before sampling; `clean` is None if it refuses the stream.
        dropped: Number of rows that "clean" drops.
        evaluated: What the test rows are.
    """

    task: str
    identical: bool | None
    dev_in_test: int
    train_in_test: int
    train_in_dev: int
    published: Mapping[str, int]
    paper: Mapping[str, int]
    clean: Mapping[str, int] | None
    dropped: int | None
    evaluated: str

    def __str__(self) -> str:
        """Format the comparison as one line."""
        identical = {
            True: "dev and test are the same file",
            False: "dev and test differ",
            None: "there is no dev and test file both",
        }
        shared = f"{self.dev_in_test} dev and {self.train_in_test} train rows are test rows"
        sizes = "; ".join(
            f"{name}: {', '.join(f'{count} {split}' for split, count in counts.items()) if counts else 'refused'}"
            for name, counts in (("files", self.published), ("paper", self.paper), ("clean", self.clean))
        )
        return f"{self.task}: {identical[self.identical]}, {shared}; {sizes}; tested on {self.evaluated}"


def compare_splits(
    raw: Sequence[RawTask], splits: Sequence[TaskSplits], files: Mapping[str, Any], protocol: Protocol, seed: int
) -> dict[str, dict[str, Any]]:
    """Return the fields of `ProtocolComparison` by task; empty if the files are not known.

    Args:
        splits: Result of `clean_splits` with `protocol`.
        files: What the files of each task contain, from `regard.data.instructions`.
    """
    if any(set(files.get(task.name, {})) <= {"evaluated"} for task in raw):
        return {}
    clean: Sequence[TaskSplits | None] = splits
    if protocol == "paper":
        try:
            clean = clean_splits(raw, "clean", seed, dev_is_test=True)
        except UserError:  # a split or class without rows is allowed with "paper"
            clean = [None] * len(raw)
    return {
        task.name: _compare_task(task, task_clean, files[task.name])
        for task, task_clean in zip(raw, clean, strict=True)
    }


def _compare_task(task: RawTask, clean: TaskSplits | None, files: Mapping[str, Any]) -> dict[str, Any]:
    dev = task.test if task.dev is None else task.dev
    return {
        "identical": files["identical_dev_test"],
        **{name: files[name] for name in ("dev_in_test", "train_in_test", "train_in_dev", "evaluated")},
        "published": files["rows"],
        "paper": {"train": len(task.train), "dev": len(dev), "test": len(task.test)},
        "clean": clean and {split: len(getattr(clean, split)) for split in SPLITS},
        "dropped": clean and clean.overlaps["dropped_from_train"] + clean.overlaps["dropped_from_dev"],
    }


def compare_protocols(stream: Stream) -> tuple[ProtocolComparison, ...]:
    """Compare the protocols for each task of a stream that was read from files; no file is read again.

    Raises:
        UserError: The stream has no tasks with instructions, or was not read from files.
    """
    comparisons = stream.metadata.get("protocols", {})
    if any(task.name not in comparisons for task in stream.tasks):
        raise UserError(f"protocols: expected a stream with instructions, read from files, got {stream.name!r}")
    return tuple(ProtocolComparison(task=task.name, **comparisons[task.name]) for task in stream.tasks)


def describe_protocol_differences(stream: Stream) -> dict[str, int]:
    """Sum up over all tasks how the protocols differ; empty if they do not, or if that is not known.

    Returns:
        Numbers of `tasks`, of tasks with dev and test files (`both`) and of those with the same file (`identical`);
        rows that two files share (`dev_in_test`, …); rows by protocol and split (`paper_train`, …); and rows that
        "clean" drops (`dropped`). Numbers of "clean" are missing if it refuses the stream.
    """
    if "protocols" not in stream.metadata:
        return {}
    tasks = compare_protocols(stream)
    if all(task.paper == task.clean for task in tasks):
        return {}
    cleaned = [task.clean for task in tasks if task.clean is not None]
    return {
        "tasks": len(tasks),
        "both": sum(task.identical is not None for task in tasks),
        "identical": sum(task.identical is True for task in tasks),
        **{name: sum(getattr(task, name) for task in tasks) for name in ("dev_in_test", "train_in_test")},
        "train_in_dev": sum(task.train_in_dev for task in tasks),
        **{f"paper_{split}": sum(task.paper[split] for task in tasks) for split in SPLITS},
        **({f"clean_{split}": sum(counts[split] for counts in cleaned) for split in SPLITS} if cleaned else {}),
        **({"dropped": sum(task.dropped or 0 for task in tasks)} if cleaned else {}),
    }


def format_protocol_differences(numbers: Mapping[str, float]) -> str:
    """Format the numbers of `describe_protocol_differences` as three lines."""
    shared = f"{numbers['dev_in_test']:,} of dev, {numbers['train_in_test']:,} of train"
    files = f"; {numbers['identical']} of {numbers['both']} tasks with both have byte-identical dev and test files"
    clean = "refused, a split or a class would be left without rows"
    if "dropped" in numbers:
        sizes = _format_sizes(numbers, "clean")
        clean = f"{sizes}; {numbers['dropped']:,} dropped, dev held out of train where it was test"
    paper = _format_sizes(numbers, "paper")
    lines = (
        f"protocols: rows of the files that are test rows as well: {shared}{files if numbers['both'] else ''}",
        f"  --protocol paper: {paper}; as published, dev being test where it has no rows else",
        f"  --protocol clean: {clean}",
    )
    return "\n".join(lines)


def _format_sizes(numbers: Mapping[str, float], protocol: str) -> str:
    train, dev, test = (f"{numbers[f'{protocol}_{split}']:,}" for split in SPLITS)
    return f"{train} train, {dev} dev and {test} test rows"
