"""What gradient checkpointing computes again in a backward pass, with the adapters of its forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from regard.adapters.mixture import Mixture, hold
from regard.errors import UserError

Keep = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Is called in a forward pass, and returns what sets for a while what that pass had."""


def keep_weights(
    mixture: Mixture, alone: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[], AbstractContextManager[None]]:
    """Return what sets for a while the weights that a mixture has now.

    That is outside of a call, so that it waits for those of other threads (`alone`). It raises UserError if other
    adapters are there by then, or others are trained.
    """
    held = partial(hold, mixture, weights=mixture.weights, in_call=True, rows=mixture.rows)
    trained = mixture.trained

    @contextmanager
    def kept() -> Iterator[None]:
        if mixture.trained != trained:
            expected = "the adapters of the forward pass until its backward pass has ended"
            got = "others: call add_adapter, set_adapter, freeze, delete_adapter and unload behind backward()"
            raise UserError(f"gradient checkpointing: expected {expected}, got {got}")
        with alone(), held():
            yield

    return kept


def recompute_with(function: Callable[..., Any], keep: Keep) -> Callable[..., Any]:
    """Wrap a checkpointing function: the backward pass runs a part again with what the forward pass had."""

    def compute(part: Callable[..., Any], *args: Any, **options: Any) -> Any:
        kept = keep()

        def run(*arguments: Any, **named: Any) -> Any:
            with kept():
                return part(*arguments, **named)

        return function(run, *args, **options)

    return compute


def find_checkpointed(model: Any) -> list[Any]:
    """Return the parts of a model that Transformers' gradient checkpointing may compute again."""
    return [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]


def patch_checkpointing(parts: Sequence[Any], keep: Keep) -> list[tuple[Any, Any]]:
    """Let parts that checkpointing computes again have what `keep` keeps in this forward pass.

    Returns:
        The parts, each with its own function, for `restore_checkpointing`.

    Raises:
        UserError: Checkpointing is of the reentrant kind.
    """
    own = [(part, part._gradient_checkpointing_func) for part in parts if part.gradient_checkpointing and part.training]
    if any(getattr(function, "keywords", {}).get("use_reentrant") for _, function in own):
        raise UserError("gradient checkpointing: expected use_reentrant=False, got True")
    for part, function in own:
        part._gradient_checkpointing_func = recompute_with(function, keep)
    return own


def restore_checkpointing(own: Sequence[tuple[Any, Any]]) -> None:
    """Give parts their own functions back."""
    for part, function in own:
        part._gradient_checkpointing_func = function


@contextmanager
def recomputing_with(parts: Sequence[Any], keep: Keep) -> Iterator[None]:
    """Do as `patch_checkpointing` inside the block."""
    own = patch_checkpointing(parts, keep)
    try:
        yield
    finally:
        restore_checkpointing(own)
