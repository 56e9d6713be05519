"""Configs of replaced models, while classes of Transformers that look for theirs build their parts."""

import contextlib
from collections.abc import Iterator
from typing import Any


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
