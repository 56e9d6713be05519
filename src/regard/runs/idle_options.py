"""Options that change nothing in some mode of a run: each command has a table of them; users are told in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from regard.errors import describe_value, warn_user


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


def warn_of_idle_options(
    rules: Iterable[IdleOptions], config: Any, given: Collection[str], modes: Collection[str] = ()
) -> None:
    """Warn of each field among those `given` that changes nothing in a run of these modes, in a line of its own."""
    for rule in rules:
        if (not rule.mode or rule.mode in modes) and rule.applies(config):
            for name in rule.fields:
                if name in given:
                    value = describe_value(getattr(config, name))
                    warn_user(f"{name.replace('_', '-')}: {value.strip(chr(39))} changes nothing, {rule.reason}")
