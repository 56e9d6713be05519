"""What is kept of hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "hidden_norm": lambda hidden: hidden.norm(dim=-1),
    "direction": lambda hidden: torch.nn.functional.normalize(hidden, dim=-1),
    "hidden": lambda hidden: hidden,
}
"""Kept of hidden states (batch, token, width), by name. `direction` is summed over each sample's tokens at once."""


def of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float[Tensor, "batch token width"] | None:
    """The hidden states that a layer was given."""
    given = args[0] if args else kwargs.get("hidden_states")
    return given if isinstance(given, Tensor) and given.ndim == 3 else None


def of_output(output: Any) -> Float[Tensor, "batch token width"] | None:
    """The hidden states that a layer returned."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.ndim == 3 else None
