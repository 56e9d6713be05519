"""A stream that is given as data: what is known of one that was read is looked up for it as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.data.splits import FREE_ANSWER, LabeledRow, hash_rows
from regard.data.stream import SPLITS, ClassificationTask, Split, Stream
from regard.data.text_task import TextTask
from regard.errors import UserError


def with_row_hashes(stream: Stream) -> Stream:
    """The stream with a hash of the rows of each split that has none, by which a run that goes on knows it again.

    Raises UserError for texts that are none.
    """
    tasks = tuple(
        _text_with_digests(task) if isinstance(task, TextTask) else _with_digests(task) for task in stream.tasks
    )
    return replace(stream, tasks=tasks)


def _text_with_digests(task: TextTask) -> TextTask:
    return replace(task, sha256={split: task.sha256.get(split) or _text_digest(task, split) for split in SPLITS})


def _text_digest(task: TextTask, split: Split) -> str:
    """The hash of prompts and answers of a split."""
    rows = task.split(split)
    return hash_rows(
        tuple(LabeledRow((text,), FREE_ANSWER, "", of) for text, of in zip(rows.inputs, rows.targets, strict=True))
    )


def _with_digests(task: ClassificationTask) -> ClassificationTask:
    for split in SPLITS:
        _check_texts(task, split)
    return replace(task, sha256={split: task.sha256.get(split) or _digest(task, split) for split in SPLITS})


def _check_texts(task: ClassificationTask, split: Split) -> None:
    """Nothing, or a UserError: a row of a split holds something else than texts."""
    rows: tuple[Any, ...] = task.split(split).texts
    for texts in rows:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"stream: expected a tuple of texts in each row, {task.name} {split} has {texts!r}")


def _digest(task: ClassificationTask, split: Split) -> str:
    """The hash of texts and classes of a split."""
    names, rows = dict(enumerate(task.labels)), task.split(split)
    labels = (names.get(label, repr(label)) for label in rows.labels)
    return hash_rows(
        tuple(LabeledRow(tuple(texts), label, "") for texts, label in zip(rows.texts, labels, strict=True))
    )
