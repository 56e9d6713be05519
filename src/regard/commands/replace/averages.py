"""The averages that heads become: of the task's inputs, or from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.commands.replace.evaluation import HeadEvaluation
from regard.constants import Constants, to_length
from regard.data import TASKS, Encoded, Task, encode, read_task
from regard.data.tasks import TaskPreset
from regard.errors import UserError
from regard.hooks import model_fingerprint
from regard.hooks.average import vocabulary_digest

From = str | Path | Constants | None


Elsewhere = Constants | tuple[Encoded, str] | None


def read_other_source(
    origin: From, data: str | Path | None, encoder: Any, tokenizer: Any, train: Encoded, scale: TaskPreset
) -> Elsewhere:
    """What the averages come from, if not from the task's inputs: constants, or other inputs and their source."""
    if origin is None or isinstance(origin, Constants):
        return None if origin is None else _fit_constants(origin, encoder, tokenizer, train)
    if str(origin) in TASKS:
        other = read_task(str(origin), data, rows=scale.rows)
        return encode(other.kind, other.train, tokenizer, scale.length, train.layout), other.source
    if not Path(origin).is_file():
        raise UserError(f"constants-from: expected one of {', '.join(TASKS)}, or a file of constants; got '{origin}'")
    return _fit_constants(Constants.load(origin), encoder, tokenizer, train)


def find_averages(trials: HeadEvaluation, read: Task, tokenizer: Any, elsewhere: Elsewhere) -> Constants:
    """The averages over the task's training inputs, or from elsewhere."""
    if isinstance(elsewhere, Constants):
        return elsewhere
    inputs, source = elsewhere or (trials.train, read.source)
    return trials.averages(inputs, source, tokenizer)


def _fit_constants(given: Constants, encoder: Any, tokenizer: Any, train: Encoded) -> Constants:
    """Constants from elsewhere, if they fit model, length and layout."""
    if given.origin.layout != train.layout:
        raise UserError(
            f"constants: expected averages in layout {train.layout}, got {given.origin.layout}; choose that layout, "
            "or average anew"
        )
    given.check_model(model_fingerprint(encoder))
    own = vocabulary_digest(tokenizer)
    if given.origin.tokenizer not in (None, own):
        raise UserError("constants: expected averages over inputs of this tokenizer, got those of another vocabulary")
    if given.length < train.length:
        raise UserError(
            f"constants: expected some for {train.length} tokens, got {given.length}; choose --length "
            f"{given.length}, or fit them with regard.constants.to_length"
        )
    return to_length(given, train.length)
