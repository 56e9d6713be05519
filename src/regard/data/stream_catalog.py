"""The built-in streams: their tasks, the data sets these are made of, and where to find those."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regard.data import benchmarks
from regard.data.tables import Columns

_NO_COLUMNS = Columns((), "")


@dataclass(frozen=True)
class DatasetFiles:
    """Files of a data set: "csv" as of Zhang et al. (arXiv 1509.01626), "sentences" of GLUE, "instructions" of SAPT."""

    folders: tuple[str, ...]  # possible names
    train: str
    test: str
    format: Literal["csv", "sentences", "instructions"]
    text_columns: tuple[int, ...] = ()  # of "csv"
    columns: Columns = _NO_COLUMNS  # of "sentences"; of "instructions" the parts of an input
    first_class: int = 0  # index of the first class
    joins_texts: bool = False  # the texts of a row become one, because many rows lack the first
    test_rows: str | None = None  # what the test rows are, if not those of the data set


@dataclass(frozen=True)
class DatasetSpec:
    """A published data set; `regard.data.hub.HUB_DATASETS` has it under the same name."""

    labels: tuple[str, ...]  # in the order of their indices
    files: tuple[DatasetFiles, ...]  # in the order in which they are looked for
    test_rows: str = "official test"  # what the test rows are
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other names of classes
    match_last_text: bool = False  # rows with the same last text are the same row, whatever their titles


@dataclass(frozen=True)
class StreamTaskSpec:
    """A task of a stream: all or some classes of a data set."""

    name: str
    dataset: str
    labels: tuple[str, ...]  # empty if answers are free
    all_rows: bool = False  # all training rows were published


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """A built-in stream; by default with the numbers of arXiv 2410.05648."""

    tasks: tuple[StreamTaskSpec, ...]  # in their published order
    samples_per_class: int = 1245  # published training rows per class, or per task with free answers
    max_eval_samples: int | None = None  # published evaluation rows per task; None for all
    paper: str
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # if several; the first is that of `tasks`
    benchmark: benchmarks.Benchmark | None = None  # of instruction tasks


def _zhang_files(*folders: str, columns: tuple[int, ...] = (1, 2)) -> DatasetFiles:
    return DatasetFiles(folders, "train.csv", "test.csv", "csv", text_columns=columns, first_class=1)


def _instruction_files(folder: str, *parts: str) -> DatasetFiles:
    folders = (f"CL_Benchmark/Long_Sequence/{folder}", f"Long_Sequence/{folder}")
    columns, test_rows = Columns(parts, "output"), "the test file of the benchmark"
    return DatasetFiles(folders, "train.json", "test.json", "instructions", columns=columns, test_rows=test_rows)


def _glue_files(folder: str, *texts: str, label: str = "label", test: str = "dev.tsv") -> DatasetFiles:
    return DatasetFiles((f"glue/{folder}", folder), "train.tsv", test, "sentences", columns=Columns(texts, label))


_STARS = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
_STAR_SYNONYMS = {"2 star": "2 stars"} | dict(zip(benchmarks.SENTIMENT, _STARS, strict=True))

DATASETS: Mapping[str, DatasetSpec] = {
    "ag-news": DatasetSpec(
        ("World", "Sports", "Business", "Sci/Tech"),
        (_zhang_files("agnews", "ag_news_csv", "ag_news"), _instruction_files("agnews", "Title", "Text")),
        synonyms={"Science or Technology": "Sci/Tech"},
        match_last_text=True,
    ),
    "dbpedia": DatasetSpec(
        benchmarks.DBPEDIA_CLASSES,
        (
            _zhang_files("dbpedia_csv", "dbpedia"),
            DatasetFiles(
                ("dbpedia14",),
                "train.jsonl",
                "test.jsonl",
                "sentences",
                columns=Columns(("title", "text"), "label"),
                joins_texts=True,
                test_rows="a pool, not the official split",
            ),
            _instruction_files("dbpedia", "Title", "Text"),
        ),
        synonyms=dict(zip(benchmarks.LONG_SEQUENCE.tasks["dbpedia"].labels, benchmarks.DBPEDIA_CLASSES, strict=True)),
        match_last_text=True,
    ),
    "yahoo": DatasetSpec(
        benchmarks.YAHOO_CLASSES,
        (
            _zhang_files("yahoo_answers_csv", "yahoo_answers", "yahoo", columns=(1, 3)),
            _instruction_files("yahoo", "Title", "Answer"),
        ),
    ),
    "yelp": DatasetSpec(
        _STARS,
        (_zhang_files("yelp_review_full_csv", "yelp_review_full", columns=(1,)), _instruction_files("yelp", "Text")),
        synonyms=_STAR_SYNONYMS,
    ),
    "amazon": DatasetSpec(
        _STARS,
        (_zhang_files("amazon_review_full_csv", "amazon_review_full"), _instruction_files("amazon", "Title", "Text")),
        "official test; on the hub that of the reviews of 2015 to 2019, in files that of Zhang et al.",
        synonyms=_STAR_SYNONYMS,
    ),
    "sst2": DatasetSpec(("negative", "positive"), (_glue_files("SST-2", "sentence"),), "GLUE dev"),
    "rte": DatasetSpec(("entailment", "not_entailment"), (_glue_files("RTE", "sentence1", "sentence2"),), "GLUE dev"),
    "mrpc": DatasetSpec(
        ("not_equivalent", "equivalent"), (_glue_files("MRPC", "#1 String", "#2 String", label="Quality"),), "GLUE dev"
    ),
    "mnli": DatasetSpec(
        ("entailment", "neutral", "contradiction"),
        (
            _glue_files("MNLI", "sentence1", "sentence2", label="gold_label", test="dev_matched.tsv"),
            _instruction_files("mnli", "sentence 1", "sentence 2"),
        ),
        "GLUE dev, matched",
    ),
}


def _class_groups(dataset: str, *groups: str) -> tuple[StreamTaskSpec, ...]:
    """Make tasks of groups "name: class, class" of a data set."""
    parts = (group.partition(": ") for group in groups)
    return tuple(StreamTaskSpec(name, dataset, tuple(labels.split(", "))) for name, _, labels in parts)


def _all_classes(*names: str) -> tuple[StreamTaskSpec, ...]:
    return tuple(StreamTaskSpec(name, name, DATASETS[name].labels, all_rows=name == "rte") for name in names)


_PRESCALE = "arXiv 2410.05648"
_YAHOO = _class_groups(
    "yahoo",
    "politics-business: Politics & Government, Business & Finance",
    "science-computers: Science & Mathematics, Computers & Internet",
    "education-sports: Education & Reference, Sports",
    "health-society: Health, Society & Culture",
    "family-entertainment: Family & Relationships, Entertainment & Music",
)
_DBPEDIA = _class_groups(
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
    "news-series": StreamSpec(tasks=_all_classes("ag-news", "sst2", "rte", "mrpc"), paper=_PRESCALE),
    "news-series-mnli": StreamSpec(
        tasks=_all_classes("ag-news", "sst2", "mnli", "mrpc"), paper=f"after {_PRESCALE}, MNLI in the place of RTE"
    ),
    "ag-split": StreamSpec(
        tasks=_class_groups("ag-news", "world-sports: World, Sports", "business-science: Business, Sci/Tech"),
        paper=f"after {_PRESCALE}: AG News in two",
    ),
    "yahoo-db-split": StreamSpec(tasks=_YAHOO + _DBPEDIA, paper=f"after {_PRESCALE}: one stream behind the other"),
    "reviews": StreamSpec(
        tasks=_all_classes("ag-news", "yelp", "amazon", "dbpedia", "yahoo"),
        max_eval_samples=7600,
        paper="arXiv 1906.01076, stars of Yelp and Amazon as the same classes",
    ),
    "stdlib-split": StreamSpec(
        tasks=_class_groups(
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
            StreamTaskSpec(name, name, benchmarks.LONG_SEQUENCE.tasks[name].labels)
            for name in benchmarks.LONG_ORDERS["3"]
        ),
        samples_per_class=1000,
        max_eval_samples=7600,
        orders=benchmarks.LONG_ORDERS,
        benchmark=benchmarks.LONG_SEQUENCE,
        paper="arXiv 2310.14152, in the files of arXiv 2401.08295",
    ),
    "superni": StreamSpec(
        tasks=tuple(StreamTaskSpec(name, name, ()) for name in benchmarks.SUPER_NI_ORDERS["1"]),
        samples_per_class=1000,
        max_eval_samples=100,
        orders=benchmarks.SUPER_NI_ORDERS,
        benchmark=benchmarks.SUPER_NI,
        paper="arXiv 2401.08295",
    ),
    "trace": StreamSpec(
        tasks=tuple(StreamTaskSpec(name, name, ()) for name in benchmarks.TRACE_METRICS),
        samples_per_class=5000,
        max_eval_samples=2000,
        benchmark=benchmarks.TRACE,
        paper="arXiv 2310.06762",
    ),
}
