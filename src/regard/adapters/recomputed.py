"""What gradient checkpointing computes again in a backward pass, with the adapters of its forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from regard.adapters.lora import Mixture, hold
from regard.errors import UserError


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


def find_checkpointed(model: Any) -> list[Any]:
    """Return the parts of a model that Transformers' gradient checkpointing may compute again."""
    return [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]


@contextmanager
def recomputing_with(parts: Sequence[Any], mixture: Mixture) -> Iterator[None]:
    """Let parts that checkpointing computes again have the weights that the mixture has now. Raises UserError."""
    patched = [
        (part, part._gradient_checkpointing_func) for part in parts if part.gradient_checkpointing and part.training
    ]
    if any(getattr(function, "keywords", {}).get("use_reentrant") for _, function in patched):
        raise UserError("gradient checkpointing: expected use_reentrant=False, got True")
    try:
        for part, function in patched:
            part._gradient_checkpointing_func = recompute_with(function, mixture, nullcontext)
        yield
    finally:
        for part, function in patched:
            part._gradient_checkpointing_func = function
