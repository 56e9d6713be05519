"""Examples as the tensors a model reads, special tokens in fixed columns or as the tokenizer has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.examples import KINDS, Examples, TaskKind
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
IGNORE_INDEX = -100
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Encoded:
    """Examples as a model reads them: N rows of T columns.

    `input_ids`: (N, T) int64. `attention_mask`: (N, T) bool, false at padding. `token_type_ids`: (N, T) int64, None
    for tokenizers without them. `labels`: (N,), or (N, T) for token tasks and mlm; −100 where there is none.
    `separator_columns`: the columns that special tokens stand in in every row, () where none are held. `truncated`: how many
    examples did not fit and were cut.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    labels: Tensor
    layout: SpecialTokenLayout
    length: int
    separators: tuple[int, ...]
    truncated: int

    def __len__(self) -> int:
        return len(self.input_ids)

    @cached_property
    def sha256(self) -> str:
        """The digest of what the model reads: shape, ids, mask and token types; not of the labels."""
        types = () if self.token_type_ids is None else (self.token_type_ids,)
        digest = hashlib.sha256(repr(tuple(self.input_ids.shape)).encode())
        for tensor in (self.input_ids, self.attention_mask, *types):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def rows(self, start: int, stop: int) -> Encoded:
        """The rows from `start` to before `stop`; `truncated` stays that of all."""
        types = None if self.token_type_ids is None else self.token_type_ids[start:stop]
        ids, mask, labels = self.input_ids[start:stop], self.attention_mask[start:stop], self.labels[start:stop]
        return replace(self, input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels)

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """What the model reads, `size` rows at a time in order, the last batch shorter; labels are not in it."""
        if size < 1:
            raise UserError(f"batch size: expected at least 1, got {size}")
        for start in range(0, len(self), size):
            part = self.rows(start, start + size)
            batch = {"input_ids": part.input_ids, "attention_mask": part.attention_mask}
            yield batch if part.token_type_ids is None else {**batch, "token_type_ids": part.token_type_ids}


def encode(
    kind: TaskKind, examples: Examples, tokenizer: Any, length: int, layout: SpecialTokenLayout = "paper"
) -> Encoded:
    """The examples as rows of T = `length` columns.

    Layout 'paper' (PAPA, appendix A) holds special tokens in place. One text: [CLS] tokens … padding … [SEP] at T−1.
    Two: [CLS] a … padding … [SEP] at T//2, b … padding … [SEP] at T−1; where a tokenizer has two between them
    (RoBERTa), those stand at T//2 and T//2 + 1. What is too long loses its end: one text keeps T less its special
    tokens; of two, the first keeps T//2 less the tokens before it, the second what lies between the separators, each
    cut on its own. Tokenizers with no special tokens (GPT-2) have nothing to hold: text on the left, padding on the
    right, two texts one behind the other. Layout 'natural' is what the tokenizer makes, cut on the longer text first
    and padded on the right.

    Kind 'sequence': one label a row. 'token': a label at the first piece of each word, −100 elsewhere; words cut off
    are lost, as are words of which the tokenizer leaves nothing. 'mlm': all texts as one run of tokens, cut into full
    windows with their special tokens, what is left at the end passed over; labels come from `mask_tokens`.

    Padding has the tokenizer's pad id; where it has none the end-of-text id, or 0: the mask is false there. Positions
    are left to the model: BERT counts columns, RoBERTa counts those whose id is not the pad id.

    Raises UserError for no examples, a row without a token, a length that the special tokens fill, a mix of one and
    two texts, and for token tasks a tokenizer that cannot tell which word a piece is of.
    """
    check_choice("layout", layout, LAYOUTS)
    check_choice("task kind", kind, KINDS)
    if not examples.texts:
        raise UserError("examples: expected at least one, got none")
    if kind == "mlm":
        return _windows(examples, tokenizer, length, layout)
    frame = _Frame.of(kind, examples, tokenizer, length, layout)
    parts = [
        frame.rows(examples.texts[start : start + _ROWS_AT_ONCE], examples.labels[start : start + _ROWS_AT_ONCE])
        for start in range(0, len(examples), _ROWS_AT_ONCE)
    ]
    ids, mask, types, labels, cut = zip(*parts, strict=True)
    empty = (~torch.cat(mask).any(dim=1)).nonzero()
    if len(empty):
        raise UserError(f"examples: expected text in each, example {int(empty[0])} has no tokens")
    return Encoded(
        input_ids=torch.cat(ids),
        attention_mask=torch.cat(mask),
        token_type_ids=torch.cat(types) if frame.typed else None,
        labels=torch.cat(labels),
        layout=layout,
        length=length,
        separators=separator_columns(frame.count, length) if layout == "paper" else (),
        truncated=sum(cut),
    )


