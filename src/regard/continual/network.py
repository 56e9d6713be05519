"""What is trained: rows in, logits out."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from regard.models.classifier import Classifier

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Network(nn.Module):
    """A classifier, as methods train it; a method that needs more around it has a network of its own.

    `tasks`: how many tasks there will be; `settings`: the method's. All weights that it will ever have are there from
    the start, so that saving and restoring needs to know nothing more; weights that a new network draws are drawn from
    `seed`. `apart`: whether the classifier, without the rest of the network, does not answer as the network does.
    """

    apart: ClassVar[bool] = False

    def __init__(self, classifier: Classifier, *, tasks: int, settings: Any, seed: int) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """The logits (row, class) of rows as `Learner.rows` makes them."""
        logits: Tensor = self.classifier(**{name: rows[name] for name in INPUTS if name in rows}).logits
        return logits

    def in_head(self, name: str) -> bool:
        """Whether a parameter belongs to the head, which stages that train the `head` train."""
        return name.startswith("classifier.head.")
