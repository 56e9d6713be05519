"""What a generator of pseudo samples is asked and answers, and how an input stands in the prompts of its task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regard.data.benchmarks import LONG_SEQUENCE, SUPER_NI
from regard.data.stream import TextTask

QUESTION = "__gen__"
INPUT_MARK = "__inp__"
"""What a generator is asked with, and what stands between a definition and an input that it writes (2401.08295)."""
_PLACEHOLDER = "\0"


@dataclass(frozen=True)
class PromptFrame:
    """How the prompts of a task are written: `before` and `after` its inputs, and the task's definition."""

    definition: str
    before: str
    after: str

    def extract_input(self, prompt: str) -> str:
        """Return the input of a prompt."""
        return prompt[len(self.before) : len(prompt) - len(self.after)]

    def make_prompt(self, text: str) -> str:
        """Return the prompt of an input."""
        return f"{self.before}{text}{self.after}"

    def make_sample(self, text: str) -> str:
        """Return what a generator learns to say: the definition, the mark, and the input."""
        return f"{self.definition} {INPUT_MARK} {text}".strip()

    def parse(self, text: str) -> str | None:
        """Return the input in a generated text; None if the mark is missing or repeated, or a side of it is empty.

        The generated definition is ignored: prompts have the task's own.
        """
        fields = [field.strip() for field in text.split(INPUT_MARK)]
        if len(fields) != 2 or QUESTION in text or not fields[1] or (self.definition and not fields[0]):
            return None
        return fields[1]


def find_frame(task: TextTask) -> PromptFrame:
    """Return how the prompts of a task are written: as in the published collections, else behind its definition."""
    prompts, definition = task.train.inputs, task.definition
    for benchmark in (SUPER_NI, LONG_SEQUENCE):
        template = benchmark.prompt if definition else benchmark.prompt_without_definition
        before, after = template.format(definition=definition, input=_PLACEHOLDER).split(_PLACEHOLDER)
        if _fits(prompts, before, after):
            return PromptFrame(definition, before, after)
    return PromptFrame(definition, definition if _fits(prompts, definition, "") else "", "")


def drop_duplicates(texts: Iterable[str]) -> list[str]:
    """Return each text once, those that are the same but for white space too, in their order."""
    unique: dict[str, str] = {}
    for text in texts:
        unique.setdefault(plain_text(text), text)
    return list(unique.values())


def plain_text(text: str) -> str:
    """Return the text with single spaces between its words."""
    return " ".join(text.split())


def _fits(prompts: Iterable[str], before: str, after: str) -> bool:
    min_length = len(before) + len(after)
    return all(len(prompt) > min_length and prompt.startswith(before) and prompt.endswith(after) for prompt in prompts)
