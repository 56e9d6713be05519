"""The benchmarks of instructions that O-LoRA and SAPT publish: tasks, answers, orders, and how an input is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regard.data.text_task import Metric

SheetForm = Literal["classification", "generation"]
"""'labels': classification, for encoders; 'text': from text to text."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where the rows of a data set are on the hub: its columns are the parts of an input, `names` those of its classes.

    `splits`: those of train and of what is evaluated on, which `evaluated` says. `texts` as in `InstructionTask`.
    """

    place: tuple[str, str | None]
    columns: tuple[str, ...]
    label: str = "label"
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    splits: tuple[str, str] = ("train", "validation")
    evaluated: str = "the development set"


@dataclass(frozen=True, kw_only=True)
class InstructionTask:
    """A task of classification whose inputs are written in parts.

    `labels`: the answers, in the order of the class numbers on the hub. `parts`: a pattern of the input with a group
    for each part. `texts`: the one or two texts that an encoder reads, made of the parts by number. `body`: rows are
    the same where their last parts are. `grouped`: several rows share their first part, as a passage.
    """

    name: str
    labels: tuple[str, ...]
    parts: str
    texts: tuple[str, ...]
    hub: Hub
    body: bool = False
    grouped: bool = False


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A collection of tasks with instructions: its folder, which forms of it there are, and how they are scored.

    `prompt`: what a model reads, of {definition} and {input}; `headless` that of a task without a definition.
    """

    folder: str
    task_types: tuple[SheetForm, ...]
    metric: Metric
    prompt: str
    headless: str
    tasks: Mapping[str, InstructionTask] = field(default_factory=dict)


def _labelled(*names: str) -> str:
    """The pattern of an input that holds 'Name: text', one part behind the other, each at the start of a line."""
    return r"\n".join(rf"\s*{re.escape(name)}:[ \t]*(.*?)\s*" for name in names) + r"\Z"


_GLUE, _SUPER = "nyu-mll/glue", "aps/super_glue"
_PAIR = ("{0}", "{1}")
_ONE = ("{0}",)
_TRUTH = ("False", "True")
_NLI = ("entailment", "neutral", "contradiction")
_MOODS = ("very negative", "negative", "neutral", "positive", "very positive")
_SENTENCES = _labelled("sentence 1", "sentence 2")
_TITLED = _labelled("Title", "Text")
_OFFICIAL = ("train", "test")

