"""Data sets of the Hugging Face hub, read through the package `datasets`."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.data.running_text import running_text_rows
from regard.data.tables import TASK, Columns, Table, TableRow, check_columns
from regard.errors import UserError, is_of_memory


class HubSplit(NamedTuple):
    """A split of a data set, whose configuration may be None."""

    repository: str
    config: str | None
    split: str

    def __str__(self) -> str:
        return "/".join(part for part in self if part)

    @contextmanager
    def open(self, option: str, **arguments: Any) -> Iterator[Any]:
        """Load the split by `datasets.load_dataset`; what this raises, also while rows are streamed, is a UserError."""
        try:
            datasets: Any = importlib.import_module("datasets")
        except ImportError as error:
            advice = "pip install 'regard[hub]', or give files instead"
            raise UserError(f"{option}: the hub needs the package {error.name}: {advice}") from None
        try:
            yield datasets.load_dataset(self.repository, self.config, split=self.split, **arguments)
        except UserError:
            raise
        except (OSError, ValueError, RuntimeError, *network_errors(), datasets.exceptions.DatasetsError) as error:
            if is_of_memory(error):
                raise
            reason = f"{(str(error) or type(error).__name__).splitlines()[0]}; files can be given instead"
            raise UserError(f"{option}: cannot read {self} from the hub: {reason}") from error


BLANK = " \n"
"""A blank line of WikiText as published; on the hub it is empty, and the text would be another one."""


def network_errors() -> tuple[type[Exception], ...]:
    """Return the base exceptions of the HTTP packages that huggingface_hub may use."""
    clients = (name for name in ("httpx2", "httpx", "requests") if importlib.util.find_spec(name) is not None)
    return tuple(importlib.import_module(name).HTTPError for name in clients)


def _labeled_rows(dataset: Any, columns: Columns) -> Iterator[TableRow]:
    feature = dataset.features[columns.label]
    names: list[str] | None = getattr(getattr(feature, "feature", feature), "names", None)

    def name_class(label: Any) -> str:
        return str(label) if names is None else names[label]

    texts = [dataset[column] for column in columns.texts]
    for number, (label, *parts) in enumerate(zip(dataset[columns.label], *texts, strict=True), start=1):
        if not isinstance(label, list):
            if label != -1:
                yield TableRow(tuple(parts), name_class(label), number)
        elif label:
            yield TableRow(tuple(parts[0]), tuple(map(name_class, label)), number)


@dataclass(frozen=True)
class HubDataset:
    """A data set of the hub, and its splits for training and evaluation.

    `columns` are those of texts and label, or the one column of running text.
    """

    repository: str
    config: str | None
    columns: Columns | str
    splits: tuple[str, str] = ("train", "validation")

    def read(self, option: str = TASK) -> tuple[Table, Table]:
        """Read both splits. Class indices become class names; rows with the label −1, which have none, are dropped."""
        return self._read_split(self.splits[0], option), self._read_split(self.splits[1], option)

    def _read_split(self, name: str, option: str) -> Table:
        columns, split = self.columns, HubSplit(self.repository, self.config, name)
        required = (columns,) if isinstance(columns, str) else (*columns.texts, columns.label)
        with split.open(option) as dataset:
            check_columns(required, dataset.column_names, str(split), option)
            if isinstance(columns, str):
                rows = running_text_rows(line or BLANK for line in dataset[columns])
            else:
                rows = _labeled_rows(dataset, columns)
            return Table(str(split), tuple(rows), "row", option)


def _glue(config: str, *texts: str, evaluation: str = "validation") -> HubDataset:
    return HubDataset("nyu-mll/glue", config, Columns(texts, "label"), ("train", evaluation))


def _super_glue(config: str, *texts: str) -> HubDataset:
    return HubDataset("aps/super_glue", config, Columns(texts, "label"))


def _topics(repository: str, *texts: str, label: str = "label") -> HubDataset:
    return HubDataset(repository, None, Columns(texts, label), ("train", "test"))


HUB_DATASETS: Mapping[str, HubDataset] = {
    "cola": _glue("cola", "sentence"),
    "sst2": _glue("sst2", "sentence"),
    "mrpc": _glue("mrpc", "sentence1", "sentence2"),
    "qqp": _glue("qqp", "question1", "question2"),
    "rte": _glue("rte", "sentence1", "sentence2"),
    "mnli": _glue("mnli", "premise", "hypothesis", evaluation="validation_matched"),
    "mnli-mismatched": _glue("mnli", "premise", "hypothesis", evaluation="validation_mismatched"),
    "boolq": _super_glue("boolq", "question", "passage"),
    "cb": _super_glue("cb", "premise", "hypothesis"),
    "copa": _super_glue("copa", "premise", "question", "choice1", "choice2"),
    "multirc": _super_glue("multirc", "paragraph", "question", "answer"),
    "wic": _super_glue("wic", "word", "sentence1", "sentence2"),
    "ag-news": _topics("fancyzhx/ag_news", "text"),
    "amazon": _topics("SetFit/amazon_reviews_multi_en", "text"),
    "dbpedia": _topics("fancyzhx/dbpedia_14", "title", "content"),
    "imdb": _topics("stanfordnlp/imdb", "text"),
    "yahoo": _topics("community-datasets/yahoo_answers_topics", "question_title", "best_answer", label="topic"),
    "yelp": _topics("fancyzhx/yelp_review_full", "text"),
    "ner": HubDataset("lhoestq/conll2003", None, Columns(("tokens",), "ner_tags")),
    "pos": HubDataset("lhoestq/conll2003", None, Columns(("tokens",), "pos_tags")),
    "wikitext": HubDataset("Salesforce/wikitext", "wikitext-103-raw-v1", "text"),
}
