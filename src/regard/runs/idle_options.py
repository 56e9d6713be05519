"""Options that change nothing in some mode of a run: each command has a table of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class IdleOptions:
    """Fields of a configuration that change nothing in a mode.

    Attributes:
        fields: Their names.
        reason: Why they change nothing, for the reader.
        mode: What is known of the run when its data are read, as the command names it; empty: it needs not be known.
        applies: Whether a configuration is of this mode.
    """

    fields: tuple[str, ...]
    reason: str
    mode: str = ""
    applies: Callable[[Any], bool] = lambda config: True