_LONG = (
    InstructionTask(
        name="mnli",
        labels=_NLI,
        parts=_SENTENCES,
        texts=_PAIR,
        hub=Hub(place=(_GLUE, "mnli"), columns=("premise", "hypothesis"), splits=("train", "validation_matched")),
    ),
    InstructionTask(
        name="cb",
        labels=("entailment", "contradiction", "neutral"),
        parts=_SENTENCES,
        texts=_PAIR,
        hub=Hub(place=(_SUPER, "cb"), columns=("premise", "hypothesis")),
    ),
    InstructionTask(
        name="wic",
        labels=_TRUTH,
        parts=r"\s*word:[ \t]*(.*?)\s*\n(.*?)\s*\n(.*?)\s*\Z",
        texts=("{0}: {1}", "{2}"),
        hub=Hub(place=(_SUPER, "wic"), columns=("word", "sentence1", "sentence2")),
    ),
    InstructionTask(
        name="copa",
        labels=("A", "B"),
        parts=r"(.*?)\s*\nA:[ \t]*(.*?)\s*\nB:[ \t]*(.*?)\s*\Z",
        texts=("{0}", "A: {1} B: {2}"),
        hub=Hub(
            place=(_SUPER, "copa"),
            columns=("premise", "question", "choice1", "choice2"),
            names=("choice1", "choice2"),
            texts=("{0} What is the {1}?", "A: {2} B: {3}"),
        ),
    ),
    InstructionTask(
        name="qqp",
        labels=("no", "yes"),
        parts=_labelled("first sentence", "second sentence"),
        texts=_PAIR,
        hub=Hub(place=(_GLUE, "qqp"), columns=("question1", "question2"), names=("not_duplicate", "duplicate")),
    ),
    InstructionTask(
        name="boolq",
        labels=_TRUTH,
        parts=_labelled("question", "passage"),
        texts=_PAIR,
        hub=Hub(place=(_SUPER, "boolq"), columns=("question", "passage")),
    ),
    InstructionTask(
        name="rte",
        labels=("entailment", "contradiction"),
        parts=_SENTENCES,
        texts=_PAIR,
        hub=Hub(place=(_GLUE, "rte"), columns=("sentence1", "sentence2"), names=("entailment", "not_entailment")),
    ),
    InstructionTask(
        name="imdb",
        labels=("Bad", "Good"),
        parts=r"\s*(.*?)\s*\Z",
        texts=_ONE,
        hub=Hub(
            place=("stanfordnlp/imdb", None),
            columns=("text",),
            names=("neg", "pos"),
            splits=_OFFICIAL,
            evaluated="official test",
        ),
    ),
    InstructionTask(
        name="yelp",
        labels=_MOODS,
        parts=_labelled("Text"),
        texts=_ONE,
        hub=Hub(
            place=("fancyzhx/yelp_review_full", None),
            columns=("text",),
            names=("1 star", "2 star", "3 stars", "4 stars", "5 stars"),
            splits=_OFFICIAL,
            evaluated="official test",
        ),
    ),
    InstructionTask(
        name="amazon",
        labels=_MOODS,
        parts=_TITLED,
        texts=_PAIR,
        hub=Hub(
            place=("SetFit/amazon_reviews_multi_en", None),
            columns=("text",),
            texts=_ONE,
            splits=_OFFICIAL,
            evaluated="official test of the reviews of 2015 to 2019, not that of Zhang et al.",
        ),
    ),
    InstructionTask(
        name="sst2",
        labels=("Bad", "Good"),
        parts=_labelled("Text"),
        texts=_ONE,
        hub=Hub(place=(_GLUE, "sst2"), columns=("sentence",), names=("negative", "positive")),
    ),
    InstructionTask(
        name="dbpedia",
        labels=(
            "Company",
            "Educational Institution",
            "Artist",
            "Athlete",
            "Office Holder",
            "Mean of Transportation",
            "Building",
            "Natural Place",
            "Village",
            "Animal",
            "Plant",
            "Album",
            "Film",
            "Written Work",
        ),
        parts=_TITLED,
        texts=_PAIR,
        body=True,
        hub=Hub(
            place=("fancyzhx/dbpedia_14", None),
            columns=("title", "content"),
            names=(
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
            splits=_OFFICIAL,
            evaluated="official test",
        ),
    ),
    InstructionTask(
        name="agnews",
        labels=("World", "Sports", "Business", "Science or Technology"),
        parts=_TITLED,
        texts=_PAIR,
        body=True,
        hub=Hub(
            place=("fancyzhx/ag_news", None),
            columns=("text",),
            names=("World", "Sports", "Business", "Sci/Tech"),
            texts=_ONE,
            splits=_OFFICIAL,
            evaluated="official test",
        ),
    ),
    InstructionTask(
        name="multirc",
        labels=_TRUTH,
        parts=_labelled("paragraph", "question", "candidate answer"),
        texts=("{0}", "{1} {2}"),
        grouped=True,
        hub=Hub(place=(_SUPER, "multirc"), columns=("paragraph", "question", "answer")),
    ),
    InstructionTask(
        name="yahoo",
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
        parts=_labelled("Title", "Answer"),
        texts=_PAIR,
        hub=Hub(
            place=("community-datasets/yahoo_answers_topics", None),
            columns=("question_title", "best_answer"),
            label="topic",
            splits=_OFFICIAL,
            evaluated="official test",
        ),
    ),
)

LONG_SEQUENCE = Benchmark(
    folder="Long_Sequence",
    task_types=("classification", "generation"),
    metric="exact-match",
    prompt="{definition}\n{input}\nOutput: ",
    headless="{input}\nOutput: ",
    tasks={task.name: task for task in _LONG},
)
SUPER_NI = Benchmark(
    folder="SuperNI",
    task_types=("generation",),
    metric="rouge-l",
    prompt="Definition: {definition}\n\nNow complete the following example -\nInput: {input}\nOutput: ",
    headless="Now complete the following example -\nInput: {input}\nOutput: ",
)

_THIRD = "mnli cb wic copa qqp boolq rte imdb yelp amazon sst2 dbpedia agnews multirc yahoo"
_FOURTH = "yelp amazon mnli cb copa qqp rte imdb sst2 dbpedia agnews yahoo multirc boolq wic"
_O_LORA_FIFTH = "multirc boolq wic mnli cb copa qqp rte imdb sst2 dbpedia agnews yelp amazon yahoo"
LONG_ORDERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(order.split())
    for name, order in {
        "3": _THIRD,
        "4": _FOURTH,
        "o-lora-4": _THIRD,
        "o-lora-5": _O_LORA_FIFTH,
        "o-lora-6": _FOURTH,
    }.items()
}
"""Orders 3 and 4 of SAPT (arXiv 2401.08295), and orders 4 to 6 of O-LoRA (arXiv 2310.14152, table of task orders)."""

_NUMBERED = (
    "task002_quoref_answer_generation",
    "task073_commonsenseqa_answer_generation",
    "task181_outcome_extraction",
    "task363_sst2_polarity_classification",
    "task511_reddit_tifu_long_text_summarization",
    "task591_sciq_answer_generation",
    "task639_multi_woz_user_utterance_generation",
    "task748_glucose_reverse_cause_event_detection",
    "task875_emotion_classification",
    "task1290_xsum_summarization",
    "task1510_evalution_relation_extraction",
    "task1572_samsum_summary",
    "task1590_diplomacy_text_generation",
    "task1687_sentiment140_classification",
    "task1729_personachat_generate_next",
)


def _numbered(order: str) -> tuple[str, ...]:
    """The names of SuperNI's tasks by their numbers."""
    by_number = {name.split("_")[0].removeprefix("task"): name for name in _NUMBERED}
    return tuple(by_number[number] for number in order.split())


SUPER_NI_ORDERS: Mapping[str, tuple[str, ...]] = {
    "1": _numbered("1572 363 1290 181 002 1510 639 1729 073 1590 748 511 591 1687 875"),
    "2": _numbered("748 073 1590 639 1572 1687 591 363 1510 1729 181 511 002 1290 875"),
}
"""Orders 1 and 2 of SAPT (arXiv 2401.08295)."""
