"""Averages that replace heads: of the task's inputs, or from another source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.constants import Constants, to_length
from regard.data import TASKS, Encoded, encode, read_task
from regard.data.tasks import TaskPreset
from regard.errors import UserError
from regard.hooks import model_fingerprint
from regard.hooks.average import vocabulary_digest

From = str | Path | Constants | None


def read_other_source(
    origin: From, data: str | Path | None, encoder: Any, tokenizer: Any, train: Encoded, scale: TaskPreset
) -> Constants | tuple[Encoded, str] | None:
    """Read what the averages come from, if not the task's inputs: constants, or other inputs and their source."""
    if origin is None or isinstance(origin, Constants):
        return None if origin is None else _fit_constants(origin, encoder, tokenizer, train)
    if str(origin) in TASKS:
        other = read_task(str(origin), data, rows=scale.rows)
        return encode(other.kind, other.train, tokenizer, scale.length, train.layout), other.source
    check_origin(origin)
    return _fit_constants(Constants.load(origin), encoder, tokenizer, train)


def check_origin(origin: str | Path) -> None:
    """Check that the source is a task or a file. Raises UserError."""
    if str(origin) not in TASKS and not Path(origin).is_file():
        raise UserError(f"constants-from: expected one of {', '.join(TASKS)}, or a file of constants; got '{origin}'")


def _fit_constants(constants: Constants, encoder: Any, tokenizer: Any, train: Encoded) -> Constants:
    """Check that constants fit model, length and layout, and cut them to length."""
    if constants.origin.layout != train.layout:
        raise UserError(
            f"constants: expected averages in layout {train.layout}, got {constants.origin.layout}; choose that "
            "layout, or compute new averages"
        )
    constants.check_model(model_fingerprint(encoder))
    vocabulary = vocabulary_digest(tokenizer)
    if constants.origin.tokenizer not in (None, vocabulary):
        raise UserError("constants: expected averages over inputs of this tokenizer, got those of another vocabulary")
    if constants.length < train.length:
        raise UserError(
            f"constants: expected some for {train.length} tokens, got {constants.length}; choose --length "
            f"{constants.length}, or fit them with regard.constants.to_length"
        )
    return to_length(constants, train.length)
