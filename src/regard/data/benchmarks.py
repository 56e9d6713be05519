"""The instruction benchmarks of O-LoRA and SAPT: their tasks, answers, prompts and task orders."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regard.data.hub import HUB_DATASETS, HubDataset
from regard.data.stream import Metric

TaskType = Literal["classification", "generation"]
"""How an instruction task is read: "classification" for encoders, "generation" from text to text."""


@dataclass(frozen=True)
class InstructionTask:
    """A classification task with instructions, whose inputs are written in parts."""

    name: str
    labels: tuple[str, ...]  # answers in the order of the class indices on the hub
    pattern: str  # regular expression of an input with a group for each part
    texts: tuple[str, ...] = ("{0}", "{1}")  # one or two texts that an encoder reads, as templates of the parts
    hub_labels: tuple[str, ...] = ()  # class names on the hub, if not `labels`
    hub_texts: tuple[str, ...] = ()  # templates of the text columns of the hub, if not `texts`
    hub_test: str = "the development set"  # what the hub's test rows are
    match_last_part: bool = False  # rows with the same last part are the same row
    shares_first_part: bool = False  # several rows have the same first part, such as a passage

    @property
    def hub(self) -> HubDataset:
        return HUB_DATASETS["ag-news" if self.name == "agnews" else self.name]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A collection of tasks with instructions."""

    folder: str
    task_types: tuple[TaskType, ...]
    metric: Metric
    prompt: str  # template with {definition} and {input}
    prompt_without_definition: str
    tasks: Mapping[str, InstructionTask] = field(default_factory=dict)  # all others have free answers
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # of tasks that have another one


def _named_parts(*names: str) -> str:
    """Return the pattern of parts "Name: text", each at the start of a line."""
    return r"\n".join(rf"\s*{re.escape(name)}:[ \t]*(.*?)\s*" for name in names) + r"\Z"


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split(", "))


DBPEDIA_CLASSES = _split(
    "Company, EducationalInstitution, Artist, Athlete, OfficeHolder, MeanOfTransportation, Building, NaturalPlace, "
    "Village, Animal, Plant, Album, Film, WrittenWork"
)
YAHOO_CLASSES = _split(
    "Society & Culture, Science & Mathematics, Health, Education & Reference, Computers & Internet, Sports, "
    "Business & Finance, Entertainment & Music, Family & Relationships, Politics & Government"
)
_SINGLE = ("{0}",)
_TRUTH = ("False", "True")
SENTIMENT = ("very negative", "negative", "neutral", "positive", "very positive")
_SENTENCES = _named_parts("sentence 1", "sentence 2")
_QUESTIONS = _named_parts("first sentence", "second sentence")
_PASSAGE = _named_parts("paragraph", "question", "candidate answer")
_TITLE_AND_TEXT = _named_parts("Title", "Text")
_HUB_STARS = ("1 star", "2 star", "3 stars", "4 stars", "5 stars")
_OFFICIAL, _REVIEWS = "official test", "official test of the reviews of 2015 to 2019, not that of Zhang et al."

_LONG_SEQUENCE_TASKS = (
    InstructionTask("mnli", ("entailment", "neutral", "contradiction"), _SENTENCES),
    InstructionTask("cb", ("entailment", "contradiction", "neutral"), _SENTENCES),
    InstructionTask("wic", _TRUTH, r"\s*word:[ \t]*(.*?)\s*\n(.*?)\s*\n(.*?)\s*\Z", ("{0}: {1}", "{2}")),
    InstructionTask(
        "copa",
        ("A", "B"),
        r"(.*?)\s*\nA:[ \t]*(.*?)\s*\nB:[ \t]*(.*?)\s*\Z",
        ("{0}", "A: {1} B: {2}"),
        hub_labels=("choice1", "choice2"),
        hub_texts=("{0} What is the {1}?", "A: {2} B: {3}"),
    ),
    InstructionTask("qqp", ("no", "yes"), _QUESTIONS, hub_labels=("not_duplicate", "duplicate")),
    InstructionTask("boolq", _TRUTH, _named_parts("question", "passage")),
    InstructionTask("rte", ("entailment", "contradiction"), _SENTENCES, hub_labels=("entailment", "not_entailment")),
    InstructionTask("imdb", ("Bad", "Good"), r"\s*(.*?)\s*\Z", _SINGLE, hub_labels=("neg", "pos"), hub_test=_OFFICIAL),
    InstructionTask("yelp", SENTIMENT, _named_parts("Text"), _SINGLE, hub_labels=_HUB_STARS, hub_test=_OFFICIAL),
    InstructionTask("amazon", SENTIMENT, _TITLE_AND_TEXT, hub_texts=_SINGLE, hub_test=_REVIEWS),
    InstructionTask("sst2", ("Bad", "Good"), _named_parts("Text"), _SINGLE, hub_labels=("negative", "positive")),
    InstructionTask(
        "dbpedia",
        _split(
            "Company, Educational Institution, Artist, Athlete, Office Holder, Mean of Transportation, Building, "
            "Natural Place, Village, Animal, Plant, Album, Film, Written Work"
        ),
        _TITLE_AND_TEXT,
        hub_labels=DBPEDIA_CLASSES,
        hub_test=_OFFICIAL,
        match_last_part=True,
    ),
    InstructionTask(
        "agnews",
        ("World", "Sports", "Business", "Science or Technology"),
        _TITLE_AND_TEXT,
        hub_labels=("World", "Sports", "Business", "Sci/Tech"),
        hub_texts=_SINGLE,
        hub_test=_OFFICIAL,
        match_last_part=True,
    ),
    InstructionTask("multirc", _TRUTH, _PASSAGE, ("{0}", "{1} {2}"), shares_first_part=True),
    InstructionTask("yahoo", YAHOO_CLASSES, _named_parts("Title", "Answer"), hub_test=_OFFICIAL),
)

