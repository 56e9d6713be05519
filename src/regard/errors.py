"""The one exception for a mistake of the user, and the two checks that all parts make."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class UserError(ValueError):
    """A mistake of the user, in one line: what was expected, what came, what is allowed.

    The command line prints the line alone and leaves with code 2; anything else that is raised is a mistake of ours.
    """


def check_int(name: str, value: Any, *, least: int) -> None:
    """Nothing, or a UserError: what has this name is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}: expected a whole number of at least {least}, got {value!r}")


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Nothing, or a UserError: what has this name is none of those allowed."""
    if value not in allowed:
        raise UserError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