def mask_tokens(encoded: Encoded, tokenizer: Any, seed: int, share: float = 0.15) -> Encoded:
    """The same rows with tokens hidden, and the hidden ones as labels, −100 elsewhere (BERT's masking).

    Each token is chosen by itself with probability `share`, never padding nor any special token, which the unknown
    token is too. Of those chosen 80 % become the mask token, 10 % a token drawn uniformly from those of the vocabulary
    that are not special, and 10 % stay. The same seed hides the same tokens.

    Raises UserError for a tokenizer without a mask token and a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise UserError(f"share: expected a number over 0 and at most 1, got {share}")
    if tokenizer.mask_token_id is None:
        raise UserError(f"tokenizer: expected one with a mask token, {type(tokenizer).__name__} has none")
    generator = torch.Generator().manual_seed(seed)
    ids, special = encoded.input_ids, torch.tensor(sorted(tokenizer.all_special_ids))
    drawn, fate = (torch.rand(ids.shape, generator=generator) for _ in range(2))
    chosen = (drawn < share) & encoded.attention_mask & ~torch.isin(ids, special)
    vocabulary = torch.arange(len(tokenizer))
    vocabulary = vocabulary[~torch.isin(vocabulary, special)]
    other = vocabulary[torch.randint(len(vocabulary), ids.shape, generator=generator)]
    hidden = torch.where(fate < 0.8, tokenizer.mask_token_id, torch.where(fate < 0.9, other, ids))
    return replace(
        encoded, input_ids=torch.where(chosen, hidden, ids), labels=torch.where(chosen, ids, torch.tensor(IGNORE_INDEX))
    )


class _Rows(NamedTuple):
    """Some rows of an `Encoded`; `cut`: how many of them lost tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    labels: Tensor
    cut: int


@dataclass(frozen=True)
class _Frame:
    """How rows of one kind are made: by which tokenizer, with which special tokens, at which length."""

    kind: TaskKind
    tokenizer: Any
    count: SpecialTokenCounts
    length: int
    layout: SpecialTokenLayout
    cut_by_tokenizer: bool  # by `arrange_special_tokens` otherwise, which holds each text to its own columns
    spaced: bool  # words go in with a space before each

    @classmethod
    def of(cls, kind: TaskKind, examples: Examples, tokenizer: Any, length: int, layout: SpecialTokenLayout) -> _Frame:
        """The frame for these examples, after checking that they fit it."""
        if kind == "token" and not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise UserError(f"tokenizer: expected a fast one, which tells the word of each piece; {name} is not")
        sizes = {len(texts) for texts in examples.texts} if kind == "sequence" else {1}
        if sizes not in ({1}, {2}):
            raise UserError(f"examples: expected one text in each or two in each, got {sorted(sizes)}")
        count = count_special_tokens(tokenizer, pairs=sizes == {2})
        check_min_length(count if layout == "paper" else SpecialTokenCounts(sum(count), 0, 0), length)
        by_tokenizer = layout == "natural" or (sizes == {2} and not count.between)
        spaced = kind == "token" and _glues_words(tokenizer)
        return cls(kind, tokenizer, count, length, layout, by_tokenizer, spaced)

    @property
    def typed(self) -> bool:
        """Whether the tokenizer has token types."""
        return _typed(self.tokenizer)

    def rows(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Any]) -> _Rows:
        """The rows of some examples."""
        built = self._built(texts)
        too_long = [row for row, ids in enumerate(built["input_ids"]) if len(ids) > self.length]
        if too_long and self.cut_by_tokenizer:
            short = self._built([texts[row] for row in too_long], truncation="longest_first", max_length=self.length)
            for name, values in short.items():
                for row, value in zip(too_long, values, strict=True):
                    built[name][row] = value
        pad, width = _pad(self.tokenizer), max(self.length, *map(len, built["input_ids"]))
        ids = _padded(built["input_ids"], pad, width)
        mask = _padded(built["attention_mask"], 0, width).bool()
        types = _padded(built["token_type_ids"], 0, width) if self.typed else None
        if self.kind == "token":
            marks = _padded(list(map(_at_first_pieces, built["words"], labels)), IGNORE_INDEX, width)
        else:
            marks = torch.tensor(labels, dtype=torch.int64)
        if self.layout == "natural":
            return _Rows(ids, mask, types, marks, len(too_long))
        special = _padded(built["special_tokens_mask"], 0, width).bool()
        made = arrange_special_tokens(ids, mask, types, special, count=self.count, length=self.length, pad=pad)
        marks = gather_columns(marks, made.columns, IGNORE_INDEX) if self.kind == "token" else marks
        cut = len(too_long) if self.cut_by_tokenizer else int(made.cut.sum())
        return _Rows(made.input_ids, made.attention_mask, made.token_type_ids, marks, cut)

    def _built(self, texts: Sequence[tuple[str, ...]], **truncation: Any) -> dict[str, list[list[Any]]]:
        """What the tokenizer makes of examples, without padding; for token tasks with the word of each piece."""
        if self.kind == "token":
            space = " " if self.spaced else ""
            columns = [[[space + word for word in words] for words in texts]]
        else:
            columns = [list(column) for column in zip(*texts, strict=True)]
        settings = {"add_special_tokens": True, "return_special_tokens_mask": True, "return_attention_mask": True}
        made = self.tokenizer(
            *columns,
            is_split_into_words=self.kind == "token",
            return_token_type_ids=self.typed,
            padding=False,
            verbose=False,
            **settings,
            **({"truncation": False} | truncation),
        )
        words = {"words": [made.word_ids(row) for row in range(len(texts))]} if self.kind == "token" else {}
        return {**{name: list(values) for name, values in made.items()}, **words}


