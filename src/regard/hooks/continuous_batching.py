"""Continuous batching, whose pages of keys neither a block nor a model of `replaced` can follow."""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import nn
from transformers.generation.continuous_batching import ContinuousMixin

from regard.errors import UserError
from regard.hooks.patches import can_patch

BEGIN = "init_continuous_batching"
"""What every way to generate by continuous batching calls first, that of a persistent manager as well."""


def refuse(*_: Any, **_options: Any) -> NoReturn:
    """Raise a UserError, in the place of `init_continuous_batching`."""
    raise UserError(
        "cannot generate by continuous batching while the attention of this model goes through Regard, for its cache "
        "has pages; use generate, or generate_batch with the original outside of the block"
    )


def without_continuous_batching(models: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield attributes to set, with which models refuse to begin it."""
    for model in models:
        if isinstance(model, ContinuousMixin) and can_patch(model, BEGIN):
            yield model, BEGIN, refuse
