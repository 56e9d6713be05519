"""What gradient checkpointing computes again in a backward pass, with the adapters of its forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from regard.adapters.lora import Mixture, hold


def recompute_with(
    function: Callable[..., Any], mixture: Mixture, alone: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Wrap a checkpointing function: the backward pass runs a part again with the weights of the forward pass.

    That is outside of a call, so that it waits for those of other threads.
    """

    def compute(part: Callable[..., Any], *args: Any, **options: Any) -> Any:
        held = partial(hold, mixture, weights=mixture.weights, in_call=True, rows=mixture.rows)

        def run(*arguments: Any, **named: Any) -> Any:
            with alone(), held():
                return part(*arguments, **named)

        return function(run, *args, **options)

    return compute
