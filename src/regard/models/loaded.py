"""A model with its tokenizer."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, with its tokenizer.

    Attributes:
        name: Name by which the model was requested.
        sha256: Hash of the weight files, sorted by name and joined; None for random weights.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    sha256: str | None
