"""What is trained: rows in, logits out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from regard.continual.known_answers import Answering, KnownAnswers
from regard.data.stream import Split
from regard.models.classifier import Classifier
from regard.models.generator import Generator
from regard.models.heads import pool_states

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
TEXT_INPUTS = ("input_ids", "attention_mask", "labels")


def as_float32(values: Tensor) -> Tensor:
    """Return the values in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def trim_inputs(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the classifier reads, without columns that are padding in all rows."""
    width = int(rows["attention_mask"].any(0).nonzero().max()) + 1
    return {name: rows[name][:, :width] for name in INPUTS if name in rows}


class Network(nn.Module):
    """A classifier or `Generator`, as methods train it, with all weights for `tasks` tasks; new ones drawn from `seed`.

    `needs_wrapper`: whether the classifier alone does not answer as the network does. `trains_model`: whether the
    model's own weights are trained, those that require gradients. `known_answers`: of rows that are scored time and
    again, if `answering` tells what they depend on.
    """

    needs_wrapper: ClassVar[bool] = False
    trains_model: ClassVar[bool] = True
    known_answers: KnownAnswers | None = None

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the logits (row, class), or (row, token, word) of answers, of rows as `Learner.rows` makes them."""
        names = TEXT_INPUTS if isinstance(cast(nn.Module, self.classifier), Generator) else INPUTS
        return self.classifier(**{name: rows[name] for name in names if name in rows}).logits

    def pooled_states(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the state (row, width) of each text that the head reads."""
        mask = rows["attention_mask"].bool()
        states = self.classifier.states(rows["input_ids"], mask, rows.get("token_type_ids"))
        return pool_states(states, mask, cast(Any, self.classifier).head.pooling)

    def generate(self, rows: dict[str, Tensor], new_tokens: int) -> Tensor:
        """Return the answers (row, token) to the prompts of rows, at most so many tokens each."""
        generator = cast(Generator, cast(nn.Module, self.classifier))
        return generator.generate(rows["input_ids"], rows["attention_mask"], new_tokens)

    def kept_tensors(self) -> list[Tensor]:
        """Return what the network knows of the data beside its weights, which costs memory as stored examples do."""
        return []

    def knowing(self, task: int) -> AbstractContextManager[None] | None:
        """Return a context in which the network answers texts that are known to be of a task; None if as any others."""
        return None

    def annotate(self, rows: dict[str, Tensor], split: Split) -> dict[str, Tensor]:
        """Return rows of a split with what the network knows of them; they are on its device."""
        return rows

    def answering(self, task: int, split: Split, rows: Sequence[int]) -> Answering | None:
        """Return what answers rows of a split in evaluation; None if it is not known before they are read."""
        return None

    def is_head_parameter(self, name: str) -> bool:
        """Return whether a parameter belongs to the head, which phases that train the `head` train."""
        return name.startswith("classifier.head.")
