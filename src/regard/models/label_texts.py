"""The words of labels, and other words of the vocabulary, as states of an untrained model."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.models.heads import Pooling, pool_states, split_label
from regard.models.limits import maximum_length
from regard.models.model_files import Loaded, eval_mode

_BATCH_SIZE = 64
_MIN_LETTERS = 3
"""Minimum letters of a background word."""
_SPACE_MARKS = "\u0120\u2581"
"""How byte-level and SentencePiece vocabularies write the space before a word."""


def resolve_label_texts(classes: Sequence[str], texts: Mapping[str, str]) -> dict[str, str]:
    """Return the words of each class: from `texts`, or else those of its name."""
    for name in classes:
        if list(classes).count(name) > 1:
            raise UserError(f"labels collide: {name!r} and {name!r} are the same class; expected each once")
    for name in texts:
        if name not in classes:
            raise UserError(f"label_texts: expected names out of {', '.join(classes)}, got {name!r}")
    resolved = {name: texts.get(name, split_label(name)) for name in classes}
    for name, words in resolved.items():
        if not words.strip():
            raise UserError(f"label_texts: expected words for the class {name!r}, got none")
    return resolved


def sample_background_words(tokenizer: Any, texts: Sequence[str], count: int) -> list[str]:
    """Sample words of the vocabulary that are in none of the texts, always the same ones.

    There may be fewer than `count`, since words within a longer text are excluded after sampling.
    """
    labels = {text.casefold() for text in texts}
    label_words = {word for text in labels for word in re.findall(r"\w+", text)}
    vocabulary = {token.lstrip(_SPACE_MARKS).casefold() for token in tokenizer.get_vocab()}
    words = sorted(word for word in vocabulary if word.isalpha() and len(word) >= _MIN_LETTERS and word not in labels)
    return [word for word in random.Random(0).sample(words, min(count, len(words))) if word not in label_words]


def encode_labels(loaded: Loaded, encoder: PreTrainedModel, classes: Mapping[str, str], pooling: Pooling) -> Tensor:
    """Return the pooled states (class, width) of the words of classes, which are given by name."""
    texts = list(classes.values())
    ids = loaded.tokenizer(texts, padding=False, truncation=False, verbose=False)["input_ids"]
    _check_tokens(list(classes), ids, maximum_length(loaded.model, loaded.tokenizer))
    return encode_texts(loaded.tokenizer, encoder, texts, pooling)


@torch.no_grad()
def encode_texts(tokenizer: Any, encoder: PreTrainedModel, texts: Sequence[str], pooling: Pooling) -> Tensor:
    """Return the pooled states (text, width) in float32 or wider, each from its text alone: no batch has padding."""
    encoding = tokenizer(list(texts), padding=False, truncation=False, verbose=False)
    names = [name for name in ("input_ids", "token_type_ids") if name in encoding]
    lengths = [len(ids) for ids in encoding["input_ids"]]
    dtype = torch.promote_types(encoder.dtype, torch.float32)
    pooled: dict[int, Tensor] = {}
    with eval_mode(encoder):
        for length in sorted(set(lengths)):
            same_length = [index for index, other in enumerate(lengths) if other == length]
            for start in range(0, len(same_length), _BATCH_SIZE):
                batch = same_length[start : start + _BATCH_SIZE]
                inputs = {name: [encoding[name][index] for index in batch] for name in names}
                tensors = {name: torch.tensor(rows, device=encoder.device) for name, rows in inputs.items()}
                mask = torch.ones_like(tensors["input_ids"])
                states = encoder(**tensors, attention_mask=mask, return_dict=True).last_hidden_state
                pooled |= dict(zip(batch, pool_states(states.to(dtype), mask.bool(), pooling), strict=True))
    return torch.stack([pooled[index] for index in range(len(texts))])


def _check_tokens(classes: Sequence[str], ids: Sequence[Sequence[int]], max_length: int | None) -> None:
    """Raise UserError if two classes have the same tokens, or one has too many."""
    first_class: dict[tuple[int, ...], str] = {}
    for name, tokens in zip(classes, ids, strict=True):
        other = first_class.setdefault(tuple(tokens), name)
        if other != name:
            raise UserError(
                f"labels collide: {other!r} and {name!r} are the same words to the model's tokenizer; "
                "expected words of its own for each class, which label_texts can give"
            )
        if max_length is not None and len(tokens) > max_length:
            raise UserError(
                f"label_texts: expected at most {max_length} tokens for a class, {name!r} has {len(tokens)}"
            )
