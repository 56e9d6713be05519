"""Examples as input tensors, with special tokens in fixed columns or where the tokenizer puts them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.data.examples import IGNORE_INDEX, KINDS, Examples, TaskKind
from regard.data.tokenizers import tokenize_once
from regard.errors import UserError, check_choice, check_int

Layout = Literal["paper", "natural"]
LAYOUTS: tuple[Layout, ...] = ("paper", "natural")
_CHUNK_ROWS = 256


@dataclass(frozen=True, eq=False)
class Encoded:
    """Examples as model inputs: N rows of T columns."""

    input_ids: Tensor  # int64 of shape (N, T)
    attention_mask: Tensor  # bool of shape (N, T), False at padding
    token_type_ids: Tensor | None  # int64 of shape (N, T); None for tokenizers without token types
    labels: Tensor  # (N,), or (N, T) for token tasks and mlm; `IGNORE_INDEX` at positions without a label
    layout: Layout
    length: int
    separators: tuple[int, ...]  # columns with a special token in every row; empty for the layout "natural"
    truncated: int  # number of examples that lost tokens
    token_counts: Tensor  # (N,), tokens of each example before it was truncated

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

    def widened(self, width: int, pad: int) -> Encoded:
        """Return the same rows with so many columns."""
        ids, mask, types = widen_rows(self.input_ids, self.attention_mask, self.token_type_ids, width, pad)
        return replace(self, input_ids=ids, attention_mask=mask, token_type_ids=types)

    def rows(self, start: int, stop: int) -> Encoded:
        """Return the rows `start` to `stop` − 1; `truncated` stays that of all rows."""
        part = slice(start, stop)
        inputs: dict[str, Any] = self.inputs(part)
        return replace(self, **inputs, labels=self.labels[part], token_counts=self.token_counts[part])

    def inputs(self, index: slice | Tensor) -> dict[str, Tensor]:
        """Return the model inputs of some rows, without labels."""
        inputs = {"input_ids": self.input_ids[index], "attention_mask": self.attention_mask[index]}
        return inputs if self.token_type_ids is None else {**inputs, "token_type_ids": self.token_type_ids[index]}

    def token_lists(self) -> Iterator[list[int]]:
        """Iterate over the tokens of some rows at a time, without padding."""
        for batch in self.batches(_CHUNK_ROWS):
            yield batch["input_ids"][batch["attention_mask"]].tolist()

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Iterate over model inputs without labels, `size` rows at a time; the last batch may be shorter."""
        check_int("batch size", size, least=1)
        for start in range(0, len(self), size):
            yield self.inputs(slice(start, start + size))


def encode(
    kind: TaskKind, examples: Examples, tokenizer: Any, length: int, layout: Layout = "paper", *, trim: bool = False
) -> Encoded:
    """Encode examples as rows of `length` columns, with `trim` of as many as the longest row needs.

    Layout "paper" (PAPA, appendix A) fixes the columns of special tokens. With T = `length`:

    * One text: [CLS] tokens … padding … [SEP] at T−1.
    * Two texts: [CLS] a … padding … [SEP] at T//2, b … padding … [SEP] at T−1. A tokenizer with two special tokens
      between texts (RoBERTa) has them at T//2 and T//2 + 1. Each text is truncated by itself.
    * A tokenizer without special tokens (GPT-2): text on the left, padding on the right, two texts joined.

    Layout "natural" is the tokenizer's own: truncated at the longer text first, padded on the right. It alone may be
    trimmed.

    Labels by kind: "sequence" has one per row. "token" has one at the first token of each word that is not truncated,
    and needs a fast tokenizer. "mlm" joins all texts and cuts them into full windows; `mask_tokens` adds the labels.

    Padding has the tokenizer's pad id, or else its end-of-text id, or 0.
    """
    check_choice("layout", layout, LAYOUTS)
    check_choice("task kind", kind, KINDS)
    if not examples.texts:
        raise UserError("examples: expected at least one, got none")
    if kind == "mlm":
        count = count_special_tokens(tokenizer, pairs=False)
        chunks = [_encode_windows(examples, tokenizer, length, count)]
    else:
        encoder = _RowEncoder(kind, examples, tokenizer, length, layout, trim=trim)
        count = encoder.count
        chunks = [
            encoder.encode(examples.texts[start : start + _CHUNK_ROWS], examples.labels[start : start + _CHUNK_ROWS])
            for start in range(0, len(examples), _CHUNK_ROWS)
        ]
        if trim:
            chunks = _widen(chunks, encoder.pad)
    ids, mask, types, labels, truncated, token_counts = zip(*chunks, strict=True)
    empty = (~torch.cat(mask).any(dim=1)).nonzero()
    if len(empty):
        raise UserError(f"examples: expected text in each, example {int(empty[0])} has no tokens")
    return Encoded(
        input_ids=torch.cat(ids),
        attention_mask=torch.cat(mask),
        token_type_ids=torch.cat(types) if "token_type_ids" in tokenizer.model_input_names else None,
        labels=torch.cat(labels),
        layout=layout,
        length=length,
        separators=separator_columns(count, length) if layout == "paper" else (),
        truncated=sum(truncated),
        token_counts=torch.cat(token_counts),
    )


