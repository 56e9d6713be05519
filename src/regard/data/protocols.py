"""What the protocols "paper" and "clean" make of the published files of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.data.rows import RawTask
from regard.data.splits import clean_splits
from regard.data.stream import SPLITS, Protocol, Stream
from regard.errors import UserError


def compare_splits(
    raw: Sequence[RawTask], splits: Sequence[RawTask], protocol: Protocol, seed: int
) -> dict[str, dict[str, Any]]:
    """Compare the protocols for each task that was read from files; `splits` are those of `protocol`.

    Returns:
        By task: whether dev and test are the same file byte by byte (`identical`, None if one is missing); rows that
        two files share (`dev_in_test`, `train_in_test`, `train_in_dev`); number of rows by file (`published`) and by
        split before sampling (`paper`, and `clean`, None if it refuses the stream); rows that "clean" drops
        (`dropped`); and what the test rows are (`evaluated`). Empty if files are not known.
    """
    if any(set(task.files) <= {"evaluated"} for task in raw):
        return {}
    clean: Sequence[RawTask | None] = splits
    if protocol == "paper":
        try:
            clean = clean_splits(raw, "clean", seed, dev_is_test=True)
        except UserError:  # a split or class without rows is allowed with "paper"
            clean = [None] * len(raw)
    return {task.name: _compare_task(task, task_clean) for task, task_clean in zip(raw, clean, strict=True)}


def _compare_task(task: RawTask, clean: RawTask | None) -> dict[str, Any]:
    dev = task.test if task.dev is None else task.dev
    return {
        "identical": task.files["identical_dev_test"],
        **{name: task.files[name] for name in ("dev_in_test", "train_in_test", "train_in_dev", "evaluated")},
        "published": task.files["rows"],
        "paper": {"train": len(task.train), "dev": len(dev), "test": len(task.test)},
        "clean": clean and {split: len(rows) for split, rows in clean.by_split().items()},
        "dropped": clean and clean.overlaps["dropped_from_train"] + clean.overlaps["dropped_from_dev"],
    }


def describe_protocol_differences(stream: Stream) -> dict[str, int]:
    """Sum up over all tasks how the protocols differ; empty if they do not, or if that is not known.

    Returns:
        Numbers of `tasks`, of tasks with dev and test files (`both`) and of those with the same file (`identical`);
        rows that two files share (`dev_in_test`, …); rows by protocol and split (`paper_train`, …); and rows that
        "clean" drops (`dropped`). Numbers of "clean" are missing if it refuses the stream.
    """
    comparison = stream.metadata.get("protocols", {})
    tasks = [comparison[task.name] for task in stream.tasks if task.name in comparison]
    if all(task["paper"] == task["clean"] for task in tasks):
        return {}
    cleaned = [task["clean"] for task in tasks if task["clean"] is not None]
    return {
        "tasks": len(tasks),
        "both": sum(task["identical"] is not None for task in tasks),
        "identical": sum(task["identical"] is True for task in tasks),
        **{name: sum(task[name] for task in tasks) for name in ("dev_in_test", "train_in_test", "train_in_dev")},
        **{f"paper_{split}": sum(task["paper"][split] for task in tasks) for split in SPLITS},
        **({f"clean_{split}": sum(sizes[split] for sizes in cleaned) for split in SPLITS} if cleaned else {}),
        **({"dropped": sum(task["dropped"] or 0 for task in tasks)} if cleaned else {}),
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
