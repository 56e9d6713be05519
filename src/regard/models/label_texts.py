"""The words of labels, and others of the vocabulary, as states of a model that nothing changes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.models.heads import Pooling, pool_states, split_label
from regard.models.limits import maximum_length
from regard.models.loaded import Loaded

_AT_ONCE = 64
_LETTERS = 3
"""Letters that a word of the vocabulary has at least."""
_MARKS = "\u0120\u2581"
"""What byte-level and sentence-piece vocabularies write for the space before a word."""


def resolve_label_texts(classes: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The words of each class: those that are given, else those of its name. Raises UserError."""
    twice = next((name for name in classes if list(classes).count(name) > 1), None)
    if twice is not None:
        raise UserError(f"labels collide: {twice!r} and {twice!r} are the same class; expected each once")
    unknown = [name for name in given if name not in classes]
    if unknown:
        raise UserError(f"label_texts: expected names out of {', '.join(classes)}, got {unknown[0]!r}")
    found = {name: given.get(name, split_label(name)) for name in classes}
    for name, words in found.items():
        if not words.strip():
            raise UserError(f"label_texts: expected words for the class {name!r}, got none")
    return found


def sample_background_words(tokenizer: Any, texts: Sequence[str], count: int) -> list[str]:
    """Words of the vocabulary that are in none of the texts, always the same: `count`, or a few less.

    Words equal to a text are left out before they are drawn; words that occur in a longer text are removed from what
    was drawn, so that there may be fewer.
    """
    labels = {text.casefold() for text in texts}
    parts = {word for text in labels for word in re.findall(r"\w+", text)}
    every = {token.lstrip(_MARKS).casefold() for token in tokenizer.get_vocab()}
    words = sorted(word for word in every if word.isalpha() and len(word) >= _LETTERS and word not in labels)
    return [word for word in random.Random(0).sample(words, min(count, len(words))) if word not in parts]


def encode_labels(loaded: Loaded, encoder: PreTrainedModel, classes: Mapping[str, str], reading: Pooling) -> Tensor:
    """(class, width): the pooled states of the classes' words, given by their names. Raises UserError."""
    ids = loaded.tokenizer(list(classes.values()), padding=False, truncation=False, verbose=False)["input_ids"]
    _check(list(classes), ids, maximum_length(loaded.model, loaded.tokenizer))
    return encode_texts(loaded.tokenizer, encoder, list(classes.values()), reading)


@torch.no_grad()
def encode_texts(tokenizer: Any, encoder: PreTrainedModel, texts: Sequence[str], reading: Pooling) -> Tensor:
    """(text, width): the pooled states of texts, in float32 at least; those of one length at a time.

    Nothing is padded, so no state depends on other texts.
    """
    read = tokenizer(list(texts), padding=False, truncation=False, verbose=False)
    names = [name for name in ("input_ids", "token_type_ids") if name in read]
    lengths = [len(ids) for ids in read["input_ids"]]
    exact = torch.promote_types(encoder.dtype, torch.float32)
    found: list[Tensor | None] = [None] * len(texts)
    with _evaluating(encoder):
        for length in sorted(set(lengths)):
            alike = [number for number, one in enumerate(lengths) if one == length]
            for start in range(0, len(alike), _AT_ONCE):
                part = alike[start : start + _AT_ONCE]
                rows = {name: torch.tensor([read[name][one] for one in part], device=encoder.device) for name in names}
                real = torch.ones_like(rows["input_ids"])
                states = encoder(**rows, attention_mask=real, return_dict=True).last_hidden_state
                for number, state in zip(part, pool_states(states.to(exact), real.bool(), reading), strict=True):
                    found[number] = state
    return torch.stack([state for state in found if state is not None])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation; what was training goes on doing so afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(classes: Sequence[str], ids: Sequence[Sequence[int]], most: int | None) -> None:
    """Nothing, or a UserError: the words of two classes are the same tokens, or those of one are too many."""
    known: dict[tuple[int, ...], int] = {}
    for number, (name, tokens) in enumerate(zip(classes, ids, strict=True)):
        other = known.setdefault(tuple(tokens), number)
        if other != number:
            raise UserError(
                f"labels collide: {classes[other]!r} and {name!r} are the same words to the model's tokenizer; "
                "expected words of its own for each class, which label_texts can give"
            )
        if most is not None and len(tokens) > most:
            raise UserError(f"label_texts: expected at most {most} tokens for a class, {name!r} has {len(tokens)}")
