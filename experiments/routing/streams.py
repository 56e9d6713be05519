"""Streams of tasks whose texts have no instructions, read from a folder of published files.

`long`: the tasks of Long Sequence that are there, in order 3. `mixed`: twelve tasks of other files (GLUE, AG News,
DBpedia, CoNLL-2003, emotions, novels, speeches), in an order drawn by the seed. `answers`: the tasks of `long` as text
to text, for a decoder. `fifty`: fifty tasks for routers alone, of which some have no labels. `classes`: fifty tasks
with labels, for whole runs.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from experiments.sapt.run import EVALUATED, TRAIN, read_tasks
from regard.data import tables
from regard.data.conll import read_conll
from regard.data.examples import Examples
from regard.data.instructions import read_instruction_file
from regard.data.rows import FREE_ANSWER, LabeledRow, RawTask, hash_rank
from regard.data.splits import divide_rows
from regard.data.stream import ClassificationTask, Stream, TextPairs, TextTask
from regard.data.streams import assemble_stream, read_stream
from regard.data.tables import Columns
from regard.errors import UserError

ORDER = "3"
"""The order of `long`."""
TEST_FRACTION, MIN_WORDS, PASSAGES, PASSAGE_WORDS = 0.2, 20, 400, 40
GLUE: Mapping[str, tuple[str, str, Columns, Mapping[str, str]]] = {
    "sst2": (
        "SST-2/train.tsv.gz",
        "SST-2/dev.tsv",
        Columns(("sentence",), "label"),
        {"0": "negative", "1": "positive"},
    ),
    "cola": (
        "CoLA/train.tsv",
        "CoLA/dev.tsv",
        Columns(("sentence",), "label", header=("source", "label", "mark", "sentence")),
        {"0": "unacceptable", "1": "acceptable"},
    ),
    "mrpc": (
        "MRPC/train.tsv",
        "MRPC/dev.tsv",
        Columns(("#1 String", "#2 String"), "Quality"),
        {"0": "not equivalent", "1": "equivalent"},
    ),
    "rte": (
        "RTE/train.tsv",
        "RTE/dev.tsv",
        Columns(("sentence1", "sentence2"), "label"),
        {"not_entailment": "not entailment"},
    ),
}
"""Training file, test file, columns and other names of classes."""
NEWS = ("World", "Sports", "Business", "Sci/Tech")
ENTITIES = {"PER": "a person", "ORG": "an organization", "LOC": "a place"}
NOVELS = (
    ("The Odd Women", "OLIVER TWIST", "NOSTROMO", "THE WATER OF THE WONDROUS ISLES"),
    ("_THE NAPOLEON OF NOTTING HILL_", "FENTON'S QUEST", "RUTH", "THE BLACK ARROW A TALE OF THE TWO ROSES"),
    ("THE HISTORY OF PENDENNIS", "Will Warburton", "LITTLE LORD FAUNTLEROY", "NIGHT AND DAY"),
    ("SYLVIA'S LOVERS.", "The Warden", "The White Ladies of Worcester", "THE VIRGINIANS"),
    ("EREMA;", "DANIEL DERONDA", '"CAPTAINS COURAGEOUS"', "The Woman in White"),
)
"""The lines that novels begin with, by task."""
SPEAKERS = (("Truman", "Eisenhower", "Johnson", "Reagan"), ("Ford", "Carter", "Bush", "Clinton"))
EMOTIONS = "task875_emotion_classification"
FREE = (
    *("task002_quoref_answer_generation", "task073_commonsenseqa_answer_generation", "task1290_xsum_summarization"),
    *("task1510_evalution_relation_extraction", "task1572_samsum_summary", "task1590_diplomacy_text_generation"),
    *("task1687_sentiment140_classification", "task1729_personachat_generate_next", "task181_outcome_extraction"),
    *("task511_reddit_tifu_long_text_summarization", "task591_sciq_answer_generation"),
    *("task639_multi_woz_user_utterance_generation", "task748_glucose_reverse_cause_event_detection"),
)
"""Tasks of SuperNI that are read without labels, for routers alone."""
LABELLED: Mapping[str, Mapping[str, str]] = {
    "task1687_sentiment140_classification": {},
    "task181_outcome_extraction": {"not found": "no outcome", "": "an outcome"},
}
"""Tasks of SuperNI with other names for their answers; that of "" is for all others."""
IN_BOTH = ("sst2", "rte", "agnews", "dbpedia")
"""Tasks of `long` whose texts are among those of `mixed`."""
STDLIB_TASKS, ANSWER_WORDS = 5, 40
Pairs = Iterable[tuple[tuple[str, ...], str]]
"""Texts of rows, and their labels."""


def read_long(seed: int, data: str, train: int = TRAIN) -> Stream:
    """Read the tasks of Long Sequence that are there, without instructions."""
    return read_tasks(ORDER, seed, data, instructions=False, train=train)


def read_instructed(seed: int, data: str) -> Stream:
    """Read the same tasks, each text behind its instruction."""
    return read_tasks(ORDER, seed, data)


def read_answers(seed: int, data: str) -> Stream:
    """Read the tasks of `long` as text to text: the first words of a text, and its label as the answer."""
    stream = read_long(seed, data)
    return dataclasses.replace(
        stream, tasks=tuple(_as_answers(cast(ClassificationTask, task)) for task in stream.tasks)
    )


def read_mixed(seed: int, data: str, train: int = TRAIN) -> Stream:
    """Read twelve tasks of other files."""
    raw = [*_read_glue(data), _read_news(data), *_read_dbpedia(data, (5, 5, 4)), _read_entities(data)]
    raw += [_read_emotions(data), _read_novels(data, 0), _read_speeches(data, 0)]
    return assemble("mixed", raw, seed, train)


def take_first(stream: Stream, number: int) -> Stream:
    """Return the first tasks of a stream, in their order."""
    return dataclasses.replace(stream, tasks=stream.tasks[:number], order=tuple(range(number)))


def read_fifty(seed: int, data: str) -> Stream:
    """Read fifty tasks, some without labels: for routers alone."""
    raw = [*_read_glue(data), _read_news(data), *_read_dbpedia(data, (2,) * 7), _read_entities(data)]
    raw += [_read_emotions(data), *(_read_novels(data, number) for number in range(len(NOVELS)))]
    raw += [*(_read_speeches(data, number) for number in range(len(SPEAKERS))), _read_reviews(data)]
    raw += [_read_free(data, name) for name in FREE]
    others = [task for task in read_long(seed, data).tasks if task.name not in IN_BOTH]
    stdlib = read_stream("stdlib-split", samples_per_class=TRAIN // 2, max_eval_samples=EVALUATED, seed=seed)
    return shuffle("fifty", (*assemble("fifty", raw, seed).tasks, *others, *stdlib.tasks[:STDLIB_TASKS]), seed)


def read_classes(seed: int, data: str) -> Stream:
    """Read fifty tasks with labels: those of `fifty` that have them, the larger ones in parts, and four more."""
    raw = [*_read_glue(data), *_read_dbpedia(data, (2,) * 7), _read_entities(data)]
    raw += [_read_labelled(data, name, answers) for name, answers in LABELLED.items()]
    large = [_read_news(data), _read_emotions(data), *(_read_novels(data, number) for number in range(len(NOVELS)))]
    large += [_read_speeches(data, number) for number in range(len(SPEAKERS))]
    raw += [part for task in large for part in divide_classes(task)]
    others = [task for task in read_long(seed, data).tasks if task.name not in IN_BOTH]
    stdlib = read_stream("stdlib-split", samples_per_class=TRAIN // 2, max_eval_samples=EVALUATED, seed=seed)
    return shuffle("classes", (*assemble("classes", raw, seed).tasks, *others, *stdlib.tasks), seed)


STREAMS: Mapping[str, Callable[[int, str], Stream]] = {
    "long": read_long,
    "mixed": read_mixed,
    "instructed": read_instructed,
    "answers": read_answers,
    "fifty": read_fifty,
    "classes": read_classes,
}
PLAIN = ("long", "mixed", "answers")
"""The streams of whole runs whose texts have no instructions."""
TRAINED = (*PLAIN, "instructed", "classes")
"""The streams of whole runs."""
ALONE = ("long", "mixed", "instructed", "answers", "fifty")
"""The streams of routers alone."""


def read_named(name: str, seed: int, data: str) -> Stream:
    """Read a stream of `STREAMS`. Raises UserError for another."""
    if name not in STREAMS:
        raise UserError(f"stream: expected one of {', '.join(STREAMS)}, got {name!r}")
    return STREAMS[name](seed, data)


def _as_answers(task: ClassificationTask) -> TextTask:
    def convert(examples: Examples) -> TextPairs:
        texts = [" ".join("\n".join(parts).split()[:ANSWER_WORDS]) for parts in examples.texts]
        prompts = tuple(f"{text}\nOutput: " for text in texts)
        return TextPairs(inputs=prompts, targets=tuple((task.labels[label],) for label in examples.labels))

    return TextTask(
        name=task.name,
        train=convert(task.train),
        dev=convert(task.dev),
        test=convert(task.test),
        source=task.source,
        metric="exact-match",
        labels=task.labels,
    )


def assemble(name: str, raw: Sequence[RawTask], seed: int, train: int = TRAIN) -> Stream:
    """Sample at most `train` training rows of each task, classes alike, and order the tasks by the seed."""
    stream = assemble_stream(
        name,
        raw,
        samples_per_class=[train // len(task.labels) for task in raw],
        max_eval_samples=EVALUATED,
        seed=seed,
        protocol="clean",
        metadata={},
    )
    return shuffle(name, stream.tasks, seed)


def shuffle(name: str, tasks: Sequence[Any], seed: int) -> Stream:
    """Return a stream of tasks in an order drawn by the seed."""
    order = sorted(range(len(tasks)), key=lambda index: hash_rank("order", seed, tasks[index].name))
    return Stream(name=name, tasks=tuple(tasks[index] for index in order), order=tuple(order), seed=seed)


# -- tasks -----------------------------------------------------------------------------------------------------------


def make_task(name: str, train: Pairs, test: Pairs | None = None, labels: Sequence[str] = ()) -> RawTask:
    """Make a task; without test rows a fifth of each class is held out. Parts of a data set are "SOURCE part"."""
    rows = tuple(LabeledRow.of(texts, label) for texts, label in train)
    if test is None:
        rows, held_out = divide_rows(rows, (TEST_FRACTION,), 0, name)
    else:
        held_out = tuple(LabeledRow.of(texts, label) for texts, label in test)
    names = tuple(labels) or tuple(sorted({row.label for row in rows}))
    return RawTask(name, names, rows, None, held_out, source=name.split()[0], has_free_answers=names == (FREE_ANSWER,))


def divide_classes(task: RawTask, size: int = 2) -> list[RawTask]:
    """Divide a task without dev rows into tasks of so many of its classes."""
    parts = []
    for first in range(0, len(task.labels), size):
        labels = task.labels[first : first + size]
        train, test = (tuple(row for row in rows if row.label in labels) for rows in (task.train, task.test))
        name = f"{task.name}, part {first // size + 1}"
        parts.append(dataclasses.replace(task, name=name, labels=labels, train=train, test=test))
    return parts


def _read_glue(data: str) -> list[RawTask]:
    tasks = []
    for name, (train, test, columns, classes) in GLUE.items():
        splits = [
            [(row.texts, str(row.label)) for row in tables.read_sentences(Path(data) / "glue" / file, columns).rows]
            for file in (train, test)
        ]
        train_rows, test_rows = ([(texts, classes.get(label, label)) for texts, label in rows] for rows in splits)
        tasks.append(make_task(name, train_rows, test_rows))
    return tasks


def _read_news(data: str) -> RawTask:
    """Read AG News from its official test file; the training file there numbers classes otherwise."""
    columns = Columns(("Title", "Description"), "Class Index")
    rows = tables.read_table(Path(data) / "agnews" / "test.csv.gz", columns).rows
    return make_task("agnews", ((("\n".join(row.texts),), NEWS[int(str(row.label)) - 1]) for row in rows))


def _read_dbpedia(data: str, sizes: Sequence[int]) -> list[RawTask]:
    """Read the classes of DBpedia in their order, in tasks of so many classes."""
    folder = Path(data) / "dbpedia14"
    classes = [line for line in tables.read_text_lines(folder / "classes.txt") if line]
    names = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() for name in classes]
    rows = tables.read_table(folder / "train.jsonl.gz", Columns(("text",), "label")).rows
    tasks, first = [], 0
    for size in sizes:
        group = range(first, first + size)
        pairs = ((row.texts, names[int(str(row.label))]) for row in rows if int(str(row.label)) in group)
        tasks.append(make_task(f"dbpedia {first + 1} to {first + size}", pairs))
        first += size
    return tasks


def _read_entities(data: str) -> RawTask:
    """Read which sort of name is in a sentence of CoNLL-2003 that has names of one sort."""
    return read_sorts(data, "entities", lambda sorts: ENTITIES.get(next(iter(sorts))) if len(sorts) == 1 else None)


def read_sorts(data: str, name: str, label_of: Callable[[set[str]], str | None]) -> RawTask:
    """Read sentences of CoNLL-2003, labelled by the sorts of names in them; those without a label are left out."""
    splits: list[list[tuple[tuple[str, ...], str]]] = []
    for file in ("train.txt.gz", "test.txt.gz"):
        rows = [row for row in read_conll(Path(data) / "conll2003" / file, "ner").rows if len(row.texts) >= 5]
        sorts = ({tag.partition("-")[2] for tag in row.label or () if tag != "O"} for row in rows)
        labelled = zip(rows, map(label_of, sorts), strict=True)
        splits.append([((" ".join(row.texts),), label) for row, label in labelled if label is not None])
    return make_task(name, splits[0], splits[1])


def _read_emotions(data: str) -> RawTask:
    splits = [[((text,), answers[0]) for text, answers in rows] for rows in _read_superni(data, EMOTIONS)]
    return make_task("emotions", splits[0], splits[1])


def _read_labelled(data: str, name: str, names: Mapping[str, str]) -> RawTask:
    """Read the texts of a task of SuperNI, whose classes are its answers under other names."""
    splits = [
        [((text,), names.get(answers[0], names.get("", answers[0]))) for text, answers in rows]
        for rows in _read_superni(data, name)
    ]
    return make_task(name, splits[0], splits[1])


def _read_free(data: str, name: str) -> RawTask:
    """Read the texts of a task of SuperNI without its definition, and without labels."""
    splits = [[((text,), FREE_ANSWER) for text, _ in rows if text.strip()] for rows in _read_superni(data, name)]
    return make_task(name, splits[0], splits[1], labels=(FREE_ANSWER,))


def _read_superni(data: str, name: str) -> list[Sequence[tuple[str, tuple[str, ...]]]]:
    """Read inputs and answers of the training and the test file of a task."""
    folder = Path(data) / "CL_Benchmark" / "SuperNI" / name
    return [read_instruction_file(folder / f"{split}.json").rows for split in ("train", "test")]


def _read_reviews(data: str) -> RawTask:
    """Read film reviews, which have no labels."""
    lines = tables.read_text_lines(Path(data) / "lm_text" / "imdb_unsup_6500.txt.gz")
    passages = [line for line in lines if len(line.split()) >= MIN_WORDS][: 2 * PASSAGES]
    return make_task("film reviews", (((text,), FREE_ANSWER) for text in passages), labels=(FREE_ANSWER,))


def _read_novels(data: str, number: int) -> RawTask:
    """Read passages of four novels; the class is the novel."""
    novels = {heading: heading.strip('_".;').title() for heading in NOVELS[number]}
    return read_passages(data, "novels_train", novels, f"novels {number + 1}")


def read_passages(data: str, file: str, names: Mapping[str, str], task: str) -> RawTask:
    """Read passages of books from where each begins: `names` by their first lines, which are the classes."""
    lines = [line.strip() for line in tables.read_text_lines(Path(data) / "lm_text" / f"{file}.txt.gz")]
    pairs: list[tuple[tuple[str, ...], str]] = []
    for heading, name in names.items():
        start = lines.index(heading) + 1
        words = " ".join(lines[start : start + 30 * PASSAGES]).split()[: PASSAGE_WORDS * PASSAGES]
        passages = (" ".join(words[first : first + PASSAGE_WORDS]) for first in range(0, len(words), PASSAGE_WORDS))
        pairs += [((passage,), name) for passage in passages]
    return make_task(task, pairs)


def _read_speeches(data: str, number: int) -> RawTask:
    """Read paragraphs of speeches of four presidents; the class is the speaker."""
    pairs, speaker = [], ""
    for line in tables.read_text_lines(Path(data) / "lm_text" / "us_presidential_speeches.txt.gz"):
        if line.startswith("PRESIDENT ") or ("ADDRESS" in line and line.isupper()):
            speakers = chain.from_iterable(SPEAKERS)
            speaker = next((name for name in speakers if f"{name.upper()}'S" in line), "")
        elif speaker in SPEAKERS[number] and len(line.split()) >= MIN_WORDS:
            pairs.append(((line.strip(),), speaker))
    return make_task(f"speeches {number + 1}", pairs)


def describe_stream(stream: Stream) -> dict[str, Any]:
    """Return the tasks of a stream in order, with their classes and numbers of rows."""
    return {
        task.name: {"classes": len(task.labels), "train": len(task.train), "test": len(task.test)}
        for task in stream.tasks
    }
