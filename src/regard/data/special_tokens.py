"""Special tokens in fixed columns, so that attention can be averaged over inputs (PAPA, appendix A)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError


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
    """Move the special tokens of each row to the same columns.

    * Special tokens before the texts stay; the last one after the texts goes to column `length` − 1.
    * The first special token between two texts goes to column `length` // 2, the others follow (RoBERTa has two).
    * Each text starts after the special tokens on its left and is padded on its right.

    One text may fill all other columns. Of two, the first has the columns before `length` // 2 and the second those
    after; each loses its own end. Token types move with their tokens, and padding gets the type of the special token
    that ends its text. A tokenizer without special tokens after the texts (GPT-2) leaves the text on the left.

    The rows are as the tokenizer builds them, padded on the right to (row, width). `special` is True at special tokens,
    `count` is from `count_special_tokens`, `length` is the number of columns of the result, and `pad` fills these.
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
    return ArrangedTokens(
        gather_columns(input_ids, columns, pad),
        columns >= 0,
        types,
        columns,
        (attention_mask & (target == length)).any(dim=1),
    )


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
