"""Special tokens in fixed columns, so that an average of attention over inputs means something (PAPA, appendix A)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError


class SpecialTokenCounts(NamedTuple):
    """How many special tokens a tokenizer puts before the first text, between two texts, and after the last."""

    before: int
    between: int
    after: int


class ArrangedTokens(NamedTuple):
    """Rows of (row, length) with their special tokens in fixed columns.

    `columns`: int64, the column of the given row that each token came from; −1 for padding.
    `cut`: (row,) bool, whether tokens of that row were left out.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    columns: Tensor
    cut: Tensor


def count_special_tokens(tokenizer: Any, *, pairs: bool) -> SpecialTokenCounts:
    """How many special tokens this tokenizer puts around one text or two, found by building an input with it."""
    texts = ("a", "a") if pairs else ("a",)
    built = tokenizer(*texts, return_special_tokens_mask=True, padding=False, truncation=False, verbose=False)
    mask = [bool(flag) for flag in built["special_tokens_mask"]]
    text = [column for column, special in enumerate(mask) if not special]
    if not text:
        raise UserError("tokenizer: expected a token for the text 'a', it made none")
    return SpecialTokenCounts(text[0], sum(mask[text[0] : text[-1]]), len(mask) - 1 - text[-1])


def separator_columns(count: SpecialTokenCounts, length: int) -> tuple[int, ...]:
    """The columns in which `arrange_special_tokens` holds special tokens, ascending."""
    middle = range(length // 2, length // 2 + count.between)
    return (*range(count.before), *middle, *range(length - count.after, length))


def check_min_length(count: SpecialTokenCounts, length: int) -> None:
    """Raises UserError where `length` columns leave a text without a token."""
    least = sum(count) + 1
    if count.between:
        first, second = count.before + 1, count.between + 1 + count.after
        least = max(2 * first, 2 * second - 1)
    if length < least:
        texts = "pairs of texts" if count.between else "a text"
        raise UserError(f"length: expected at least {least}, for {texts} and their special tokens; got {length}")


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
    """The rows at `length` columns, their special tokens in the same columns in every row.

    Given are rows as the tokenizer builds them, of any length and padded on the right: (row, width) each;
    `special` is true at the special tokens. With T = `length`:

    * the tokens before the texts stay where they are; the last of those after the texts stands at T−1;
    * of two texts, the first token between them stands at T//2 and the others follow it (RoBERTa has two);
    * each text begins after the special tokens on its left and is padded on its right.

    One text may take up all columns that its special tokens leave; of two, the first has the columns before T//2
    and the second those behind, and each is cut on its own at its end. Token types move with their tokens; padding
    has the type of the special token that ends its text. Where the tokenizer puts nothing after the texts (GPT-2),
    nothing is held there, and the text stands on the left.
    """
    check_min_length(count, length)
    target = _targets(attention_mask, special, count, length)
    rows, width = target.shape
    columns = torch.full((rows, length + 1), -1, dtype=torch.int64)
    columns.scatter_(1, target, torch.arange(width).expand(rows, width))
    columns = columns[:, :length]
    return ArrangedTokens(
        gather_columns(input_ids, columns, pad),
        columns >= 0,
        None if token_type_ids is None else _types(gather_columns(token_type_ids, columns, 0), columns, count),
        columns,
        (attention_mask & (target == length)).any(dim=1),
    )


def gather_columns(values: Tensor, columns: Tensor, fill: int) -> Tensor:
    """One value a token, (row, width), brought to the columns of its token; `fill` in padding."""
    return torch.where(columns >= 0, values.gather(1, columns.clamp_min(0)), fill)


def _targets(mask: Tensor, special: Tensor, count: SpecialTokenCounts, length: int) -> Tensor:
    """(row, width): the column each token belongs in; `length` for padding and for what is cut off."""
    column = torch.arange(mask.shape[1]).expand(mask.shape)
    end = mask.sum(dim=1, keepdim=True) - count.after
    after = mask & (column >= end)
    text = mask & (column >= count.before) & ~after
    middle = text & special if count.between else torch.zeros_like(text)
    if not bool((middle.sum(dim=1) == count.between).all()):
        raise UserError(
            f"tokenizer: expected {count.between} special tokens between two texts; a text holds one more, take it out"
        )
    passed = middle.cumsum(dim=1)
    second = text & ~middle & (passed == count.between) if count.between else torch.zeros_like(text)
    first = text & ~middle & ~second
    half, last = length // 2, length - count.after
    target = torch.full_like(column, length)
    target = torch.where(
        (mask & (column < count.before)) | (first & (column < (half if count.between else last))), column, target
    )
    target = torch.where(middle, half + passed - 1, target)
    behind = half + count.between + second.cumsum(dim=1) - 1
    target = torch.where(second & (behind < last), behind, target)
    return torch.where(after, column - end + last, target)


def _types(types: Tensor, columns: Tensor, count: SpecialTokenCounts) -> Tensor:
    """The token types, padding with that of the special token that ends its text."""
    rows, length = types.shape
    column = torch.arange(length).expand(rows, length)
    ends = types.new_zeros(rows, length)
    if count.after:
        ends = types[:, length - count.after, None].expand(rows, length)
    if count.between:
        ends = torch.where(column < length // 2, types[:, length // 2, None], ends)
    return torch.where(columns >= 0, types, ends)
