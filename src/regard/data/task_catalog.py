"""Published tasks to train probes on, those of the PAPA paper: their files, metrics and presets."""

from collections.abc import Mapping
from dataclasses import dataclass

from regard.data.examples import TaskKind
from regard.data.hub import HUB_DATASETS, HubDataset
from regard.data.tables import Columns


@dataclass(frozen=True, kw_only=True)
class TaskPreset:
    """How a probe is trained; `rows` are the maximum numbers for training and validation, None for all."""

    learning_rate: float
    batch_size: int
    epochs: int
    length: int
    rows: tuple[int | None, int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A published task, with the presets of the paper and for a quick run on a laptop."""

    kind: TaskKind = "sequence"
    metric: str
    labels: tuple[str, ...] | None  # in the order of their indices; None if the training data determine them
    hub: HubDataset
    folders: tuple[str, ...]  # possible names of the folder with its files
    train: tuple[str, ...] = ("train.tsv",)  # possible names
    validation: tuple[str, ...] = ("dev.tsv",)  # possible names
    file_columns: Columns | None = None
    paper: TaskPreset
    laptop: TaskPreset = TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=64, rows=(1000, 500))


def _conll(name: str, metric: str, learning_rate: float) -> TaskSpec:
    return TaskSpec(
        kind="token",
        metric=metric,
        labels=None,
        hub=HUB_DATASETS[name],
        folders=("conll2003",),
        train=("train.txt", "eng.train"),
        validation=("valid.txt", "dev.txt", "eng.testa"),
        paper=TaskPreset(learning_rate=learning_rate, batch_size=8, epochs=4, length=128),
    )


_WIKITEXT = TaskSpec(
    kind="mlm",
    metric="negative_log_perplexity",
    labels=(),
    hub=HUB_DATASETS["wikitext"],
    folders=("wikitext-103-raw", "wikitext-103", "wikitext-2-raw", "wikitext-2", "wikitext103", "wikitext2"),
    train=("wiki.train.raw", "wiki.train.tokens"),
    validation=("wiki.valid.raw", "wiki.valid.tokens"),
    paper=TaskPreset(learning_rate=5e-4, batch_size=8, epochs=2, length=128),
)
WIKITEXT_TEST = ("wiki.test.raw", "wiki.test.tokens")
"""What to validate on where there is no file to train on."""

TASKS: Mapping[str, TaskSpec] = {
    "cola": TaskSpec(
        metric="mcc",
        labels=("unacceptable", "acceptable"),
        hub=HUB_DATASETS["cola"],
        folders=("CoLA",),
        file_columns=Columns(("sentence",), "label", header=("source", "label", "mark", "sentence")),
        paper=TaskPreset(learning_rate=2e-5, batch_size=16, epochs=15, length=64),
        laptop=TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=32, rows=(1500, 600)),
    ),
    "sst2": TaskSpec(
        metric="accuracy",
        labels=("negative", "positive"),
        hub=HUB_DATASETS["sst2"],
        folders=("SST-2",),
        file_columns=Columns(("sentence",), "label"),
        paper=TaskPreset(learning_rate=1e-4, batch_size=32, epochs=4, length=64),
        laptop=TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=48, rows=(1000, 500)),
    ),
    "mrpc": TaskSpec(
        metric="f1",
        labels=("not_equivalent", "equivalent"),
        hub=HUB_DATASETS["mrpc"],
        folders=("MRPC",),
        file_columns=Columns(("#1 String", "#2 String"), "Quality"),
        paper=TaskPreset(learning_rate=2e-5, batch_size=16, epochs=15, length=128),
        laptop=TaskPreset(learning_rate=3e-4, batch_size=32, epochs=5, length=96, rows=(1600, 408)),
    ),
    "mnli": TaskSpec(
        metric="accuracy",
        labels=("entailment", "neutral", "contradiction"),
        hub=HUB_DATASETS["mnli-mismatched"],
        folders=("MNLI", "MNLI/original"),
        train=("train.tsv", "multinli_1.0_train.jsonl"),
        validation=("dev_mismatched.tsv", "multinli_1.0_dev_mismatched.jsonl"),
        file_columns=Columns(("sentence1", "sentence2"), "gold_label"),
        paper=TaskPreset(learning_rate=2e-4, batch_size=8, epochs=4, length=256),
    ),
    "ner": _conll("ner", "entity_f1", 1e-4),
    "pos": _conll("pos", "token_f1", 5e-4),
    "mlm": _WIKITEXT,
    "lm": _WIKITEXT,
}
