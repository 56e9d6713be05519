"""Examples as input tensors, with special tokens in fixed columns or where the tokenizer puts them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from regard.data.examples import IGNORE_INDEX, KINDS, Examples, TaskKind
from regard.data.special_tokens import (
    SpecialTokenCounts,
    arrange_special_tokens,
    check_min_length,
    count_special_tokens,
    gather_columns,
    separator_columns,
)
from regard.errors import UserError, check_choice

SpecialTokenLayout = Literal["paper", "natural"]
LAYOUTS: tuple[SpecialTokenLayout, ...] = ("paper", "natural")
_CHUNK_ROWS = 256


@dataclass(frozen=True, eq=False)
class Encoded:
    """Examples as model inputs: N rows of T columns."""

    input_ids: Tensor  # int64 of shape (N, T)
    attention_mask: Tensor  # bool of shape (N, T), False at padding
    token_type_ids: Tensor | None  # int64 of shape (N, T); None for tokenizers without token types
    labels: Tensor  # (N,), or (N, T) for token tasks and mlm; `IGNORE_INDEX` at positions without a label
    layout: SpecialTokenLayout
    length: int
    separators: tuple[int, ...]  # columns with a special token in every row; empty for the layout "natural"
    truncated: int  # number of examples that lost tokens

    def __len__(self) -> int:
        return len(self.input_ids)

    @cached_property
    def sha256(self) -> str:
        """Hash of the model inputs (shape, ids, mask, token types) without the labels."""
        types = () if self.token_type_ids is None else (self.token_type_ids,)
        digest = hashlib.sha256(repr(tuple(self.input_ids.shape)).encode())
        for tensor in (self.input_ids, self.attention_mask, *types):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def rows(self, start: int, stop: int) -> Encoded:
        """Return the rows `start` to `stop` − 1; `truncated` stays that of all rows."""
        types = None if self.token_type_ids is None else self.token_type_ids[start:stop]
        ids, mask, labels = self.input_ids[start:stop], self.attention_mask[start:stop], self.labels[start:stop]
        return replace(self, input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels)

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Iterate over model inputs without labels, `size` rows at a time; the last batch may be shorter."""
        if size < 1:
            raise UserError(f"batch size: expected at least 1, got {size}")
        for start in range(0, len(self), size):
            rows = self.rows(start, start + size)
            batch = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
            yield batch if rows.token_type_ids is None else {**batch, "token_type_ids": rows.token_type_ids}


def encode(
    kind: TaskKind, examples: Examples, tokenizer: Any, length: int, layout: SpecialTokenLayout = "paper"
) -> Encoded:
    """Encode examples as rows of `length` columns.

    Layout "paper" (PAPA, appendix A) fixes the columns of special tokens. With T = `length`:

    * One text: [CLS] tokens … padding … [SEP] at T−1.
    * Two texts: [CLS] a … padding … [SEP] at T//2, b … padding … [SEP] at T−1. A tokenizer with two special tokens
      between texts (RoBERTa) has them at T//2 and T//2 + 1. Each text is truncated by itself.
    * A tokenizer without special tokens (GPT-2): text on the left, padding on the right, two texts joined.

    Layout "natural" is the tokenizer's own: truncated at the longer text first, padded on the right.

    Labels by kind: "sequence" has one per row. "token" has one at the first token of each word; words that are
    truncated, or that the tokenizer drops, lose theirs. "mlm" joins all texts and cuts them into full windows, dropping
    the rest; `mask_tokens` adds the labels.

    Padding has the tokenizer's pad id, or else its end-of-text id, or 0. Position ids are left to the model.

    Raises:
        UserError: No examples, a row without tokens, a length too small for the special tokens, a mix of single texts
            and pairs, or a token task with a slow tokenizer.
    """
    check_choice("layout", layout, LAYOUTS)
    check_choice("task kind", kind, KINDS)
    if not examples.texts:
        raise UserError("examples: expected at least one, got none")
    if kind == "mlm":
        count = count_special_tokens(tokenizer, pairs=False)
        chunks = [_encode_windows(examples, tokenizer, length, count)]
    else:
        encoder = _RowEncoder(kind, examples, tokenizer, length, layout)
        count = encoder.count
        chunks = [
            encoder.encode(examples.texts[start : start + _CHUNK_ROWS], examples.labels[start : start + _CHUNK_ROWS])
            for start in range(0, len(examples), _CHUNK_ROWS)
        ]
    ids, mask, types, labels, truncated = zip(*chunks, strict=True)
    empty = (~torch.cat(mask).any(dim=1)).nonzero()
    if len(empty):
        raise UserError(f"examples: expected text in each, example {int(empty[0])} has no tokens")
    return Encoded(
        input_ids=torch.cat(ids),
        attention_mask=torch.cat(mask),
        token_type_ids=torch.cat(types) if _has_types(tokenizer) else None,
        labels=torch.cat(labels),
        layout=layout,
        length=length,
        separators=separator_columns(count, length) if layout == "paper" else (),
        truncated=sum(truncated),
    )


