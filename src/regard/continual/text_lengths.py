"""Lengths of a stream's texts: one that fits them, and what is lost where it does not."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from regard.continual.learner import Learner
from regard.continual.shares import ceil_share
from regard.continual.text_learner import EncodedTexts, encode_pairs
from regard.continual.training_phase import TrainingBudget
from regard.data.encoding import encode
from regard.data.stream import SPLITS, ClassificationTask, Stream, TextTask
from regard.errors import UserError, warn_user
from regard.models.limits import maximum_length
from regard.models.pretrained import Loaded

FITTED_SHARE = 0.95
"""Share of each task's training texts that a fitted length holds whole."""
MAX_FITTED_LENGTH = 128
"""The longest that is fitted, so that a run stays one for a laptop."""
MIN_LENGTH = 4
"""The shortest that may be asked for, or fitted."""
_MULTIPLE = 8


def fit_length(stream: Stream, loaded: Loaded, target_length: int, prompt_tokens: int = 0) -> int:
    """Return a length that holds `FITTED_SHARE` of the training texts of each task, rounded up to a multiple of eight.

    It is at most `MAX_FITTED_LENGTH`, and what the model takes; a decoder needs room for `target_length` as well, and
    the prompts of a method for their tokens. A warning says where these leave less.
    """
    counts = [_count_tokens(task, loaded) for task in stream.tasks if len(task.train)]
    longest = max((int(count.kthvalue(ceil_share(FITTED_SHARE, len(count))).values) for count in counts), default=1)
    max_tokens = maximum_length(loaded.model, loaded.tokenizer)
    if max_tokens is not None and stream.text and not _is_encoder_decoder(loaded):
        max_tokens -= target_length
        if max_tokens < MIN_LENGTH:
            most = max_tokens + target_length - MIN_LENGTH
            problem = f"at most {most} tokens, which this model takes behind a prompt of {MIN_LENGTH}"
            raise UserError(f"target-length: expected {problem}, got {target_length}; give a smaller target-length")
    length = min(_MULTIPLE * math.ceil(longest / _MULTIPLE), MAX_FITTED_LENGTH)
    if max_tokens is None:
        return length
    room = max_tokens - prompt_tokens
    if MIN_LENGTH <= room < min(length, max_tokens):  # with less the method says what it needs
        warn_user(f"length: texts have {room} tokens at most, which {prompt_tokens} of prompts leave in this model")
        return room
    return min(length, max_tokens)


def _count_tokens(task: ClassificationTask | TextTask, loaded: Loaded) -> Tensor:
    """Return the tokens of each training text, (row,)."""
    if isinstance(task, TextTask):
        options = {"encoder_decoder": _is_encoder_decoder(loaded)}
        return encode_pairs(task.train, loaded.tokenizer, TrainingBudget(), **options).token_counts
    return encode("sequence", task.train, loaded.tokenizer, MAX_FITTED_LENGTH, "natural", trim=True).token_counts


def _is_encoder_decoder(loaded: Loaded) -> bool:
    return bool(getattr(loaded.model.config, "is_encoder_decoder", False))


def measure_truncation(learner: Learner) -> list[dict[str, Any]]:
    """Return what the rows of each task lose, by the field of the budget that cuts them; empty if nothing is cut.

    Each row has the `option`, the `task`, how many `rows` of `num_rows` are cut, how many `tokens` of `num_tokens` that
    costs, and the tokens of the `longest`.
    """
    rows = []
    for option in ("length", "target_length") if learner.stream.text else ("length",):
        limit = getattr(learner.budget, option)
        by_task = {
            task.name: torch.cat([_token_counts(learner.encoded[index, split], option) for split in SPLITS])
            for index, task in enumerate(learner.stream.tasks)
        }
        if any(bool((counts > limit).any()) for counts in by_task.values()):
            rows += [{"option": option, "task": task, **_sum_losses(counts, limit)} for task, counts in by_task.items()]
    return rows


def _token_counts(encoded: Any, option: str) -> Tensor:
    counts = cast(EncodedTexts, encoded).answer_token_counts if option == "target_length" else encoded.token_counts
    return cast(Tensor, counts)


def _sum_losses(counts: Tensor, limit: int) -> Mapping[str, int]:
    return {
        "rows": int((counts > limit).sum()),
        "num_rows": len(counts),
        "tokens": int((counts - limit).clamp_min(0).sum()),
        "num_tokens": int(counts.sum()),
        "longest": int(counts.max()),
    }