LONG_SEQUENCE = Benchmark(
    folder="Long_Sequence",
    task_types=("classification", "generation"),
    metric="exact-match",
    prompt="{definition}\n{input}\nOutput: ",
    prompt_without_definition="{input}\nOutput: ",
    tasks={task.name: task for task in _LONG_SEQUENCE_TASKS},
)
SUPER_NI = Benchmark(
    folder="SuperNI",
    task_types=("generation",),
    metric="rouge-l",
    prompt="Definition: {definition}\n\nNow complete the following example -\nInput: {input}\nOutput: ",
    prompt_without_definition="Now complete the following example -\nInput: {input}\nOutput: ",
)

TRACE_METRICS: Mapping[str, Metric] = {
    "C-STANCE": "accuracy",
    "FOMC": "accuracy",
    "MeetingBank": "rouge-l",
    "Py150": "edit-similarity",
    "ScienceQA": "choice",
    "NumGLUE-cm": "accuracy",
    "NumGLUE-ds": "accuracy",
    "20Minuten": "sari",
}
"""The tasks of TRACE (arXiv 2310.06762) in their order, and how answers are scored."""
TRACE = Benchmark(
    folder="TRACE",
    task_types=("generation",),
    metric="accuracy",
    prompt="{input}",
    prompt_without_definition="{input}",
    metrics=TRACE_METRICS,
)

_ORDER_3 = tuple(task.name for task in _LONG_SEQUENCE_TASKS)
_ORDER_4 = _split("yelp, amazon, mnli, cb, copa, qqp, rte, imdb, sst2, dbpedia, agnews, yahoo, multirc, boolq, wic")
LONG_ORDERS: Mapping[str, tuple[str, ...]] = {
    "3": _ORDER_3,
    "4": _ORDER_4,
    "o-lora-4": _ORDER_3,
    "o-lora-5": _split(
        "multirc, boolq, wic, mnli, cb, copa, qqp, rte, imdb, sst2, dbpedia, agnews, yelp, amazon, yahoo"
    ),
    "o-lora-6": _ORDER_4,
}
"""Orders 3 and 4 of SAPT (arXiv 2401.08295), and orders 4 to 6 of O-LoRA (arXiv 2310.14152, table of task orders)."""

_SUPER_NI_TASKS = _split(
    "task002_quoref_answer_generation, task073_commonsenseqa_answer_generation, task181_outcome_extraction, "
    "task363_sst2_polarity_classification, task511_reddit_tifu_long_text_summarization, "
    "task591_sciq_answer_generation, task639_multi_woz_user_utterance_generation, "
    "task748_glucose_reverse_cause_event_detection, task875_emotion_classification, task1290_xsum_summarization, "
    "task1510_evalution_relation_extraction, task1572_samsum_summary, task1590_diplomacy_text_generation, "
    "task1687_sentiment140_classification, task1729_personachat_generate_next"
)
SUPER_NI_ORDERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(task for number in order.split() for task in _SUPER_NI_TASKS if task.startswith(f"task{number}_"))
    for name, order in {
        "1": "1572 363 1290 181 002 1510 639 1729 073 1590 748 511 591 1687 875",
        "2": "748 073 1590 639 1572 1687 591 363 1510 1729 181 511 002 1290 875",
    }.items()
}
"""Orders 1 and 2 of SAPT (arXiv 2401.08295)."""
