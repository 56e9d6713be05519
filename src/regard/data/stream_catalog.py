"""The streams that are built in: their tasks, the data sets these are made of, and where those are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regard.data.benchmarks import LONG_ORDERS, LONG_SEQUENCE, SUPER_NI, SUPER_NI_ORDERS, Benchmark
from regard.data.tables import Columns

FileFormat = Literal["csv", "sentences", "instructions"]

ROWS = 1245
"""Training rows a class, as published (arXiv 2410.05648)."""


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """A published form of a data set: what its folder is called, its files, and how they are written.

    `form`: 'csv' as Zhang et al. (arXiv 1509.01626) publish theirs, no line of names, the class in the first column
    and `fields` the numbers of the columns of texts; 'sentences' as GLUE, with `columns`; 'instructions' as the
    benchmark of O-LoRA and SAPT, `columns` naming the parts of an input. `first`: the number of the first class.
    `joined`: all fields are one text, since many rows lack the first. `evaluated`: what its test rows are, where that
    is not what the data set says.
    """

    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    form: FileFormat
    fields: tuple[int, ...] = ()
    columns: Columns | None = None
    first: int = 0
    joined: bool = False
    evaluated: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """What is known of a data set before it is read.

    `labels`: its classes in the order of their numbers; `words`: other words for them. `hub`: repository and
    configuration, `columns` its texts and label, `splits` its names of train and of the split that is evaluated on.
    `evaluated`: what that split is. `body`: rows are the same where their last texts are, whatever their titles.
    """

    labels: tuple[str, ...]
    hub: tuple[str, str | None]
    columns: Columns
    splits: tuple[str, str]
    evaluated: str
    files: tuple[DatasetFiles, ...]
    words: Mapping[str, str] = field(default_factory=dict)
    body: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamTaskSpec:
    """A task of a stream: some classes of a data set, or all; `all_rows` where all of train was published.

    Without labels: answers are free.
    """

    name: str
    data: str
    labels: tuple[str, ...]
    all_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """The tasks of a stream in their published order, the published numbers of rows, and who published it.

    `rows`: for training, a class, or a task whose answers are free; `eval_rows`: to evaluate on, a task, None for all.
    `orders`: published orders of the tasks by name, where there is more than one; the first is that of `tasks`.
    `benchmark`: where the tasks have instructions.
    """

    tasks: tuple[StreamTaskSpec, ...]
    rows: int = ROWS
    eval_rows: int | None = None
    paper: str
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    benchmark: Benchmark | None = None


def _zhang(*folders: str, fields: tuple[int, ...], train: tuple[str, ...] = ("train.csv",)) -> DatasetFiles:
    return DatasetFiles(folders=folders, train=train, test=("test.csv",), form="csv", fields=fields, first=1)


def _instructions(folder: str, *parts: str) -> DatasetFiles:
    columns = Columns(parts, "output")
    folders = (f"CL_Benchmark/Long_Sequence/{folder}", f"Long_Sequence/{folder}")
    return DatasetFiles(
        folders=folders,
        train=("train.json",),
        test=("test.json",),
        form="instructions",
        columns=columns,
        evaluated="the test file of the benchmark",
    )


def _glue(folder: str, test: str, *columns: str, label: str) -> DatasetFiles:
    folders = (f"glue/{folder}", folder)
    written = Columns(columns, label)
    return DatasetFiles(folders=folders, train=("train.tsv",), test=(test,), form="sentences", columns=written)


_GLUE = "nyu-mll/glue"
_TITLED = ("Title", "Text")
_SENTENCES = ("sentence 1", "sentence 2")
_STARS = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
_STAR_WORDS = {"2 star": "2 stars"} | dict(
    zip(("very negative", "negative", "neutral", "positive", "very positive"), _STARS, strict=True)
)

DATASETS: Mapping[str, DatasetSpec] = {
    "ag-news": DatasetSpec(
        labels=("World", "Sports", "Business", "Sci/Tech"),
        hub=("fancyzhx/ag_news", None),
        columns=Columns(("text",), "label"),
        splits=("train", "test"),
        evaluated="official test",
        files=(
            _zhang("agnews", "ag_news_csv", "ag_news", fields=(1, 2)),
            _instructions("agnews", *_TITLED),
        ),
        words={"Science or Technology": "Sci/Tech"},
        body=True,
    ),
    "dbpedia": DatasetSpec(
        labels=(
            "Company",
            "EducationalInstitution",
            "Artist",
            "Athlete",
            "OfficeHolder",
            "MeanOfTransportation",
            "Building",
            "NaturalPlace",
            "Village",
            "Animal",
            "Plant",
            "Album",
            "Film",
            "WrittenWork",
        ),
        hub=("fancyzhx/dbpedia_14", None),
        columns=Columns(("title", "content"), "label"),
        splits=("train", "test"),
        evaluated="official test",
        files=(
            _zhang("dbpedia_csv", "dbpedia", fields=(1, 2)),
            DatasetFiles(
                folders=("dbpedia14",),
                train=("train.jsonl",),
                test=("test.jsonl",),
                form="sentences",
                columns=Columns(("title", "text"), "label"),
                joined=True,
                evaluated="a pool, not the official split",
            ),
            _instructions("dbpedia", *_TITLED),
        ),
        words={
            "Educational Institution": "EducationalInstitution",
            "Office Holder": "OfficeHolder",
            "Mean of Transportation": "MeanOfTransportation",
            "Natural Place": "NaturalPlace",
            "Written Work": "WrittenWork",
        },
        body=True,
    ),
    "yahoo": DatasetSpec(
        labels=(
            "Society & Culture",
            "Science & Mathematics",
            "Health",
            "Education & Reference",
            "Computers & Internet",
            "Sports",
            "Business & Finance",
            "Entertainment & Music",
            "Family & Relationships",
            "Politics & Government",
        ),
        hub=("community-datasets/yahoo_answers_topics", None),
        columns=Columns(("question_title", "best_answer"), "topic"),
        splits=("train", "test"),
        evaluated="official test",
        files=(
            _zhang("yahoo_answers_csv", "yahoo_answers", "yahoo", fields=(1, 3)),
            _instructions("yahoo", "Title", "Answer"),
        ),
    ),
    "yelp": DatasetSpec(
        labels=_STARS,
        hub=("fancyzhx/yelp_review_full", None),
        columns=Columns(("text",), "label"),
        splits=("train", "test"),
        evaluated="official test",
        files=(_zhang("yelp_review_full_csv", "yelp_review_full", fields=(1,)), _instructions("yelp", "Text")),
        words=_STAR_WORDS,
    ),
    "amazon": DatasetSpec(
        labels=_STARS,
        hub=("SetFit/amazon_reviews_multi_en", None),
        columns=Columns(("text",), "label"),
        splits=("train", "test"),
        evaluated="official test; on the hub that of the reviews of 2015 to 2019, in files that of Zhang et al.",
        files=(
            _zhang("amazon_review_full_csv", "amazon_review_full", fields=(1, 2)),
            _instructions("amazon", *_TITLED),
        ),
        words=_STAR_WORDS,
    ),
    "sst2": DatasetSpec(
        labels=("negative", "positive"),
        hub=(_GLUE, "sst2"),
        columns=Columns(("sentence",), "label"),
        splits=("train", "validation"),
        evaluated="GLUE dev",
        files=(_glue("SST-2", "dev.tsv", "sentence", label="label"),),
    ),
    "rte": DatasetSpec(
        labels=("entailment", "not_entailment"),
        hub=(_GLUE, "rte"),
        columns=Columns(("sentence1", "sentence2"), "label"),
        splits=("train", "validation"),
        evaluated="GLUE dev",
        files=(_glue("RTE", "dev.tsv", "sentence1", "sentence2", label="label"),),
    ),
    "mrpc": DatasetSpec(
        labels=("not_equivalent", "equivalent"),
        hub=(_GLUE, "mrpc"),
        columns=Columns(("sentence1", "sentence2"), "label"),
        splits=("train", "validation"),
        evaluated="GLUE dev",
        files=(_glue("MRPC", "dev.tsv", "#1 String", "#2 String", label="Quality"),),
    ),
    "mnli": DatasetSpec(
        labels=("entailment", "neutral", "contradiction"),
        hub=(_GLUE, "mnli"),
        columns=Columns(("premise", "hypothesis"), "label"),
        splits=("train", "validation_matched"),
        evaluated="GLUE dev, matched",
        files=(
            _glue("MNLI", "dev_matched.tsv", "sentence1", "sentence2", label="gold_label"),
            _instructions("mnli", *_SENTENCES),
        ),
    ),
}


def _parts(data: str, *parts: str) -> tuple[StreamTaskSpec, ...]:
    """Tasks from the parts 'name: class, class' of a data set."""
    tasks = []
    for part in parts:
        name, _, labels = part.partition(": ")
        tasks.append(StreamTaskSpec(name=name, data=data, labels=tuple(labels.split(", "))))
    return tuple(tasks)


def _whole(*names: str) -> tuple[StreamTaskSpec, ...]:
    """One task a data set, with all its classes."""
    return tuple(
        StreamTaskSpec(name=name, data=name, labels=DATASETS[name].labels, all_rows=name == "rte") for name in names
    )


_PRESCALE = "arXiv 2410.05648"
_YAHOO = _parts(
    "yahoo",
    "politics-business: Politics & Government, Business & Finance",
    "science-computers: Science & Mathematics, Computers & Internet",
    "education-sports: Education & Reference, Sports",
    "health-society: Health, Society & Culture",
    "family-entertainment: Family & Relationships, Entertainment & Music",
)
_DBPEDIA = _parts(
    "dbpedia",
    "building-nature: Building, NaturalPlace",
    "writing-film: WrittenWork, Film",
    "plant-company: Plant, Company",
    "education-album: EducationalInstitution, Album",
    "athlete-village: Athlete, Village",
    "artist-animal: Artist, Animal",
    "office-transportation: OfficeHolder, MeanOfTransportation",
)

STREAMS: Mapping[str, StreamSpec] = {
    "yahoo-split": StreamSpec(tasks=_YAHOO, paper=_PRESCALE),
    "db-split": StreamSpec(tasks=_DBPEDIA, paper=_PRESCALE),
    "news-series": StreamSpec(tasks=_whole("ag-news", "sst2", "rte", "mrpc"), paper=_PRESCALE),
    "news-series-mnli": StreamSpec(
        tasks=_whole("ag-news", "sst2", "mnli", "mrpc"), paper=f"after {_PRESCALE}, MNLI in the place of RTE"
    ),
    "ag-split": StreamSpec(
        tasks=_parts("ag-news", "world-sports: World, Sports", "business-science: Business, Sci/Tech"),
        paper=f"after {_PRESCALE}: AG News in two",
    ),
    "yahoo-db-split": StreamSpec(tasks=_YAHOO + _DBPEDIA, paper=f"after {_PRESCALE}: one stream behind the other"),
    "reviews": StreamSpec(
        tasks=_whole("ag-news", "yelp", "amazon", "dbpedia", "yahoo"),
        eval_rows=7600,
        paper="arXiv 1906.01076, stars of Yelp and Amazon as the same classes",
    ),
    "stdlib-split": StreamSpec(
        tasks=_parts(
            "stdlib",
            "asyncio-email: asyncio, email",
            "logging-xml: logging, xml",
            "unittest-multiprocessing: unittest, multiprocessing",
            "importlib-http: importlib, http",
            "decimal-inspect: decimal, inspect",
            "collections-urllib: collections, urllib",
            "tarfile-ipaddress: tarfile, ipaddress",
        ),
        paper="none: the documentation of Python's standard library",
    ),
    "long-sequence": StreamSpec(
        tasks=tuple(
            StreamTaskSpec(name=name, data=name, labels=LONG_SEQUENCE.tasks[name].labels) for name in LONG_ORDERS["3"]
        ),
        rows=1000,
        eval_rows=7600,
        orders=LONG_ORDERS,
        benchmark=LONG_SEQUENCE,
        paper="arXiv 2310.14152, in the files of arXiv 2401.08295",
    ),
    "superni": StreamSpec(
        tasks=tuple(StreamTaskSpec(name=name, data=name, labels=()) for name in SUPER_NI_ORDERS["1"]),
        rows=1000,
        eval_rows=100,
        orders=SUPER_NI_ORDERS,
        benchmark=SUPER_NI,
        paper="arXiv 2401.08295",
    ),
}
