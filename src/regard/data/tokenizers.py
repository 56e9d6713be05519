"""Tokenizers: training, loading, and their ordinary and common tokens."""

import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regard.data.hub import network_errors
from regard.errors import UserError, warn_user

END_OF_TEXT = "<|endoftext|>"
_MIN_FREQUENCY = 2
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")


def train_tokenizer(documents: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with `size` tokens, like GPT-2's (Radford et al. 2019).

    The vocabulary has `<|endoftext|>` (id 0; BOS, EOS and padding), the 256 bytes, and the most frequent merges. It is
    smaller than `size` if the text has fewer pairs to merge.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    min_size = len(alphabet) + 1
    if size < min_size:
        raise UserError(f"tokenizer: expected at least {min_size} tokens, the bytes and EOS; got {size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"vocab_size": size, "min_frequency": _MIN_FREQUENCY, "special_tokens": [END_OF_TEXT]}
    trainer = trainers.BpeTrainer(**options, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def read_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer in a folder or with an id on the hub. Raise UserError if there is none."""
    folder = Path(os.path.expanduser(name))
    if folder.exists() and not any(file for pattern in _FILES for file in folder.glob(pattern)):
        expected = "a folder with tokenizer.json or a vocabulary, or a hub id"
        raise UserError(f"tokenizer: expected {expected}; {name} has none")
    failures: tuple[type[Exception], ...] = (OSError, ValueError, ImportError, KeyError, *network_errors())
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.exists() else str(name), trust_remote_code=False)
    except failures as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"tokenizer: expected a folder with one, or a hub id, got {name}: {reason}") from None
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UserError(f"tokenizer: expected a vocabulary, that of {name} is empty")
    return tokenizer


def largest_id(tokenizer: Any) -> int:
    """Return the largest id of a vocabulary, which may have gaps; −1 of an empty one."""
    return int(max(tokenizer.get_vocab().values(), default=-1))


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raise UserError if the tokenizer has ids outside of a model's vocabulary, or no EOS token."""
    largest = largest_id(tokenizer)
    if largest >= vocab_size:
        allowed = f"got ids up to {largest}; a vocabulary of {largest + 1} or more is allowed"
        raise UserError(f"tokenizer: expected ids under the model's vocabulary of {vocab_size}, {allowed}")
    check_eos_token(tokenizer)


def check_eos_token(tokenizer: Any) -> None:
    """Raise UserError if the tokenizer has no EOS token."""
    if tokenizer.eos_token_id is None:
        raise UserError("tokenizer: expected one with an EOS token to put between documents, this has none")


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that determines the ids of a text, and of EOS.

    Of code in Python, which a tokenizer may be or, as RoFormer's, have a part of, it is of the class and vocabulary.
    """
    state: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    if getattr(tokenizer, "is_fast", False):  # which Mistral's own does not say
        with suppress(Exception):  # of this very type, where a part cannot be serialized
            state = json.loads(tokenizer.backend_tokenizer.to_str())
        for name in ("padding", "truncation"):  # left over from the last call
            state.pop(name, None)
    state["eos"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens: with a role, as bos, and others that were added as special, as of chats."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_ids, *(token for token, one in added.items() if one.special)})


def token_names(tokenizer: Any, ids: Iterable[int]) -> list[str | None]:
    """Return the pieces of tokens, those of a vocabulary of bytes as text: " où" rather than "ĠoÃ¹".

    Part of a character keeps its piece; None where the vocabulary has no such token.
    """
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if not isinstance(decoder, decoders.ByteLevel):
        return list(pieces)
    texts = ["" if piece is None else decoder.decode([piece]) for piece in pieces]
    return [piece if piece is None or "\ufffd" in text else text for piece, text in zip(pieces, texts, strict=True)]


class WrittenTokens:
    """Names of special tokens that are written in texts, such as "</s>": most tokenizers read them as these tokens.

    `as_text`: whether they are read as text whatever the tokenizer does by itself, with `split_special_tokens`.
    """

    def __init__(self, tokenizer: Any, *, as_text: bool = False) -> None:
        self._tokenizer, self._as_text = tokenizer, as_text
        ids = sorted(special_tokens(tokenizer))
        self._ids = {str(tokenizer.convert_ids_to_tokens(token)): token for token in ids}
        self._pattern = re.compile("|".join(map(re.escape, sorted(filter(None, self._ids), key=len, reverse=True))))
        self._found: set[str] = set()

    def look(self, texts: Iterable[str]) -> None:
        """Look for names in some texts."""
        if self._pattern.pattern:
            self._found.update(name for text in texts for name in self._pattern.findall(text))

    def tell(self) -> None:
        """Warn of the names that were found, and of how they are read."""
        names = self._found if self._as_text else {name for name in self._found if self._is_read(name)}
        if names:
            told = f"the names of special tokens ({', '.join(sorted(names))}) are written in them"
            warn_user(f"texts: {told}; they are read as {'text' if self._as_text else 'these tokens'}")

    def _is_read(self, name: str) -> bool:
        """Whether the tokenizer takes a name for its token."""
        return self._ids[name] in self._tokenizer(name, add_special_tokens=False, verbose=False)["input_ids"]


def warn_of_written(texts: Iterable[str], tokenizer: Any) -> None:
    """Warn of names of special tokens that are written in texts and read as these."""
    written = WrittenTokens(tokenizer)
    written.look(texts)
    written.tell()


MANY_UNKNOWN = 0.1
"""Share of the unknown token from which it is told: in texts that the tokenizer was made for it is seldom."""
LOOKED_AT, _NAMED = 256, 3
"""Texts or blocks of each name that are looked at for it, and names that are told, at most."""


def warn_of_unknown(rows: Mapping[str, Iterable[Sequence[int]]], tokenizer: Any) -> None:
    """Warn of texts, by name, of which many tokens are the one for whatever the tokenizer does not know.

    Other special tokens do not count. Where it has another role around a text (GPT-2), every text is known.
    """
    unknown, shares = tokenizer.unk_token_id, {}
    if unknown is None or unknown in (getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "cls", "sep")):
        return
    left_out = special_tokens(tokenizer) - {unknown}
    for name, some in rows.items():
        counts = Counter(token for ids in some for token in ids if token not in left_out)
        shares[name] = counts[unknown] / max(1, counts.total())
    worst = sorted((name for name, share in shares.items() if share >= MANY_UNKNOWN), key=lambda name: -shares[name])
    if worst:
        told = ", ".join(f"{shares[name]:.0%} of the tokens{name and f' of {name}'}" for name in worst[:_NAMED])
        more = f", and as much of {len(worst) - _NAMED} more," if len(worst) > _NAMED else ""
        stands = "which stands for whatever this model's tokenizer does not know"
        warn_user(f"texts: {told}{more} are {tokenizer.unk_token}, {stands}")


def warn_of_unknown_in(texts: Mapping[str, Sequence[str]], tokenizer: Any) -> None:
    """Warn of texts, by name, that the tokenizer does not know, from some of each name."""
    some = {name: all_of_it[:: -(-len(all_of_it) // LOOKED_AT) or 1] for name, all_of_it in texts.items()}
    warn_of_unknown({name: [tokenize_text(text, tokenizer) for text in one] for name, one in some.items()}, tokenizer)


def ordinary_tokens(tokenizer: Any) -> Int64[Tensor, " token"]:
    """Return the ids of all tokens that are not special, ascending."""
    ids = sorted(set(tokenizer.get_vocab().values()) - special_tokens(tokenizer))
    if not ids:
        raise UserError("tokenizer: expected tokens that are not special, its vocabulary has none")
    return torch.tensor(ids)


def line_breaks(tokenizer: Any) -> frozenset[int]:
    """Return the ids of tokens that are white space with a line break."""
    texts = _texts_of_signs(tokenizer)
    return frozenset(token_id for token_id, text in texts.items() if text.isspace() and "\n" in text)


def common_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens and of tokens of punctuation (Unicode category P), also behind white space.

    Source: "common tokens", which occur in texts on any subject (Bai et al. 2024).
    """
    ids = set(special_tokens(tokenizer))
    for token_id, text in _texts_of_signs(tokenizer).items():
        letters = text.replace("#", "").strip() or text.strip()
        if letters and all(unicodedata.category(letter).startswith("P") for letter in letters):
            ids.add(token_id)
    return frozenset(ids)


_ASCII_WORD = re.compile("[0-9A-Za-z]")
_NEW_LINE = "Ċ"  # how vocabularies of bytes write it


def _texts_of_signs(tokenizer: Any) -> dict[int, str]:
    """Return the texts, by id, of all tokens without letters and digits.

    A vocabulary of bytes writes blanks, line breaks and the bytes of many signs as letters, such as Ġ and Ċ: there only
    those of ASCII say without decoding that a token has some. <0x0A> is a byte of a vocabulary of characters.
    """
    vocabulary = tokenizer.get_vocab()
    is_bytes = _NEW_LINE in vocabulary and tokenizer.convert_tokens_to_string([_NEW_LINE]) == "\n"

    def has_word(token: str) -> bool:
        found = _ASCII_WORD.search(token) is not None if is_bytes else any(map(str.isalnum, token))
        return found and not token.startswith("<0x")

    return {i: tokenizer.convert_tokens_to_string([token]) for token, i in vocabulary.items() if not has_word(token)}


def encode_beginning(tokenizer: Any, *texts: str, limit: int) -> tuple[Any, int]:
    """Encode the first tokens of a text, or of two in one input; return them and how many there are in all.

    Tokenizers that cut the beginning of what is too long cut its end here. Raises UserError for fewer than two tokens.
    """
    columns, side = [[text] for text in texts], tokenizer.truncation_side
    try:
        tokenizer.truncation_side = "right"
        number = len(tokenize_once(tokenizer, *columns)["input_ids"][0])
        encoded = tokenize_once(tokenizer, *columns, truncation=True, max_length=limit)
    finally:
        tokenizer.truncation_side = side
    if number < 2:
        raise UserError(f"text: expected at least two tokens, got {number}")
    return encoded.convert_to_tensors("pt"), number


def tokenize_once(tokenizer: Any, *texts: list[str], max_length: int | None = None, **options: Any) -> Any:
    """Tokenize texts, or pairs of texts, each with the tokens that the tokenizer puts before a text once.

    A text may begin with them, as BOS in one of a chat template. Those are then taken out of every column; rows that
    are cut to `max_length` tokens are so without them.
    """
    first, has_mask = _tokens_put_before(tokenizer), options.pop("return_special_tokens_mask", False)
    options |= {"return_special_tokens_mask": True, "verbose": False}
    encoding = tokenizer(*texts, max_length=max_length, **options)
    for row in range(len(encoding["input_ids"])):
        if written := _find_written(encoding, row, first):
            whole = {name: values[row] for name, values in encoding.items()}
            if max_length is not None:
                rows = [column[row] for column in texts]
                cut, written = _cut(tokenizer, rows, first, max_length, len(written), options)
                whole = {name: values[0] for name, values in cut.items()}
            for name, values in encoding.items():
                values[row] = [value for column, value in enumerate(whole[name]) if column not in written]
    if not has_mask:
        del encoding["special_tokens_mask"]
    return encoding


def _cut(
    tokenizer: Any, texts: Sequence[str], first: tuple[int, ...], max_length: int, written: int, options: dict[str, Any]
) -> tuple[Any, set[int]]:
    """Return a row of texts of which some begin with what is put before them, cut, and the columns to take out of it.

    Where texts without that beginning have the same tokens, they are cut instead: of two, the longer one loses tokens,
    and would be the one that begins so.
    """
    name = "".join(tokenizer.convert_ids_to_tokens(list(first)))
    columns, bare = [[text] for text in texts], [[text.lstrip().removeprefix(name)] for text in texts]
    given, found = (tokenizer(*one, **{**options, "truncation": False}) for one in (columns, bare))
    known = _find_written(given, 0, first)
    if found["input_ids"][0] == [token for column, token in enumerate(given["input_ids"][0]) if column not in known]:
        return tokenizer(*bare, max_length=max_length, **options), set()
    longer = tokenizer(*columns, max_length=max_length + written, **options)
    return longer, _find_written(longer, 0, first)


def _find_written(encoding: Any, row: int, first: tuple[int, ...]) -> set[int]:
    """Return the columns of tokens that are written in a text and were put before it as well."""
    ids, added, count = encoding["input_ids"][row], encoding["special_tokens_mask"][row], len(first)
    seconds = range(count, len(ids) - count + 1) if first else ()
    return {
        column
        for second in seconds
        if ids[second] == first[0] and added[second - 1] and not any(added[second : second + count])
        if tuple(ids[second - count : second + count]) == first * 2
        for column in range(second, second + count)
    }


def tokens_before(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of the special tokens that a tokenizer puts before a text, as BOS; none if it cannot read "a"."""
    try:
        return tokens_around(tokenizer)[0]
    except UserError:
        raise
    except Exception:  # as those of words without one for unknown words raise it
        return ()


def drop_prefix(ids: list[int], prefix: Sequence[int]) -> list[int]:
    """Return tokens without those of a prefix, if they begin with it."""
    return ids[len(prefix) :] if ids[: len(prefix)] == list(prefix) else ids


def _tokens_put_before(tokenizer: Any) -> tuple[int, ...]:
    try:
        return tokens_before(tokenizer)
    except UserError:  # they are not around the text only
        return ()


def tokens_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the special tokens that a tokenizer puts before a text, and after it."""
    content, framed = tokenize_text("a", tokenizer), tokenize_text("a", tokenizer, special=True)
    start = next((column for column in range(len(framed)) if framed[column : column + len(content)] == content), None)
    if not content or start is None:
        raise UserError(f"tokenizer: expected special tokens around the text only, got {framed} for {content}")
    return tuple(framed[:start]), tuple(framed[start + len(content) :])


def tokenize_text(text: str, tokenizer: Any, *, special: bool = False) -> list[int]:
    """Tokenize a text of any length; `verbose=False` suppresses the tokenizer's warning about long texts."""
    return tokenizer(
        text, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False, verbose=False
    )["input_ids"]
