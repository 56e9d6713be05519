"""Inputs of tasks and of their pseudo samples: in prompts, in generated texts, in files, and as rows of a model."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.data.benchmarks import LONG_SEQUENCE, SUPER_NI, InstructionTask
from regard.data.stream import ClassificationTask, TextTask
from regard.errors import UserError

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

    def fits(self, prompts: Iterable[str]) -> bool:
        """Return whether prompts begin and end so, with an input between."""
        min_length = len(self.before) + len(self.after)
        return all(
            len(prompt) > min_length and prompt.startswith(self.before) and prompt.endswith(self.after)
            for prompt in prompts
        )

    def extract_input(self, prompt: str) -> str:
        return prompt[len(self.before) : len(prompt) - len(self.after)]

    def make_prompt(self, text: str) -> str:
        return f"{self.before}{text}{self.after}"

    def make_sample(self, text: str) -> str:
        """Return what a generator learns to say: the definition, the mark, and the input."""
        return f"{self.definition} {INPUT_MARK} {text}".strip()

    def parse(self, text: str) -> str | None:
        """Return the input in a generated text; None if the mark is missing or repeated, or a side of it is empty."""
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
        frame = PromptFrame(definition, before, after)
        if frame.fits(prompts):
            return frame
    frame = PromptFrame(definition, definition, "")
    return frame if frame.fits(prompts) else PromptFrame(definition, "", "")


def drop_duplicates(texts: Iterable[str]) -> list[str]:
    """Return each text once, those that are the same but for white space too, in their order."""
    unique: dict[str, str] = {}
    for text in texts:
        unique.setdefault(plain_text(text), text)
    return list(unique.values())


def plain_text(text: str) -> str:
    """Return the text with single spaces between its words."""
    return " ".join(text.split())


def read_pseudo(folder: str | Path, task: str) -> tuple[str, ...]:
    """Return the different inputs of a task's pseudo samples from FOLDER/TASK/train.json, as SAPT's are published."""
    path = Path(folder) / task / "train.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        inputs = [row["input"].strip() for row in content["Instances"]]
    except FileNotFoundError:
        raise UserError(f"pseudo: expected pseudo samples of {task!r} in {path}, there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"pseudo: expected JSON with 'Instances' of 'input' in {path}: {error!r}") from None
    unique_inputs = drop_duplicates(text for text in inputs if text)
    if not unique_inputs:
        raise UserError(f"pseudo: expected inputs of {task!r} in {path}, got none")
    return tuple(unique_inputs)


def real_inputs(task: ClassificationTask | TextTask, split: str = "train") -> tuple[str, ...]:
    """Return the inputs of a split of a task without what all its prompts, or texts, have, as pseudo samples are."""
    if isinstance(task, TextTask):
        frame = find_frame(task)
        return tuple(frame.extract_input(prompt) for prompt in task.split(split).inputs)  # type: ignore[arg-type]
    skipped = 0 if find_definition(task) is None else 1
    return tuple(" ".join(texts[skipped:]) for texts in task.split(split).texts)  # type: ignore[arg-type]


def read_as_rows(task: ClassificationTask, inputs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the inputs of pseudo samples as the texts of rows; all of one that lacks parts is in its first text."""
    definition, instruction_task = find_definition(task), LONG_SEQUENCE.tasks.get(task.name)
    texts_by_row = [(text,) if instruction_task is None else _split_parts(instruction_task, text) for text in inputs]
    if definition is None:
        return tuple(texts_by_row)
    return tuple((definition, " ".join(texts).strip()) for texts in texts_by_row)


def _split_parts(instruction_task: InstructionTask, text: str) -> tuple[str, ...]:
    match = re.match(instruction_task.pattern.replace(r"\s*\n", r"\s+"), text, re.DOTALL | re.IGNORECASE)
    if match:
        return tuple(template.format(*match.groups()) for template in instruction_task.texts)
    names = re.findall(r"(\w[\w\\ ]*):\[ \\t\]", instruction_task.pattern.replace(r"\s*", " ").replace(r"\n", " "))
    remainder = re.sub(rf"\b(?:{'|'.join(names)})s?:", " ", text, flags=re.IGNORECASE) if names else text
    return (plain_text(remainder), *("" for _ in instruction_task.texts[1:]))


def find_definition(task: ClassificationTask) -> str | None:
    """Return the definition before each text of a task: the first of two texts, where all rows have the same."""
    texts = task.train.texts
    return texts[0][0] if len(texts[0]) == 2 and len(texts) > 1 and len({row[0] for row in texts}) == 1 else None
