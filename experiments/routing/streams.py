"""Streams of ordinary classification tasks, whose texts carry no instruction.

`long` has the tasks of the Long Sequence benchmark that are in the folder of data, in order 3; `mixed` tasks of other
collections: sentences of GLUE, news, encyclopedia, newswire with one kind of name, paragraphs of novels and speeches;
`fifty` the tasks of both, inputs of SuperNI, and documentation of Python's standard library, whose labels no router
reads.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.sapt.run import EVALUATED, TRAIN, read_tasks
from regard.data.benchmarks import DBPEDIA_CLASSES
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream, TextPairs, TextTask
from regard.data.streams import read_stream
from regard.data.tasks import read_task
from regard.errors import UserError

ByLabel = Mapping[str, Sequence[tuple[str, ...]]]
"""Texts of each label; a text is a sentence or two."""
GLUE = {
    "sst2": ("bad film", "good film"),
    "cola": ("not grammatical", "grammatical"),
    "mrpc": ("other meaning", "same meaning"),
    "rte": ("implied", "not implied"),
}
AGNEWS = ("World", "Sports", "Business", "Sci/Tech")
AGNEWS_TRAIN = ("Sports", "Sci/Tech", "World", "Business")
NAMES = {"PER": "a person", "ORG": "an organization", "LOC": "a place", "MISC": "another name"}
WORDS = (12, 120)
"""Fewest and most words of a paragraph."""


def read_ordinary(name: str, seed: int, data: str) -> Stream:
    """Read a stream, its rows sampled by the seed. Raises UserError."""
    if name == "long":
        return read_tasks("3", seed, data, instructions=False)
    if name not in STREAMS:
        raise UserError(f"streams: expected some of {', '.join(STREAMS)}, got {name!r}")
    return STREAMS[name](seed, data)


def _read_mixed(seed: int, data: str) -> Stream:
    return _as_stream("mixed", list(_mixed_tasks(seed, Path(data))), seed)


def _mixed_tasks(seed: int, data: Path) -> Iterator[ClassificationTask]:
    for name in ("sst2", "cola"):
        yield _read_glue(name, seed, data)
    dbpedia = _read_dbpedia(data)
    yield _sample("dbpedia-1", {label: dbpedia[label] for label in DBPEDIA_CLASSES[:7]}, seed)
    yield _sample("novels-1", _read_novels(data, 0), seed)
    yield _read_glue("mrpc", seed, data)
    yield _sample("agnews", _read_agnews(data), seed)
    yield _sample("newswire", _read_newswire(data), seed)
    yield _read_glue("rte", seed, data)
    yield _sample("dbpedia-2", {label: dbpedia[label] for label in DBPEDIA_CLASSES[7:]}, seed)
    yield _sample("speeches", _read_speeches(data), seed)
    yield _sample("novels-2", _read_novels(data, 3), seed)


def _read_fifty(seed: int, data: str) -> Stream:
    """Read tasks for routers alone: inputs of SuperNI and documentation have one label, or those of their stream."""
    tasks = [*read_ordinary("long", seed, data).tasks, *_mixed_tasks(seed, Path(data))]
    options = {"samples_per_class": TRAIN, "max_eval_samples": EVALUATED, "seed": seed, "missing_tasks": "skip"}
    for task in read_stream("superni", data, task_type="generation", **options).tasks:  # type: ignore[arg-type]
        assert isinstance(task, TextTask)
        inputs = [
            [text.removeprefix(task.definition).strip() for text in rows.inputs] for rows in (task.train, task.test)
        ]
        train, test = (Examples(texts=tuple((text,) for text in texts), labels=(0,) * len(texts)) for texts in inputs)
        tasks.append(ClassificationTask(name=task.name, labels=("text",), train=train, dev=test, test=test))
    standard = read_stream("stdlib-split", samples_per_class=TRAIN, max_eval_samples=EVALUATED, seed=seed).tasks
    tasks += [task for task in standard if isinstance(task, ClassificationTask)]
    named = [replace(task, name=f"{task.name} {index}") for index, task in enumerate(tasks[:50])]
    return _as_stream("fifty", named, seed)


def _without_definition(rows: TextPairs, definition: str) -> Examples:
    texts = tuple((text.removeprefix(definition).strip(),) for text in rows.inputs)
    return Examples(texts=texts, labels=(0,) * len(texts))


STREAMS: dict[str, Callable[[int, str], Stream]] = {"mixed": _read_mixed, "fifty": _read_fifty}


def _as_stream(name: str, tasks: Sequence[ClassificationTask | TextTask], seed: int) -> Stream:
    return Stream(name=name, tasks=tuple(tasks), order=tuple(range(len(tasks))), seed=seed)


def _read_glue(name: str, seed: int, data: Path) -> ClassificationTask:
    """Read a task of GLUE; RTE, which is none of the library's, as a table."""
    texts = defaultdict[str, list[tuple[str, ...]]](list)
    rte = next(iter((data / "glue" / "RTE").glob("train.tsv*")), None)
    task = read_task(str(rte), text="sentence1,sentence2") if name == "rte" else read_task(name, data)
    for row, label in zip(task.train.texts, task.train.labels, strict=True):
        texts[GLUE[name][label]].append(row)
    return _sample(name, {label: texts[label] for label in GLUE[name]}, seed)


