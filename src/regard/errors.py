"""The exception for mistakes of the user, two checks that raise it, and the text of any error."""

from collections.abc import Collection
from typing import Any


class UserError(ValueError):
    """A mistake of the user, in one line, which the command line prints before it exits with code 2."""


def check_int(name: str, value: Any, *, least: int) -> None:
    """Raise UserError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}: expected a whole number of at least {least}, got {value!r}")


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise UserError unless the value is allowed."""
    if value not in allowed:
        raise UserError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def describe_error(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
