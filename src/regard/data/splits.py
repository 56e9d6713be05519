"""Splits without overlap and rows sampled from them, and what the protocols "paper" and "clean" make of a stream.

Two rows are the same if their texts are, but for case, spaces and Unicode form. Rows are ranked by a hash of their
words and the seed. So the sample depends neither on the order of a file nor on the other rows, and a smaller sample is
a subset of a larger one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.data.rows import (
    FREE_ANSWER,
    LabeledRow,
    LabeledRows,
    RawTask,
    TextKey,
    describe_numbers,
    hash_rank,
    hash_rows,
)
from regard.data.stream import SPLITS, ClassificationTask, Protocol, Stream, TextTask
from regard.errors import UserError, warn_user

TEXT_SHOWN = 40  # characters of a text in a message
DEV_FRACTION = 0.1  # fraction of each class that is held out of training rows if there is no dev split


def check_disjoint(task: ClassificationTask | TextTask) -> None:
    """Raise UserError if dev rows, on which something is selected, are test rows as well."""
    test_keys = set(hash_rows(task.test))
    shared = sum(key in test_keys for key in hash_rows(task.dev))
    if shared:
        raise UserError(f"selection: expected dev rows of {task.name!r} that are no test rows, got {shared} that are")


def sample_balanced(rows: LabeledRows, max_rows: int | None, seed: int) -> LabeledRows:
    """Sample at most `max_rows` rows of each class, in their order; None for all."""
    if max_rows is None:
        return rows
    ranks = _rank_within_class(rows, seed)
    return tuple(row for row, rank in zip(rows, ranks, strict=True) if rank < max_rows)


def sample_proportional(rows: LabeledRows, max_rows: int | None, seed: int) -> LabeledRows:
    """Sample at most `max_rows` rows, in their order, with the class frequencies of all rows; None for all."""
    if max_rows is None or max_rows >= len(rows):
        return rows
    sizes = Counter(row.label for row in rows)
    ranks = _rank_within_class(rows, seed)
    order = [((rank + 0.5) / sizes[row.label], row.label, row.key) for row, rank in zip(rows, ranks, strict=True)]
    selected = set(sorted(range(len(rows)), key=order.__getitem__)[:max_rows])
    return tuple(row for index, row in enumerate(rows) if index in selected)


def divide_rows(rows: LabeledRows, fractions: Sequence[float], seed: int, name: str) -> tuple[LabeledRows, ...]:
    """Divide rows into the remainder and one split per fraction of each class, with at least one text of each class.

    Rows with the same text and class stay together. Classes with too few texts for each split stay in the remainder,
    with a warning, and so do their texts under other labels: held out there, they would be dropped from the training
    rows, and the class with them. Messages call the rows `name`. Raises UserError if fewer than two classes have
    enough.
    """

    def is_rare(texts: int, free: int) -> bool:
        return free + (free < texts) <= len(fractions)  # a text that stays is one for train

    labels = sorted({row.label for row in rows})
    keys_of = {label: sorted({row.key for row in rows if row.label == label}) for label in labels}
    free_of, rare, kept = keys_of, list[str](), set[TextKey]()
    while rare != (found := [label for label in labels if is_rare(len(keys_of[label]), len(free_of[label]))]):
        rare, kept = found, {key for label in found for key in keys_of[label]}
        free_of = {label: [key for key in keys if key not in kept] for label, keys in keys_of.items()}
    if rare:
        count, listed = len(fractions) + 1, ", ".join(map(repr, rare[:8])) + (", …" if len(rare) > 8 else "")
        if labels == [FREE_ANSWER]:
            raise UserError(f"stream: expected at least {count} texts in {name}, one for each split, got fewer")
        if len(labels) - len(rare) < 2:
            expected = f"at least {count} texts of two classes in {name}, one for each split"
            why = describe_numbers([row.label for row in rows])
            raise UserError(f"stream: expected {expected}, got fewer of {listed}{why}")
        shares_texts = any(len(keys_of[label]) >= count for label in rare)
        few = f"fewer than {count} texts{' that no other such class has' if shares_texts else ''}"
        warn_user(f"stream: classes of {name} with {few} stay in train, none is held out: {listed}")
    split_of: dict[tuple[str, TextKey], int] = {}
    for label in sorted(set(labels) - set(rare)):
        keys = sorted(free_of[label], key=lambda key: rank_key("split", seed, key))
        end = len(keys)
        for split, fraction in reversed(list(enumerate(fractions, start=1))):
            start = end - max(1, int(fraction * len(keys)))
            split_of |= {(label, key): split for key in keys[start:end]}
            end = start
    splits = range(len(fractions) + 1)
    return tuple(tuple(row for row in rows if split_of.get((row.label, row.key), 0) == split) for split in splits)


def clean_splits(tasks: Sequence[RawTask], protocol: Protocol, seed: int, dev_is_test: bool = False) -> list[RawTask]:
    """Count what the splits of all tasks of a stream have in common (`overlaps`) and, with "clean", drop it.

    "clean": Train loses rows that dev or test of any task has, dev those that test of any task has, and both repeated
    rows. A missing dev split is a tenth of each class of the remaining training rows.

    "paper": Nothing is dropped. A missing dev split is the test split if `dev_is_test`, else a tenth of train.
    """
    tasks = [replace(task, overlaps=dict.fromkeys(_COUNTS, 0) | {AMBIGUOUS: _count_ambiguous(task)}) for task in tasks]
    tests = _find_owners(tasks, "test")
    tasks = [_add_dev(task, tests, protocol, seed, dev_is_test) for task in tasks]
    devs = _find_owners(tasks, "dev")
    for task in tasks:
        _count_overlaps(task, tests, devs, same_split=dev_is_test and task.dev == task.test)
    tasks = [_drop_overlaps(task, tests, devs) for task in tasks] if protocol == "clean" else tasks
    for task in tasks:
        task.overlaps[NEAR_COPIES] = _count_near_copies(task)
    return tasks


AMBIGUOUS, NEAR_COPIES = "texts_with_several_labels", "train_near_test"
_Owners = Mapping[TextKey, set[str]]  # names of the tasks that have a text in one of their splits
_COUNTS = (
    *("train_in_dev", "train_in_test", "dev_in_test", "copies_in_train", "copies_in_dev", "copies_in_test"),
    *("train_in_other_tasks", "dev_in_other_tasks", "dropped_from_train", "dropped_from_dev"),
)
"""Numbers of rows of a task that another split has too, of repeated rows within a split, and of dropped rows. Beside
them stand those of different texts that have several labels in the task, and of the remaining training rows that differ
from a test row of the task in punctuation or signs alone: whether they mean the same, only a reader can tell."""


def _count_ambiguous(task: RawTask) -> int:
    labels: dict[TextKey, set[str]] = defaultdict(set)
    for row in (row for rows in task.by_split().values() for row in rows):
        labels[row.key].add(row.label)
    return sum(len(of_text) > 1 for of_text in labels.values())


def _count_near_copies(task: RawTask) -> int:
    test = {row.key for row in task.test}
    test_words = {key.words for key in test}
    return sum(row.key not in test and row.key.words in test_words for row in task.train)


def _find_owners(tasks: Sequence[RawTask], split: str) -> _Owners:
    owners: dict[TextKey, set[str]] = defaultdict(set)
    for task in tasks:
        for row in task.by_split()[split]:
            owners[row.key].add(task.name)
    return dict(owners)


def _count_shared(rows: LabeledRows, task: str, owners: _Owners) -> int:
    return sum(task in owners.get(row.key, ()) for row in rows)


def _count_in_other_tasks(rows: LabeledRows, task: str, *owners: _Owners) -> int:
    return sum(any(split.get(row.key, set()) - {task} for split in owners) for row in rows)


def _add_dev(task: RawTask, tests: _Owners, protocol: Protocol, seed: int, dev_is_test: bool) -> RawTask:
    """Add a missing dev split; with "clean" it is held out of rows that no test split has."""
    if task.dev is not None:
        return task
    if protocol == "paper" and dev_is_test:
        return replace(task, dev=task.test)
    rows = task.train
    if protocol == "clean":
        _count_train_overlaps(task, tests, {})
        rows = _drop_train_overlaps(task, tests, {})
    train, dev = divide_rows(rows, (DEV_FRACTION,), seed, f"the train split of {task.name!r}")
    return replace(task, train=train, dev=dev)


def _count_overlaps(task: RawTask, tests: _Owners, devs: _Owners, *, same_split: bool) -> None:
    dev = task.by_split()["dev"]
    _count_train_overlaps(task, tests, devs)
    task.overlaps["dev_in_test"] = len(dev) if same_split else _count_shared(dev, task.name, tests)
    task.overlaps["copies_in_dev"] = _count_repeated(dev)
    task.overlaps["copies_in_test"] = _count_repeated(task.test)
    task.overlaps["dev_in_other_tasks"] = _count_in_other_tasks(dev, task.name, tests)


def _count_train_overlaps(task: RawTask, tests: _Owners, devs: _Owners) -> None:
    """Add what train has in common with other splits; called again once dev rows are held out of train."""
    task.overlaps["train_in_dev"] += _count_shared(task.train, task.name, devs)
    task.overlaps["train_in_test"] += _count_shared(task.train, task.name, tests)
    task.overlaps["copies_in_train"] += _count_repeated(task.train)
    task.overlaps["train_in_other_tasks"] += _count_in_other_tasks(task.train, task.name, tests, devs)


def _drop_overlaps(task: RawTask, tests: _Owners, devs: _Owners) -> RawTask:
    rows = task.by_split()["dev"]
    dev = _drop_repeated(row for row in rows if row.key not in tests)
    task.overlaps["dropped_from_dev"] += len(rows) - len(dev)
    if not dev:
        advice = "leave dev out to have it held out of train, or ask for the protocol 'paper'"
        raise UserError(f"stream: expected dev rows in {task.name!r} that are not test rows, got none: {advice}")
    return replace(task, train=_drop_train_overlaps(task, tests, devs), dev=dev)


def _drop_train_overlaps(task: RawTask, tests: _Owners, devs: _Owners) -> LabeledRows:
    """Return training rows that no later split has, without repeated ones. Raise UserError if a class has none left."""
    rows = _drop_repeated(row for row in task.train if row.key not in tests and row.key not in devs)
    task.overlaps["dropped_from_train"] += len(task.train) - len(rows)
    remaining = {row.label for row in rows}
    if missing := [label for label in task.labels if label not in remaining]:
        expected = f"rows of {missing[0]!r} in the train split of {task.name!r} that no dev or test split has"
        place = _find_other_place(task, missing[0], {"test": tests, "dev": devs})
        advice = "keep such a text in one place, under one label, or ask for the protocol 'paper'"
        raise UserError(f"stream: expected {expected}, got none: {place}; {advice}")
    return rows


def _find_other_place(task: RawTask, label: str, owners: Mapping[str, _Owners]) -> str:
    """Say in which split of which task a training row of a class is too, and under which other label of this task."""
    row = next(row for row in task.train if row.label == label)
    text = row.texts[-1] if len(row.texts[-1]) <= TEXT_SHOWN else f"{row.texts[-1][:TEXT_SHOWN]}…"
    places = {split: sorted(of_split.get(row.key, ())) for split, of_split in owners.items()}
    split = next((split for split, names in places.items() if names), "train")  # where it has another label before
    name = task.name if split == "train" or task.name in places[split] else places[split][0]
    labels = sorted({other.label for other in task.by_split()[split] if other.key == row.key} - {label})
    return f"{text!r} is a {split} row of {name!r} as well" + (f" under {labels[0]!r}" if labels else "")


def _drop_repeated(rows: Iterable[LabeledRow]) -> LabeledRows:
    first: dict[TextKey, LabeledRow] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return tuple(first.values())


def _count_repeated(rows: LabeledRows) -> int:
    return len(rows) - len({row.key for row in rows})


def rank_key(purpose: str, seed: int, key: TextKey) -> tuple[bytes, TextKey]:
    """Return what rows are drawn by: a hash of their words, and the text where several have the same words."""
    return hash_rank(purpose, seed, key.words), key


def _rank_within_class(rows: LabeledRows, seed: int) -> list[int]:
    class_sizes: Counter[str] = Counter()
    ranks = [0] * len(rows)
    for index in sorted(range(len(rows)), key=lambda index: rank_key("rows", seed, rows[index].key)):
        ranks[index] = class_sizes[rows[index].label]
        class_sizes[rows[index].label] += 1
    return ranks


def compare_splits(
    raw: Sequence[RawTask], splits: Sequence[RawTask], protocol: Protocol, seed: int
) -> dict[str, dict[str, Any]]:
    """Compare the protocols for each task that was read from files; `splits` are those of `protocol`.

    Returns:
        By task: whether dev and test are the same file byte by byte (`identical`, None if one is missing); rows that
        two files share (`dev_in_test`, …); number of rows by file (`published`) and by split before sampling (`paper`,
        and `clean`, None if it refuses the stream); rows that "clean" drops (`dropped`); and what the test rows are
        (`evaluated`). Empty if files are not known.
    """
    if any(set(task.files) <= {"evaluated"} for task in raw):
        return {}
    clean: Sequence[RawTask | None] = splits
    if protocol == "paper":
        try:
            clean = clean_splits(raw, "clean", seed, dev_is_test=True)
        except UserError:  # a split or class without rows is allowed with "paper"
            clean = [None] * len(raw)
    return {
        task.name: {
            "identical": task.files["identical_dev_test"],
            **{name: task.files[name] for name in ("dev_in_test", "train_in_test", "train_in_dev", "evaluated")},
            "published": task.files["rows"],
            "paper": {split: len(rows) for split, rows in replace(task, dev=task.dev or task.test).by_split().items()},
            "clean": cleaned and {split: len(rows) for split, rows in cleaned.by_split().items()},
            "dropped": cleaned and cleaned.overlaps["dropped_from_train"] + cleaned.overlaps["dropped_from_dev"],
        }
        for task, cleaned in zip(raw, clean, strict=True)
    }


def describe_protocol_differences(stream: Stream) -> dict[str, int]:
    """Sum up over all tasks how the protocols differ; empty if they do not, or if that is not known.

    Returns:
        Numbers of `tasks`, of tasks with dev and test files (`both`) and with the same file (`identical`); rows that
        two files share (`dev_in_test`, …), of a protocol and split (`paper_train`, …), that "clean" drops (`dropped`).
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
    return (
        f"protocols: rows of the files that are test rows as well: {shared}{files if numbers['both'] else ''}\n"
        f"  --protocol paper: {paper}; as published, dev being test where it has no rows else\n"
        f"  --protocol clean: {clean}"
    )


def _format_sizes(numbers: Mapping[str, float], protocol: str) -> str:
    train, dev, test = (f"{numbers[f'{protocol}_{split}']:,}" for split in SPLITS)
    return f"{train} train, {dev} dev and {test} test rows"