def mask_tokens(encoded: Encoded, tokenizer: Any, seed: int, probability: float = 0.15) -> Encoded:
    """Mask random tokens, none of them padding or special, and make them the labels (BERT's masking).

    Of the selected, 80 % become the mask token, 10 % a random token that is not special, and 10 % stay.
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
    labels = torch.where(selected, ids, torch.tensor(IGNORE_INDEX))
    return replace(encoded, input_ids=torch.where(selected, masked, ids), labels=labels)


_EncodedRows = tuple[Tensor, Tensor, Tensor | None, Tensor, int, Tensor]
"""Ids, mask, token types and labels of rows, the number of rows that lost tokens, and the tokens that each had."""


def find_pad_id(tokenizer: Any) -> int:
    """Return the token that fills rows up: the tokenizer's, or else its end of text, or 0."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in ids if token is not None)


def _widen(chunks: Sequence[_EncodedRows], pad: int) -> list[_EncodedRows]:
    """Return rows of one text or two, each chunk with the columns of the widest."""
    width = max(ids.shape[1] for ids, *_ in chunks)
    return [(*widen_rows(*chunk[:3], width, pad), *chunk[3:]) for chunk in chunks]


def widen_rows(
    ids: Tensor, mask: Tensor, types: Tensor | None, width: int, pad: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, mask and token types (row, column) with so many columns, of which those that are new are padding."""
    more = (0, width - ids.shape[1])
    ids, mask = nn.functional.pad(ids, more, value=pad), nn.functional.pad(mask, more)
    return ids, mask, None if types is None else nn.functional.pad(types, more)


class _RowEncoder:
    def __init__(
        self, kind: TaskKind, examples: Examples, tokenizer: Any, length: int, layout: Layout, *, trim: bool
    ) -> None:
        if kind == "token" and not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise UserError(f"tokenizer: expected a fast one, which tells the word of each token; {name} is not")
        sizes = {len(texts) for texts in examples.texts} if kind == "sequence" else {1}
        if sizes not in ({1}, {2}):
            raise UserError(f"examples: expected one text in each or two in each, got {sorted(sizes)}")
        self.kind, self.tokenizer, self.length, self.layout = kind, tokenizer, length, layout
        self.least_columns, self.pad = 0 if trim else length, find_pad_id(tokenizer)
        self.count = count_special_tokens(tokenizer, pairs=sizes == {2})
        check_min_length(self.count if layout == "paper" else SpecialTokenCounts(sum(self.count), 0, 0), length)
        # otherwise `arrange_special_tokens` truncates each text by itself
        self.tokenizer_truncates = layout == "natural" or (sizes == {2} and not self.count.between)
        self.has_types = "token_type_ids" in tokenizer.model_input_names
        self.space = " " if kind == "token" and _joins_words(tokenizer) else ""

    def encode(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Any]) -> _EncodedRows:
        encoding = self._tokenize(texts)
        token_counts = torch.tensor([len(ids) for ids in encoding["input_ids"]])
        too_long = (token_counts > self.length).nonzero().flatten().tolist()
        if too_long and self.tokenizer_truncates:
            truncation = {"truncation": "longest_first", "max_length": self.length}
            for name, values in self._tokenize([texts[row] for row in too_long], **truncation).items():
                for row, value in zip(too_long, values, strict=True):
                    encoding[name][row] = value
        width = max(self.least_columns, *map(len, encoding["input_ids"]))
        ids = pad_rows(encoding["input_ids"], self.pad, width)
        mask = pad_rows(encoding["attention_mask"], 0, width).bool()
        types = pad_rows(encoding["token_type_ids"], 0, width) if self.has_types else None
        if self.kind == "token":
            targets = pad_rows(list(map(_label_first_tokens, encoding["words"], labels)), IGNORE_INDEX, width)
        else:
            targets = torch.tensor(labels, dtype=torch.int64)
        if self.layout == "natural":
            return ids, mask, types, targets, len(too_long), token_counts
        special = pad_rows(encoding["special_tokens_mask"], 0, width).bool()
        rows = arrange_special_tokens(ids, mask, types, special, count=self.count, length=self.length, pad=self.pad)
        if self.kind == "token":
            targets = gather_columns(targets, rows.columns, IGNORE_INDEX)
        truncated = len(too_long) if self.tokenizer_truncates else int(rows.truncated.sum())
        return rows.input_ids, rows.attention_mask, rows.token_type_ids, targets, truncated, token_counts

    def _tokenize(self, texts: Sequence[tuple[str, ...]], **truncation: Any) -> dict[str, list[list[Any]]]:
        """Tokenize without padding; for token tasks `words` has the word index of each token."""
        options: dict[str, Any] = {
            "return_special_tokens_mask": True,
            "return_attention_mask": True,
            "return_token_type_ids": self.has_types,
            "padding": False,
            **({"truncation": False} | truncation),
        }
        if self.kind == "token":
            split = [[self.space + word for word in words] for words in texts]
            encoding = self.tokenizer(split, is_split_into_words=True, verbose=False, **options)
            words = {"words": [encoding.word_ids(row) for row in range(len(texts))]}
        else:
            columns = [list(column) for column in zip(*texts, strict=True)]
            encoding, words = tokenize_once(self.tokenizer, *columns, **options), {}
        return {**{name: list(values) for name, values in encoding.items()}, **words}


def _encode_windows(examples: Examples, tokenizer: Any, length: int, count: SpecialTokenCounts) -> _EncodedRows:
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
    mask, labels = torch.ones_like(ids, dtype=torch.bool), torch.full_like(ids, IGNORE_INDEX)
    return ids, mask, types, labels, 0, mask.sum(1)


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


def pad_rows(rows: Sequence[Sequence[int]], fill: int, width: int) -> Tensor:
    """Pad rows on the right, to int64 of shape (row, width)."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)


class SpecialTokenCounts(NamedTuple):
    """Number of special tokens before the first text, between two texts, and after the last."""

    before: int
    between: int
    after: int


class ArrangedTokens(NamedTuple):
    """Rows with their special tokens in fixed columns; shapes are (row, length)."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    columns: Tensor  # input column of each token, −1 at padding
    truncated: Tensor  # rows that lost tokens, bool of shape (row,)


def count_special_tokens(tokenizer: Any, *, pairs: bool) -> SpecialTokenCounts:
    """Count the special tokens that a tokenizer puts around one text, or around a pair."""
    texts = ("a", "a") if pairs else ("a",)
    encoding = tokenizer(*texts, return_special_tokens_mask=True, padding=False, truncation=False, verbose=False)
    mask = [bool(flag) for flag in encoding["special_tokens_mask"]]
    text_columns = [column for column, special in enumerate(mask) if not special]
    if not text_columns:
        raise UserError("tokenizer: expected a token for the text 'a', it made none")
    first, last = text_columns[0], text_columns[-1]
    return SpecialTokenCounts(first, sum(mask[first:last]), len(mask) - 1 - last)


def separator_columns(count: SpecialTokenCounts, length: int) -> tuple[int, ...]:
    """Return the columns in which `arrange_special_tokens` puts special tokens, ascending."""
    middle = range(length // 2, length // 2 + count.between)
    return (*range(count.before), *middle, *range(length - count.after, length))


def check_min_length(count: SpecialTokenCounts, length: int) -> None:
    """Raise UserError if rows of `length` columns leave a text without a token."""
    min_length = sum(count) + 1
    if count.between:
        first, second = count.before + 1, count.between + 1 + count.after
        min_length = max(2 * first, 2 * second - 1)
    if length < min_length:
        texts = "pairs of texts" if count.between else "a text"
        raise UserError(f"length: expected at least {min_length}, for {texts} and their special tokens; got {length}")


def arrange_special_tokens(
    input_ids: Tensor,
    attention_mask: Tensor,
    token_type_ids: Tensor | None,
    special: Tensor,
    *,
    count: SpecialTokenCounts,
    length: int,
    pad: int,
) -> ArrangedTokens:
    """Move the special tokens of each row to the columns of the layout "paper" of `encode`.

    The rows are as the tokenizer builds them, padded on the right to (row, width). `special` is True at special tokens,
    `count` is from `count_special_tokens`, `length` is the number of columns of the result, and `pad` fills these.
    Token types move with their tokens, and padding gets the type of the special token that ends its text.
    """
    check_min_length(count, length)
    target = _target_columns(attention_mask, special, count, length)
    rows, width = target.shape
    columns = torch.full((rows, length + 1), -1, dtype=torch.int64)
    columns.scatter_(1, target, torch.arange(width).expand(rows, width))
    columns = columns[:, :length]
    types = None
    if token_type_ids is not None:
        types = _fill_types(gather_columns(token_type_ids, columns, 0), columns, count)
    truncated = (attention_mask & (target == length)).any(dim=1)
    return ArrangedTokens(gather_columns(input_ids, columns, pad), columns >= 0, types, columns, truncated)


def gather_columns(values: Tensor, columns: Tensor, fill: int) -> Tensor:
    """Move values of shape (row, width) along with their tokens; `fill` goes to padding."""
    return torch.where(columns >= 0, values.gather(1, columns.clamp_min(0)), fill)


def _target_columns(mask: Tensor, special: Tensor, count: SpecialTokenCounts, length: int) -> Tensor:
    """Return the new column of each token, (row, width); `length` for padding and truncated tokens."""
    column = torch.arange(mask.shape[1]).expand(mask.shape)
    end = mask.sum(dim=1, keepdim=True) - count.after
    after = mask & (column >= end)
    text = mask & (column >= count.before) & ~after
    middle = text & special if count.between else torch.zeros_like(text)
    if not bool((middle.sum(dim=1) == count.between).all()):
        expected = f"{count.between} special tokens between two texts"
        raise UserError(f"tokenizer: expected {expected}; a text holds one more, take it out")
    separators_passed = middle.cumsum(dim=1)
    second = text & ~middle & (separators_passed == count.between) if count.between else torch.zeros_like(text)
    first = text & ~middle & ~second
    half, last = length // 2, length - count.after
    first_end = half if count.between else last
    target = torch.full_like(column, length)
    target = torch.where((mask & (column < count.before)) | (first & (column < first_end)), column, target)
    target = torch.where(middle, half + separators_passed - 1, target)
    second_column = half + count.between + second.cumsum(dim=1) - 1
    target = torch.where(second & (second_column < last), second_column, target)
    return torch.where(after, column - end + last, target)


def _fill_types(types: Tensor, columns: Tensor, count: SpecialTokenCounts) -> Tensor:
    """Give padding the token type of the special token that ends its text."""
    rows, length = types.shape
    column = torch.arange(length).expand(rows, length)
    fill = types.new_zeros(rows, length)
    if count.after:
        fill = types[:, length - count.after, None].expand(rows, length)
    if count.between:
        fill = torch.where(column < length // 2, types[:, length // 2, None], fill)
    return torch.where(columns >= 0, types, fill)
