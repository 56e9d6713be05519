"""Examples with labels, and the tasks that a probe is trained on."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

IGNORE_INDEX = -100  # the label of positions without one, as `torch.nn.functional.cross_entropy` ignores it by default

TaskKind = Literal["sequence", "token", "mlm"]
KINDS: tuple[TaskKind, ...] = ("sequence", "token", "mlm")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts and their labels, by column."""

    texts: tuple[tuple[str, ...], ...]  # one or two (sequence tasks), the words (token tasks), or one text (mlm)
    labels: tuple[Any, ...]  # a class index (sequence tasks) or one index per word (token tasks); empty for mlm

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        """Say how many there are, without their text."""
        return f"Examples({len(self)} rows)"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task to train a probe on."""

    name: str
    kind: TaskKind
    labels: tuple[str, ...]  # class names in the order of their indices
    metric: str  # a key of `regard.training.METRICS`
    train: Examples
    validation: Examples
    source: str  # files or hub repository
    left_out: int = 0  # rows of a user's table that were left out: no label or no text

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of class names, texts and labels, after sampling."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        for examples in (self.train, self.validation):
            digest.update(f"\n{len(examples)}\n".encode())
            for index, texts in enumerate(examples.texts):
                label = examples.labels[index] if examples.labels else None
                digest.update(json.dumps([texts, label]).encode() + b"\n")
        return digest.hexdigest()
