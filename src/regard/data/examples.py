"""Examples with labels, and the tasks that a probe is trained on."""

from dataclasses import dataclass
from typing import Any, Literal

IGNORE_INDEX = -100
"""The label of positions without one, as `torch.nn.functional.cross_entropy` ignores it by default."""

TaskKind = Literal["sequence", "token", "mlm"]
KINDS: tuple[TaskKind, ...] = ("sequence", "token", "mlm")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts and their labels, by column.

    Attributes:
        texts: For each example one or two texts (sequence tasks), its words (token tasks), or one text (mlm).
        labels: For each example a class index (sequence tasks) or one index per word (token tasks); empty for mlm.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task to train a probe on.

    Attributes:
        labels: Class names in the order of their indices.
        metric: Name of the metric, a key of `regard.training.METRICS`.
        source: Files or hub repository that the examples come from.
        sha256: Hash of class names, texts and labels after sampling.
    """

    name: str
    kind: TaskKind
    labels: tuple[str, ...]
    metric: str
    train: Examples
    validation: Examples
    source: str
    sha256: str
