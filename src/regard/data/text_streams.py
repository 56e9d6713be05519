"""Streams made of others: many tasks of a folder or of classes, tasks held out, and what the protocols differ in."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.examples import Examples
from regard.data.instruction_settings import SUPER_NI
from regard.data.instructions import SplitReader, files_of, read_task, roots
from regard.data.splits import Sample, Samples, examples_of, sha256_of_rows
from regard.data.stream import SPLITS, Protocol, Stream, Task
from regard.data.streams import assemble_stream, check_seed
from regard.data.text_task import TextTask
from regard.errors import UserError

LEAST_ROWS = 20
"""Tasks of a folder with fewer rows are passed over."""


# -- many tasks -----------------------------------------------------------------------------------------


def many_tasks(
    folder: str | Path,
    count: int,
    seed: int = 0,
    *,
    rows: int | None = 1000,
    eval_rows: int | None = 100,
    protocol: Protocol = "clean",
) -> Stream:
    """A stream of so many tasks from text to text, drawn by the seed from a folder of files as of SuperNI.

    The folder holds one file a task (task*.json, with a Definition and Instances), or a folder a task with train, dev
    and test. Tasks come in the order in which they are drawn; more of them begin with the same ones. `rows`,
    `eval_rows` and `protocol` as in `streams.read_stream`, for a task. Tasks with less than 20 rows are passed over,
    and named in `record["passed_over"]`.

    Raises UserError where there are too few tasks, saying how many there are, and for files that are none.
    """
    check_seed(seed)
    _check_count("tasks", count)
    names = _names(Path(folder))
    drawn = sorted(names, key=lambda name: _drawn("tasks", seed, name))
    passed_over: list[str] = []
    reads = list(islice(_enough(drawn, Path(folder), passed_over), count))
    if len(reads) < count:
        told = f"{len(names)} of which {len(reads)} have at least {LEAST_ROWS} rows" if passed_over else str(len(reads))
        raise UserError(f"tasks: expected {count} tasks in {folder}, there are {told}")
    return assemble_stream(
        f"superni-{count}",
        [read.raw for read in reads],
        infos={read.raw.name: read.info for read in reads},
        metric=SUPER_NI.metric,
        rows=[rows] * count,
        eval_rows=eval_rows,
        seed=seed,
        protocol=protocol,
        dev_is_test=True,
        record={
            "published": None,
            "task_type": "generation",
            "passed_over": tuple(passed_over),
            "files": {read.raw.name: read.files for read in reads},
        },
    )


def _names(folder: Path) -> list[str]:
    """The tasks of a folder by name: its first place that has any. Raises UserError where there is none."""
    for root in roots(folder, SUPER_NI):
        if not root.is_dir():
            continue
        files = {path.name.removesuffix(".gz").removesuffix(".json") for path in root.glob("task*.json*")}
        folders = {path.name for path in root.iterdir() if path.is_dir()}
        if names := sorted(name for name in files | folders if files_of(folder, SUPER_NI, name)):
            return names
    raise UserError(f"tasks: expected files task*.json, or a folder of train.json for each task, in {folder}; none is")


def _enough(names: Sequence[str], folder: Path, passed_over: list[str]) -> Iterator[SplitReader]:
    """The tasks that have rows enough; the others are noted."""
    for name in names:
        read = read_task(name, files_of(folder, SUPER_NI, name), SUPER_NI)
        if sum(len(rows) for rows in (read.raw.train, read.raw.dev or (), read.raw.test)) < LEAST_ROWS:
            passed_over.append(name)
        else:
            yield read


class _Class(NamedTuple):
    """A class that tasks are made of: its rows by split, how many tasks they are enough for, and their source."""

    rows: Mapping[str, Samples]
    most: int
    source: str


_Pool = tuple[str, Mapping[str, _Class]]
"""The name of a stream, and its classes by name, all with the same number of texts in a row."""


def split_into(streams: Sequence[Stream], count: int, seed: int = 0, *, classes: int = 2, least: int = 4) -> Stream:
    """A stream of so many tasks of classification, each of some classes of one of the streams; no row is in two tasks.

    A class comes in several tasks where there are more tasks than classes, each time among others and with other rows:
    its rows are shared out evenly, split by split. No two tasks have the same classes, and classes are used as evenly
    as rows allow; `least` is how many rows of a class a task has at least in each split. What is drawn is drawn by the
    seed. `record["uses"]` says how many tasks each class is in. Rows of a stream that another stream has are left out.

    Raises UserError where there are too few classes or rows, saying for how many tasks there are enough.
    """
    check_seed(seed)
    for name, value, most in (("tasks", count, 1), ("classes", classes, 2), ("least", least, 1)):
        _check_count(name, value, most)
    if not streams or any(stream.text for stream in streams):
        raise UserError("streams: expected streams of classification, at least one, got none or one from text to text")
    pools = _pools(streams, least)
    chosen = _chosen([pool for _, pool in pools], count, classes, seed)
    uses = Counter((at, label) for at, labels in chosen for label in labels)
    shares = {(at, label): _shared_out(pools[at][1][label], many, seed) for (at, label), many in uses.items()}
    tasks: list[Task] = []
    for at, labels in chosen:
        parts = {label: shares[at, label].pop() for label in labels}
        tasks.append(_made(labels, parts, pools[at][1][labels[0]].source, len(tasks)))
    told: Counter[str] = Counter()
    for (at, label), many in sorted(uses.items()):
        told[f"{pools[at][0]}: {label}"] += many
    return Stream(
        name=f"{'+'.join(stream.name for stream in streams)}-{count}",
        tasks=tuple(tasks),
        order=tuple(range(count)),
        seed=seed,
        record={"of": tuple(stream.name for stream in streams), "uses": dict(told)},
    )


def _pools(streams: Sequence[Stream], least: int) -> list[_Pool]:
    """The classes of each stream, without rows that another split or stream has before; test rows come first."""
    seen: set[str] = set()
    rows: dict[tuple[int, int], dict[str, dict[str, list[Sample]]]] = {}
    sources: dict[tuple[int, str], str] = {}
    for at, stream in enumerate(streams):
        for split in reversed(SPLITS):
            for task in stream.tasks:
                assert isinstance(task, Task), "checked above"
                sources |= {(at, label): task.source for label in task.labels}
                for sample in _samples(task, task.split(split)):
                    if sample.key not in seen:
                        seen.add(sample.key)
                        pool = rows.setdefault((at, len(sample.texts)), {})
                        pool.setdefault(sample.label, {one: [] for one in SPLITS})[split].append(sample)
    return [
        (streams[at].name, {label: _class(of, least, sources[at, label]) for label, of in pool.items()})
        for (at, _), pool in rows.items()
    ]


def _class(rows: Mapping[str, Sequence[Sample]], least: int, source: str) -> _Class:
    most = min(len(of) // least for of in rows.values())
    return _Class({split: tuple(of) for split, of in rows.items()}, most, source)


def _samples(task: Task, rows: Examples) -> Iterator[Sample]:
    for texts, label in zip(rows.texts, rows.labels, strict=True):
        yield Sample.of(texts, task.labels[label])


def _chosen(
    pools: Sequence[Mapping[str, _Class]], count: int, classes: int, seed: int
) -> list[tuple[int, tuple[str, ...]]]:
    """For each task its pool and its classes: of those that are used least, none twice together."""
    uses: Counter[tuple[int, str]] = Counter()
    chosen: list[tuple[int, tuple[str, ...]]] = []
    while len(chosen) < count:
        offers = []
        for at, pool in enumerate(pools):
            free = [label for label, of in pool.items() if uses[at, label] < of.most]
            free.sort(key=lambda label: (uses[at, label], _drawn("classes", seed, f"{uses[at, label]} {at} {label}")))
            taken = {frozenset(labels) for number, labels in chosen if number == at}
            found = next((labels for labels in combinations(free, classes) if frozenset(labels) not in taken), None)
            if found is not None:
                used = max(uses[at, label] for label in found)
                offers.append((used, _drawn("tasks", seed, f"{len(chosen)} {at}"), at, found))
        if not offers:
            raise UserError(f"tasks: expected classes and rows for {count} tasks, there are enough for {len(chosen)}")
        *_, at, labels = min(offers)
        uses.update((at, label) for label in labels)
        chosen.append((at, labels))
    return chosen


def _shared_out(of: _Class, many: int, seed: int) -> list[dict[str, Samples]]:
    """The rows of a class in so many parts of the same size, but for one row."""
    drawn = {split: sorted(rows, key=lambda row: _drawn("rows", seed, row.key)) for split, rows in of.rows.items()}
    return [{split: tuple(rows[part::many]) for split, rows in drawn.items()} for part in range(many)]


def _made(labels: tuple[str, ...], parts: Mapping[str, Mapping[str, Samples]], source: str, number: int) -> Task:
    """The task of some classes and their rows."""
    rows = {split: tuple(row for label in labels for row in parts[label][split]) for split in SPLITS}
    return Task(
        name=f"{number:03d}-{re.sub(r'[^0-9a-z]+', '-', '-'.join(labels).casefold())}",
        labels=labels,
        source=source,
        sha256={split: sha256_of_rows(of) for split, of in rows.items()},
        **{split: examples_of(of, labels) for split, of in rows.items()},
    )


# -- held out -------------------------------------------------------------------------------------------


def unseen(stream: Stream, names: Sequence[str]) -> tuple[Stream, tuple[Task | TextTask, ...]]:
    """The stream without some tasks, and those, which are evaluated but never trained on.

    `record["unseen"]` names them. Raises UserError for names that the stream does not have, none, and all.
    """
    known = [task.name for task in stream.tasks]
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) == len(known):
        told = unknown[0] if unknown else ", ".join(names) or "none"
        raise UserError(f"unseen: expected some of the tasks {', '.join(known)}, but not all, got {told}")
    kept = [at for at, name in enumerate(known) if name not in names]
    numbers = [stream.order[at] for at in kept]
    tasks = tuple(stream.tasks[at] for at in kept)
    shorter = replace(
        stream,
        tasks=tasks,
        order=tuple(sorted(numbers).index(number) for number in numbers),
        record={**stream.record, "unseen": tuple(dict.fromkeys(names))},
    )
    return shorter, tuple(stream.tasks[known.index(name)] for name in dict.fromkeys(names))


# -- protocols ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComparedProtocols:
    """What the files of a task have in common as published, and what rows each protocol takes of them.

    `identical`: whether dev and test are the same file byte by byte, None where one is missing. `published`: numbers of
    rows by file; `paper` and `clean`: by split, before any are drawn, `clean` None where it refuses the stream.
    `dropped`: how many of them 'clean' drops. `evaluated`: what the test rows are.
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
        """One line."""
        same = {
            True: "dev and test are the same file",
            False: "dev and test differ",
            None: "there is no dev and test file both",
        }
        shared = f"{self.dev_in_test} dev and {self.train_in_test} train rows are test rows"
        sizes = "; ".join(
            f"{name}: {', '.join(f'{count} {split}' for split, count in of.items()) if of else 'refused'}"
            for name, of in (("files", self.published), ("paper", self.paper), ("clean", self.clean))
        )
        return f"{self.task}: {same[self.identical]}, {shared}; {sizes}; tested on {self.evaluated}"