def _read_dbpedia(data: Path) -> ByLabel:
    texts = defaultdict[str, list[tuple[str, ...]]](list)
    with gzip.open(data / "dbpedia14" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            texts[DBPEDIA_CLASSES[row["label"]]].append((row["text"],))
    return texts


def _read_agnews(data: Path) -> ByLabel:
    texts = defaultdict[str, list[tuple[str, ...]]](list)
    with gzip.open(data / "agnews" / "train_subset.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            texts[AGNEWS_TRAIN[int(row[0]) - 1]].append((row[1],))
    return {label: texts[label] for label in AGNEWS}


def _read_newswire(data: Path) -> ByLabel:
    """Sentences whose names are all of one kind."""
    texts = defaultdict[str, list[tuple[str, ...]]](list)
    with gzip.open(data / "conll2003" / "train.txt.gz", "rt", encoding="utf-8") as file:
        for sentence in file.read().split("\n\n"):
            words = [line.split() for line in sentence.strip().split("\n") if line]
            kinds = {word[-1][2:] for word in words if word[-1] != "O"}
            if len(kinds) == 1 and len(words) >= 6:
                texts[NAMES[kinds.pop()]].append((" ".join(word[0] for word in words),))
    return {label: texts[label] for label in NAMES.values()}


def _read_novels(data: Path, first: int, count: int = 3) -> ByLabel:
    """Paragraphs of some of the novels, whose files stand one after another; the label is a novel's author."""
    files = (data / "lm_text" / "novels_files.txt").read_text(encoding="utf-8").split("valid:")[0].split("\n")
    authors = [Path(line).name.split("_")[0] for line in files if line.endswith(".txt")]
    with gzip.open(data / "lm_text" / "novels_train.txt.gz", "rt", encoding="utf-8") as file:
        paragraphs = _paragraphs(file.read())
    part = len(paragraphs) // len(authors)
    picked = range(first * 3, first * 3 + 3 * count, 3)
    middles = {f"{authors[index]} {index}": index * part + part // 2 for index in picked}
    return {author: paragraphs[middle - 150 : middle + 150] for author, middle in middles.items()}


def _read_speeches(data: Path) -> ByLabel:
    """Paragraphs of the first and of the last speeches."""
    with gzip.open(data / "lm_text" / "us_presidential_speeches.txt.gz", "rt", encoding="utf-8") as file:
        paragraphs = _paragraphs(file.read())
    return {"earlier speech": paragraphs[:400], "later speech": paragraphs[-400:]}


def _paragraphs(text: str) -> list[tuple[str, ...]]:
    parts = (" ".join(paragraph.split()) for paragraph in text.replace("\r", "").split("\n\n"))
    return [(part,) for part in parts if WORDS[0] <= len(part.split()) <= WORDS[1]]


def _sample(name: str, texts: ByLabel, seed: int) -> ClassificationTask:
    """Draw rows of each label alike often: at most `TRAIN` for training and `EVALUATED` for tests, none in both."""
    drawn, labels = random.Random(f"{seed}/{name}"), tuple(texts)
    train, test = TRAIN // len(labels), -(-EVALUATED // len(labels))
    splits: dict[str, list[tuple[tuple[str, ...], int]]] = {"train": [], "test": []}
    for index, label in enumerate(labels):
        distinct = sorted(set(texts[label]))
        if len(distinct) < 2 * test:
            raise UserError(f"data: expected at least {2 * test} texts of {name} {label!r}, got {len(distinct)}")
        rows = drawn.sample(distinct, min(len(distinct), train + test))
        splits["test"] += [(row, index) for row in rows[:test]]
        splits["train"] += [(row, index) for row in rows[test:]]
    examples = {}
    for split, rows_of_split in splits.items():
        drawn.shuffle(rows_of_split)
        split_texts, split_labels = zip(*rows_of_split, strict=True)
        examples[split] = Examples(texts=split_texts, labels=split_labels)
    return ClassificationTask(
        name=name, labels=labels, train=examples["train"], dev=examples["test"], test=examples["test"]
    )