def mask_tokens(encoded: Encoded, tokenizer: Any, seed: int, probability: float = 0.15) -> Encoded:
    """Mask random tokens and make them the labels (BERT's masking).

    Each token except padding and special tokens is selected with the given probability. Of the selected, 80 % become
    the mask token, 10 % a random token of the vocabulary that is not special, and 10 % stay.

    Raises:
        UserError: The tokenizer has no mask token, or the probability is outside (0, 1].
    """
    if not 0 < probability <= 1:
        raise UserError(f"probability: expected a number over 0 and at most 1, got {probability}")
    if tokenizer.mask_token_id is None:
        raise UserError(f"tokenizer: expected one with a mask token, {type(tokenizer).__name__} has none")
    generator = torch.Generator().manual_seed(seed)
    ids, special = encoded.input_ids, torch.tensor(sorted(tokenizer.all_special_ids))
    selection, replacement = (torch.rand(ids.shape, generator=generator) for _ in range(2))
    selected = (selection < probability) & encoded.attention_mask & ~torch.isin(ids, special)
    vocabulary = torch.arange(len(tokenizer))
    vocabulary = vocabulary[~torch.isin(vocabulary, special)]
    random_ids = vocabulary[torch.randint(len(vocabulary), ids.shape, generator=generator)]
    masked = torch.where(replacement < 0.8, tokenizer.mask_token_id, torch.where(replacement < 0.9, random_ids, ids))
    return replace(
        encoded,
        input_ids=torch.where(selected, masked, ids),
        labels=torch.where(selected, ids, torch.tensor(IGNORE_INDEX)),
    )


_EncodedRows = tuple[Tensor, Tensor, Tensor | None, Tensor, int]
"""Ids, mask, token types and labels of rows, and the number of rows that lost tokens."""


