"""Tokenizers for a model that is trained from nothing: one trained here, or one that there is."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regard.data.hub import network_errors
from regard.errors import UserError

END_OF_TEXT = "<|endoftext|>"
_LEAST_FREQUENT = 2
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")


def train_tokenizer(documents: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a vocabulary of exactly `size` tokens, as GPT-2's (Radford et al. 2019).

    The 256 bytes, `<|endoftext|>` (id 0; BOS, EOS and padding alike), and merges of pairs that are seen twice or more,
    the most frequent first. It puts nothing around a text and can tell every text apart. The same documents give the
    same tokenizer.

    Raises UserError for a size under 257, and where the documents do not hold enough merges.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1
    if size < least:
        raise UserError(f"tokenizer: expected a vocabulary of at least {least} tokens, the bytes and EOS; got {size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=_LEAST_FREQUENT,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    reached = backend.get_vocab_size()
    if reached != size:
        raise UserError(
            f"tokenizer: expected text for a vocabulary of {size} tokens, this gives {reached}; "
            f"{least} to {reached} is allowed, or give more text"
        )
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def read_tokenizer(name: str | Path) -> Any:
    """The tokenizer in a folder, or of this id on the hub. Raises UserError where there is none."""
    folder = Path(name).expanduser()
    if folder.exists() and not any(file for pattern in _FILES for file in folder.glob(pattern)):
        raise UserError(
            f"tokenizer: expected a folder with tokenizer.json or a vocabulary, or a hub id; {name} has none"
        )
    failures: tuple[type[Exception], ...] = (OSError, ValueError, ImportError, KeyError, *network_errors())
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.exists() else str(name))
    except failures as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"tokenizer: expected a folder with one, or the id of one on the hub, got {name}: {said}"
        ) from None
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UserError(f"tokenizer: expected a vocabulary, that of {name} is empty")
    return tokenizer


def check_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """Nothing where the tokenizer's ids fit a model with this `vocabulary` and it has EOS; else raises UserError."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise UserError(
            f"tokenizer: expected ids under the model's vocabulary of {vocabulary}, got ids up to {largest}; "
            f"a vocabulary of {largest + 1} or more is allowed"
        )
    if tokenizer.eos_token_id is None:
        raise UserError("tokenizer: expected one with an EOS token to put between documents, this has none")


def tokenizer_hash(tokenizer: Any) -> str:
    """The sha256 over all that decides which ids a text gets, and over EOS."""
    if tokenizer.is_fast:
        told = json.loads(tokenizer.backend_tokenizer.to_str())
        for state in ("padding", "truncation"):  # of the last call
            told.pop(state, None)
    else:
        told = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    told["eos"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def ordinary_tokens(tokenizer: Any) -> Int64[Tensor, " token"]:
    """The ids that are no special token, ascending: what random tokens are drawn from."""
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids) - added)
    if not ids:
        raise UserError("tokenizer: expected tokens that are not special, its vocabulary has none")
    return torch.tensor(ids)


def common_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens, and of all tokens made of punctuation (Unicode category P) and white space alone.

    Bai et al. 2024 call these common: tokens that stand in every text whatever it is about.
    """
    found = set(tokenizer.all_special_ids)
    for token, number in tokenizer.get_vocab().items():
        if not any(map(str.isalnum, token)) and _is_punctuation(tokenizer.convert_tokens_to_string([token])):
            found.add(number)
    return frozenset(found)


def _is_punctuation(text: str) -> bool:
    letters = text.replace("#", "").strip() or text.strip()
    return bool(letters) and all(unicodedata.category(letter).startswith("P") for letter in letters)
