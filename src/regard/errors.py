"""The exception for mistakes of the user, two checks that raise it, the text of any error or value, and warnings."""

import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LIBRARIES = ("regard", "torch", "transformers", "peft", "accelerate", "jaxtyping")
_STANDARD = ("contextlib", "functools", "threading", "concurrent")
"""Packages and modules whose frames stand between a warning of Regard and the code of the user."""
_TOO_LARGE = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")
"""What errors of PyTorch say that come of too little memory, or of a tensor of more bytes than can be counted."""
_LONGEST = 200
"""Characters of a value that a message shows."""


class UserError(ValueError):
    """A mistake of the user, in one line, which the command line prints before it exits with code 2."""


def check_utf8(text: str, expected: str, *, advice: str = "") -> None:
    """Raise UserError, which begins with what was expected, for a text that came in another encoding than UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{expected} in UTF-8, got {text!a}{advice and f'; {advice}'}") from None


def check_int(name: str, value: Any, *, least: int) -> None:
    """Raise UserError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}: expected a whole number of at least {least}, got {describe_value(value)}")


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise UserError unless the value is allowed."""
    if value not in allowed:
        raise UserError(f"{name}: expected one of {', '.join(allowed)}, got {describe_value(value)}")


@contextmanager
def naming_option(option: str, instead_of: str, *, others: bool = True) -> Iterator[None]:
    """Let the `UserError`s of the block name the option that the user has given, `others` those that name none too."""
    try:
        yield
    except UserError as error:
        message = str(error)
        if not others and not message.startswith(f"{instead_of}: "):
            raise
        raise UserError(f"{option}: {message.removeprefix(f'{instead_of}: ')}") from error


def warn_user(message: str) -> None:
    """Warn with the line of the user's code that led here, or with the caller's if there is none."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=2 if _is_of_library(frame) else level)


def _is_of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in (*_LIBRARIES, *_STANDARD)


def describe_value(value: object) -> str:
    """Return a value as Python writes it; by its type if that takes several lines, or more than fits a message."""
    shown = repr(value)
    if isinstance(value, str):
        return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
    return shown if len(shown) <= _LONGEST and "\n" not in shown else type(value).__name__


def describe_error(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())


def is_of_rust(error: BaseException) -> bool:
    """Whether the system failed below a library in Rust, which says so by the message: tokenizers, safetensors."""
    return not isinstance(error, UserError) and "(os error " in str(error)


def is_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory. PyTorch says so of a CPU by the message alone."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _TOO_LARGE)
