"""A model with its tokenizer."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, its tokenizer, the name it was asked for by, and what its weights were.

    `sha256` is over the weight files, sorted by name, one after another; None where the weights are random.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    sha256: str | None
