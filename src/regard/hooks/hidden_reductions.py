"""Reductions of hidden states, and where a layer's arguments and results have them."""

from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from regard.attention.reduction import Reduction

_hidden = partial(Reduction, source="hidden")

_REDUCTIONS = (
    _hidden(name="hidden_norm", axis="token", steps="concat", compute=lambda hidden: hidden.norm(dim=-1)),
    _hidden(name="direction", axis="sample", steps="add", compute=lambda hidden: normalize(hidden, dim=-1)),
    _hidden(name="hidden", axis="token", steps="concat", compute=lambda hidden: hidden),
)
HIDDEN_REDUCTIONS: dict[str, Reduction] = {reduction.name: reduction for reduction in _REDUCTIONS}
"""Reductions of hidden states (batch, token, width), by name; those by sample are summed over its tokens."""


def find_hidden_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float[Tensor, "*batch token width"] | None:
    """Return the hidden states among the arguments of a layer; None if there are none."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) and hidden.ndim in (2, 3) else None


def find_hidden_output(output: Any) -> Float[Tensor, "*batch token width"] | None:
    """Return the hidden states in the result of a layer; None if there are none."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.ndim in (2, 3) else None
