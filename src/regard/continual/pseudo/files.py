"""Pseudo samples from files, and how they are read by a model that other texts of their task are read by."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from regard.continual.pseudo.parsing import drop_duplicates, frame_of, plain_text
from regard.data.benchmarks import LONG_SEQUENCE, InstructionTask
from regard.data.stream import ClassificationTask, TextTask
from regard.errors import UserError


def read_pseudo(folder: str | Path, task: str) -> tuple[str, ...]:
    """The inputs of a task's pseudo samples, no two alike, from FOLDER/TASK/train.json as SAPT's are published.

    Raises UserError for a file that is not there, is none of Instances with an input, or has none.
    """
    path = Path(folder) / task / "train.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        written = [row["input"].strip() for row in said["Instances"]]
    except FileNotFoundError:
        raise UserError(f"pseudo: expected pseudo samples of {task!r} in {path}, there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"pseudo: expected JSON with 'Instances' of 'input' in {path}: {error!r}") from None
    found = drop_duplicates(one for one in written if one)
    if not found:
        raise UserError(f"pseudo: expected inputs of {task!r} in {path}, got none")
    return tuple(found)


def real_inputs(task: ClassificationTask | TextTask, split: str = "train") -> tuple[str, ...]:
    """The inputs of a split of a task as they compare with pseudo samples: without what all its prompts have.

    Of a task of classification the texts of each row, one behind the other, without a definition.
    """
    if isinstance(task, TextTask):
        frame = frame_of(task)
        return tuple(frame.inside(one) for one in task.split(split).inputs)  # type: ignore[arg-type]
    skipped = 0 if definition_of(task) is None else 1
    return tuple(" ".join(texts[skipped:]) for texts in task.split(split).texts)  # type: ignore[arg-type]


def readings(task: ClassificationTask, inputs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The inputs of pseudo samples as the texts that an encoder reads, those of each row of the task.

    White space between parts may be of any sort: T5's tokenizer knows no new lines. Of an input that lacks parts, as
    one that was cut, the first text is all that is there without the names of parts, and the others are empty. Where
    parts are told by new lines alone (`wic`) one may get words of another. In a query vector, which knows no order,
    neither changes anything.
    """
    definition, known = definition_of(task), LONG_SEQUENCE.tasks.get(task.name)
    made = [(one,) if known is None else _in_parts(known, one) for one in inputs]
    if definition is None:
        return tuple(made)
    return tuple((definition, " ".join(texts).strip()) for texts in made)


def _in_parts(known: InstructionTask, written: str) -> tuple[str, ...]:
    """An input as the texts of a row."""
    match = re.match(known.pattern.replace(r"\s*\n", r"\s+"), written, re.DOTALL | re.IGNORECASE)
    if match:
        return tuple(text.format(*match.groups()) for text in known.texts)
    names = re.findall(r"(\w[\w\\ ]*):\[ \\t\]", known.pattern.replace(r"\s*", " ").replace(r"\n", " "))
    left = re.sub(rf"\b(?:{'|'.join(names)})s?:", " ", written, flags=re.IGNORECASE) if names else written
    return (plain_text(left), *("" for _ in known.texts[1:]))


def definition_of(task: ClassificationTask) -> str | None:
    """The definition that stands before each text of a task; None where there is none.

    It is the first of two texts, where all rows have the same.
    """
    texts = task.train.texts
    first = {row[0] for row in texts}
    return texts[0][0] if len(texts[0]) == 2 and len(texts) > 1 and len(first) == 1 else None