def protocols_compared(stream: Stream) -> tuple[ComparedProtocols, ...]:
    """For each task of a stream that was read from files, what 'paper' and 'clean' make of it; no file is read again.

    Raises UserError for streams of which that is not known.
    """
    found = stream.record.get("protocols", {})
    if any(task.name not in found for task in stream.tasks):
        raise UserError(f"protocols: expected a stream with instructions, read from files, got {stream.name!r}")
    return tuple(ComparedProtocols(task=task.name, **found[task.name]) for task in stream.tasks)


def describe_protocol_differences(stream: Stream) -> dict[str, int]:
    """What the protocols differ in, over all tasks; {} where they do not, or it is not known.

    `tasks`; how many have a dev and a test file (`both`), and of these how many the same one (`identical`); rows of the
    files that are in two splits (`dev_in_test`, …); rows of each split (`paper_train`, …, `clean_train`, …) and how
    many 'clean' has dropped (`dropped`), which are missing where it refuses the stream.
    """
    if "protocols" not in stream.record:
        return {}
    compared = protocols_compared(stream)
    if all(one.paper == one.clean for one in compared):
        return {}
    cleaned = [one.clean for one in compared if one.clean is not None]
    return {
        "tasks": len(compared),
        "both": sum(one.identical is not None for one in compared),
        "identical": sum(one.identical is True for one in compared),
        **{name: sum(getattr(one, name) for one in compared) for name in ("dev_in_test", "train_in_test")},
        "train_in_dev": sum(one.train_in_dev for one in compared),
        **{f"paper_{split}": sum(one.paper[split] for one in compared) for split in SPLITS},
        **({f"clean_{split}": sum(of[split] for of in cleaned) for split in SPLITS} if cleaned else {}),
        **({"dropped": sum(one.dropped or 0 for one in compared)} if cleaned else {}),
    }


