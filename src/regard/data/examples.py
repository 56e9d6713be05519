"""What a task is: examples with labels to train and to validate a probe on."""

from dataclasses import dataclass
from typing import Any, Literal

TaskKind = Literal["sequence", "token", "mlm"]
KINDS: tuple[TaskKind, ...] = ("sequence", "token", "mlm")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts and their labels, one entry each an example.

    `texts`: sequence tasks one or two texts an example; token tasks its words; mlm one text.
    `labels`: sequence tasks the number of the class; token tasks a tuple of them, one a word; mlm an empty tuple.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task as read: its examples, the names of its classes in the order of their numbers, and where it came from.

    `sha256` is over the texts and labels that are here, so that rows drawn differently have another one.
    """

    name: str
    kind: TaskKind
    labels: tuple[str, ...]
    metric: str
    train: Examples
    validation: Examples
    source: str
    sha256: str