def _windows(examples: Examples, tokenizer: Any, length: int, layout: SpecialTokenLayout) -> Encoded:
    """All texts as one run of tokens, cut into windows without padding."""
    count = count_special_tokens(tokenizer, pairs=False)
    check_min_length(count, length)
    held = sum(count)
    built = tokenizer("a", return_token_type_ids=True, padding=False, truncation=False, verbose=False)
    end = len(built["input_ids"]) - count.after
    texts = [text for (text,) in examples.texts]
    pieces = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
    run = [token for ids in pieces for token in ids]
    rows = len(run) // (length - held)
    if not rows:
        raise UserError(f"examples: expected text for a window of {length} tokens, got {len(run)} and {held} special")
    content = torch.tensor(run[: rows * (length - held)]).view(rows, length - held)
    ids, types = (
        torch.cat([values[: count.before].expand(rows, -1), text, values[end:].expand(rows, -1)], dim=1)
        for name, text in (("input_ids", content), ("token_type_ids", torch.zeros_like(content)))
        for values in (torch.tensor(built[name]),)
    )
    return Encoded(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        token_type_ids=types if _typed(tokenizer) else None,
        labels=torch.full_like(ids, IGNORE_INDEX),
        layout=layout,
        length=length,
        separators=separator_columns(count, length) if layout == "paper" else (),
        truncated=0,
    )


def _glues_words(tokenizer: Any) -> bool:
    """Whether words given one by one lose the space that a text has between them, as with byte-level BPE."""
    text = tokenizer("a a", add_special_tokens=False, verbose=False)["input_ids"]
    words = tokenizer(["a", "a"], is_split_into_words=True, add_special_tokens=False, verbose=False)["input_ids"]
    return bool(text != words)


def _at_first_pieces(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """One label a piece: that of its word where the word begins, −100 elsewhere."""
    before = [None, *words[:-1]]
    return [
        IGNORE_INDEX if word is None or word == last else labels[word] for word, last in zip(words, before, strict=True)
    ]


def _padded(rows: Sequence[Sequence[int]], fill: int, width: int) -> Tensor:
    """(row, width) int64, each row padded on its right."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)


def _pad(tokenizer: Any) -> int:
    """The id that padding has, or what stands in for it."""
    named = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in named if token is not None), 0)


def _typed(tokenizer: Any) -> bool:
    """Whether models of this tokenizer read token types."""
    return "token_type_ids" in tokenizer.model_input_names