def explain(numbers: Mapping[str, float]) -> str:
    """What the protocols differ in, as `describe_protocol_differences` has it, in three lines."""
    shared = f"{numbers['dev_in_test']:,} of dev, {numbers['train_in_test']:,} of train"
    files = f"; {numbers['identical']} of {numbers['both']} tasks with both have byte-identical dev and test files"
    clean = "refused, a split or a class would be left without rows"
    if "dropped" in numbers:
        clean = f"{_rows(numbers, 'clean')}; {numbers['dropped']:,} dropped, dev held out of train where it was test"
    lines = (
        f"protocols: rows of the files that are test rows as well: {shared}{files if numbers['both'] else ''}",
        f"  --protocol paper: {_rows(numbers, 'paper')}; as published, dev being test where it has no rows else",
        f"  --protocol clean: {clean}",
    )
    return "\n".join(lines)


def _rows(numbers: Mapping[str, float], protocol: str) -> str:
    train, dev, test = (f"{numbers[f'{protocol}_{split}']:,}" for split in SPLITS)
    return f"{train} train, {dev} dev and {test} test rows"


def _check_count(name: str, count: Any, least: int = 1) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise UserError(f"{name}: expected a whole number of at least {least}, got {count!r}")


def _drawn(purpose: str, seed: int, name: str) -> bytes:
    """What something is ranked by."""
    return hashlib.sha256(f"{purpose} {seed} {name}".encode()).digest()
