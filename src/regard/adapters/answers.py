"""What inputs of a decoder say of the answer in a row, which its router does not read."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.data.examples import IGNORE_INDEX

KEPT = "logits_to_keep"
MARKS = ("labels", "completion_mask", KEPT)
"""Inputs that tell an answer from its prompt, the first before the others."""


def answer_labels(inputs: Mapping[str, Any], tokens: Tensor) -> Any:
    """Return labels, which are −100 in the prompt; None where nothing tells the answer.

    Rows of TRL may have a mask of the answer. Its GRPO asks for the logits of the answer alone, n + 1 of n tokens; of
    a prompt, `generate` asks for one.
    """
    labels, completion = inputs.get("labels"), inputs.get("completion_mask")
    if labels is None and isinstance(completion, Tensor) and tokens.shape == completion.shape:
        return tokens.masked_fill(completion.to(tokens.device) == 0, IGNORE_INDEX)
    if labels is None and _keeps_several(inputs):
        labels = tokens.new_full(tokens.shape[:2], IGNORE_INDEX).long()
        labels[:, 1 - inputs[KEPT] :] = 0
    return labels


def are_told(inputs: Mapping[str, Any]) -> bool:
    """Return whether inputs have labels, or ask for the logits of an answer."""
    return inputs.get("labels") is not None or _keeps_several(inputs)


def _keeps_several(inputs: Mapping[str, Any]) -> bool:
    kept = inputs.get(KEPT)
    return isinstance(kept, int) and kept > 1
