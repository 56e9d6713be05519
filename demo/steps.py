"""The steps of the tour: the texts they read, and their command lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

LINES, LEARN, MIN_WORDS = "lines.jsonl", "tasks.jsonl", 8
"""Files of texts, and the fewest words of one."""
OF_TASK: Mapping[str, Sequence[str]] = {
    "objects": ("specialnames", "types"),
    "text": ("string-methods", "formatstrings"),
    "statements": ("import", "function"),
}
"""Tasks that are learnt one after another: to tell lines of two help topics apart."""
SENTENCE = "The keys of a dictionary are unique: a key that is given twice keeps its last value."
LEARN_OPTIONS = ("--model", "minilm", "--seeds", "1,2", "--num-epochs", "3", "--length", "24", "--no-save-models")


TURNS = {
    **{"measure": (1, 1), "look": (1, 2)},
    "pretrain": (2, 1),
    **{"prescale": (3, 1), "replace": (3, 2), "sapt": (3, 3)},
}
"""The turn of each step, and its place in it; `pretrain` has two trials side by side itself."""


@dataclass(frozen=True)
class Step:
    """One command of the tour; `result` is the file that a finished one leaves, below the folder of the tour.

    `turn` is its turn, and its place in that. Steps of one turn run side by side, each on one core.
    """

    key: str
    title: str
    command: tuple[str, ...]
    result: str
    turn: tuple[int, int] = (0, 0)


def write_texts(folder: Path) -> None:
    """Write the texts of the tour, lines of Python's own documentation."""
    replace = [
        {"text": line, "label": label}
        for label, topic in (("classes", "specialnames"), ("strings", "string-methods"))
        for line in _lines(topic)
    ]
    learn = [
        {"task": task, "text": line, "label": topic}
        for task, names in OF_TASK.items()
        for topic in names
        for line in _lines(topic)[:40]
    ]
    for name, rows in ((LINES, replace), (LEARN, learn)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _lines(topic: str) -> list[str]:
    return [line.strip() for line in topics[topic].splitlines() if len(line.split()) >= MIN_WORDS]


def make_steps(options: Mapping[str, Sequence[str]]) -> list[Step]:
    """Return the steps in order; `options` has further options of some, by their keys."""
    resume = ("--resume", "--overwrite")
    steps = (
        Step(
            "measure",
            "measure: where MiniLM's attention goes",
            ("measure", "minilm", "--samples", "100", "--length", "64", "--out", "measure", "--overwrite"),
            "measure/results.json",
        ),
        Step(
            "look",
            "look: one sentence, token by token",
            ("look", "minilm", SENTENCE, "--out", "look.html", "--overwrite"),
            "look.html",
        ),
        Step(
            "replace",
            "replace: MiniLM with constant attention",
            (
                *("replace", "minilm", "--task", LINES, "--length", "24", "--num-epochs", "3"),
                *("--max-train-samples", "160"),
                *("--dynamic-fractions", "1,1/2,0", "--out", "replace", *resume),
            ),
            "replace/results.json",
        ),
        Step(
            "pretrain",
            "pretrain: a small decoder with softmax, and one with sigmoid",
            (
                *("sweep", "pretrain", "pico", "--vary", "attention=softmax,sigmoid", "--num-seeds", "1"),
                *("--max-steps", "750", "--out", "pretrain"),
            ),
            "pretrain/trials.parquet",
        ),
        Step(
            "prescale",
            "learn: fine-tuning and pre-scaling, task after task",
            ("learn", LEARN, "--method", "finetune,prescale", *LEARN_OPTIONS, "--out", "prescale", *resume),
            "prescale/results.json",
        ),
        Step(
            "sapt",
            "learn: one LoRA adapter for all tasks, and SAPT's pool of adapters",
            ("learn", LEARN, "--method", "sequential-lora,sapt", *LEARN_OPTIONS, "--out", "sapt", *resume),
            "sapt/results.json",
        ),
    )
    return [Step(s.key, s.title, (*s.command, *options.get(s.key, ())), s.result, TURNS[s.key]) for s in steps]