class _RowEncoder:
    """Encodes rows of sequence and token tasks, after checking that they can be encoded."""

    def __init__(
        self, kind: TaskKind, examples: Examples, tokenizer: Any, length: int, layout: SpecialTokenLayout
    ) -> None:
        if kind == "token" and not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise UserError(f"tokenizer: expected a fast one, which tells the word of each token; {name} is not")
        sizes = {len(texts) for texts in examples.texts} if kind == "sequence" else {1}
        if sizes not in ({1}, {2}):
            raise UserError(f"examples: expected one text in each or two in each, got {sorted(sizes)}")
        self.kind, self.tokenizer, self.length, self.layout = kind, tokenizer, length, layout
        self.count = count_special_tokens(tokenizer, pairs=sizes == {2})
        check_min_length(self.count if layout == "paper" else SpecialTokenCounts(sum(self.count), 0, 0), length)
        # otherwise `arrange_special_tokens` truncates each text by itself
        self.tokenizer_truncates = layout == "natural" or (sizes == {2} and not self.count.between)
        self.has_types = _has_types(tokenizer)
        self.space = " " if kind == "token" and _joins_words(tokenizer) else ""

    def encode(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Any]) -> _EncodedRows:
        """Encode some examples."""
        encoding = self._tokenize(texts)
        too_long = [row for row, ids in enumerate(encoding["input_ids"]) if len(ids) > self.length]
        if too_long and self.tokenizer_truncates:
            truncation = {"truncation": "longest_first", "max_length": self.length}
            for name, values in self._tokenize([texts[row] for row in too_long], **truncation).items():
                for row, value in zip(too_long, values, strict=True):
                    encoding[name][row] = value
        pad, width = _pad_id(self.tokenizer), max(self.length, *map(len, encoding["input_ids"]))
        ids = _pad_rows(encoding["input_ids"], pad, width)
        mask = _pad_rows(encoding["attention_mask"], 0, width).bool()
        types = _pad_rows(encoding["token_type_ids"], 0, width) if self.has_types else None
        if self.kind == "token":
            targets = _pad_rows(list(map(_label_first_tokens, encoding["words"], labels)), IGNORE_INDEX, width)
        else:
            targets = torch.tensor(labels, dtype=torch.int64)
        if self.layout == "natural":
            return ids, mask, types, targets, len(too_long)
        special = _pad_rows(encoding["special_tokens_mask"], 0, width).bool()
        rows = arrange_special_tokens(ids, mask, types, special, count=self.count, length=self.length, pad=pad)
        if self.kind == "token":
            targets = gather_columns(targets, rows.columns, IGNORE_INDEX)
        truncated = len(too_long) if self.tokenizer_truncates else int(rows.truncated.sum())
        return rows.input_ids, rows.attention_mask, rows.token_type_ids, targets, truncated

    def _tokenize(self, texts: Sequence[tuple[str, ...]], **truncation: Any) -> dict[str, list[list[Any]]]:
        """Tokenize without padding; for token tasks `words` has the word index of each token."""
        if self.kind == "token":
            columns = [[[self.space + word for word in words] for words in texts]]
        else:
            columns = [list(column) for column in zip(*texts, strict=True)]
        encoding = self.tokenizer(
            *columns,
            is_split_into_words=self.kind == "token",
            add_special_tokens=True,
            return_special_tokens_mask=True,
            return_attention_mask=True,
            return_token_type_ids=self.has_types,
            padding=False,
            verbose=False,
            **({"truncation": False} | truncation),
        )
        words = {"words": [encoding.word_ids(row) for row in range(len(texts))]} if self.kind == "token" else {}
        return {**{name: list(values) for name, values in encoding.items()}, **words}


def _encode_windows(examples: Examples, tokenizer: Any, length: int, count: SpecialTokenCounts) -> _EncodedRows:
    """Join all texts and cut them into windows without padding."""
    check_min_length(count, length)
    content_length = length - sum(count)
    frame = tokenizer("a", return_token_type_ids=True, padding=False, truncation=False, verbose=False)
    end = len(frame["input_ids"]) - count.after
    texts = [text for (text,) in examples.texts]
    tokens = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
    joined = [token for ids in tokens for token in ids]
    rows = len(joined) // content_length
    if not rows:
        available = f"{len(joined)} and {sum(count)} special"
        raise UserError(f"examples: expected text for a window of {length} tokens, got {available}")
    content = torch.tensor(joined[: rows * content_length]).view(rows, content_length)
    ids, types = (
        torch.cat([values[: count.before].expand(rows, -1), text, values[end:].expand(rows, -1)], dim=1)
        for name, text in (("input_ids", content), ("token_type_ids", torch.zeros_like(content)))
        for values in (torch.tensor(frame[name]),)
    )
    return ids, torch.ones_like(ids, dtype=torch.bool), types, torch.full_like(ids, IGNORE_INDEX), 0


def _joins_words(tokenizer: Any) -> bool:
    """Whether words that are tokenized one by one lose the space between them, as with byte-level BPE."""
    text = tokenizer("a a", add_special_tokens=False, verbose=False)["input_ids"]
    words = tokenizer(["a", "a"], is_split_into_words=True, add_special_tokens=False, verbose=False)["input_ids"]
    return bool(text != words)


def _label_first_tokens(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """Return one label per token: that of its word at the word's first token, else `IGNORE_INDEX`."""
    return [
        IGNORE_INDEX if word is None or word == previous else labels[word]
        for word, previous in zip(words, [None, *words[:-1]], strict=True)
    ]


def _pad_rows(rows: Sequence[Sequence[int]], fill: int, width: int) -> Tensor:
    """Pad rows on the right, to int64 of shape (row, width)."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)


def _pad_id(tokenizer: Any) -> int:
    """Return the token id of padding, or what replaces it."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in candidates if token is not None), 0)


def _has_types(tokenizer: Any) -> bool:
    """Whether models of this tokenizer take token types."""
    return "token_type_ids" in tokenizer.model_input_names
