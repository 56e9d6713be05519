"""Configs of replaced models, while classes of Transformers that look for theirs build their parts."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def of_class(config: Any, config_class: type) -> Iterator[None]:
    """Let a config be one of another class for a while.

    Classifiers of Llama and seventy others make the model within them by `AutoModel`, which knows the class of the
    original config alone: told of the derived one for good, it would load saved models without what is replaced.
    """
    own = type(config)
    config.__class__ = config_class
    try:
        yield
    finally:
        config.__class__ = own


def restore_copies(model: nn.Module, entry: str) -> None:
    """Give the class of a model's config to those that have its entry: copies made meanwhile, as in stacks of T5."""
    own: Any = type(model.config)
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, entry):
            config.__class__ = own
