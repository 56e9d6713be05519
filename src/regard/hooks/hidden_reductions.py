"""Reductions of hidden states, and where a layer's arguments and results have them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.reduction import Reduction

_REDUCTIONS = (
    Reduction(
        name="hidden_norm",
        axis="token",
        source="hidden",
        steps="concat",
        cost="T · width",
        reference=lambda hidden: hidden.norm(dim=-1),
    ),
    Reduction(
        name="direction",
        axis="sample",
        source="hidden",
        steps="add",
        cost="T · width",
        reference=lambda hidden: torch.nn.functional.normalize(hidden, dim=-1),
    ),
    Reduction(
        name="hidden",
        axis="token",
        source="hidden",
        steps="concat",
        cost="memory for all hidden states, T · width a layer",
        reference=lambda hidden: hidden,
    ),
)
HIDDEN_REDUCTIONS: dict[str, Reduction] = {reduction.name: reduction for reduction in _REDUCTIONS}
"""Reductions of hidden states (batch, token, width), by name; those by sample are summed over its tokens."""


def find_hidden_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float[Tensor, "batch token width"] | None:
    """Return the hidden states among the arguments of a layer; None if there are none."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) and hidden.ndim == 3 else None


def find_hidden_output(output: Any) -> Float[Tensor, "batch token width"] | None:
    """Return the hidden states in the result of a layer; None if there are none."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.ndim == 3 else None
