"""A task whose answers are written: an input and what may be said to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from regard.errors import UserError, check_choice

Metric = Literal["rouge-l", "exact-match"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """The rows of a split: inputs, and for each the answers that are right, of which the first is trained on.

    Raises UserError where an input has no answer, an answer is empty, or there is another number of them.
    """

    inputs: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        """Check that each input has an answer."""
        if len(self.inputs) != len(self.targets):
            raise UserError(f"pairs: expected answers to {len(self.inputs)} inputs, got answers to {len(self.targets)}")
        targets: tuple[Any, ...] = self.targets
        for at, answers in enumerate(targets):
            if isinstance(answers, str) or not answers or not all(answer.strip() for answer in answers):
                raise UserError(f"pairs: expected a tuple of answers, none of them empty, in row {at}, got {answers!r}")

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A task from text to text: its rows are complete prompts, as a model reads them, and their answers.

    `metric`: what answers are scored by. `definition`: what the task says of itself, part of every prompt; `labels`:
    the answers there are, none where they are free. `kind`: what sort of task it is in its collection, as dialogue or
    summarisation. `source` says where the rows came from; `sha256` has a hash of each split's rows.
    """

    name: str
    train: TextPairs
    dev: TextPairs
    test: TextPairs
    metric: Metric
    definition: str = ""
    labels: tuple[str, ...] = ()
    kind: str = ""
    source: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the metric."""
        check_choice("metric", self.metric, METRICS)

    def split(self, name: Literal["train", "dev", "test"]) -> TextPairs:
        """The rows of a split."""
        found: TextPairs = getattr(self, name)
        return found
