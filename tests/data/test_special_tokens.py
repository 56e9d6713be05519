import random
from typing import Any

import pytest
import torch

from regard.data.encoding import SpecialTokenCounts, arrange_special_tokens, separator_columns
from regard.errors import UserError

PAD = 99
FRAMES = {
    "bert": SpecialTokenCounts(1, 1, 1),
    "roberta": SpecialTokenCounts(1, 2, 1),
    "t5": SpecialTokenCounts(0, 1, 1),
    "llama": SpecialTokenCounts(1, 1, 0),
}


def one_by_one(
    first: list[int], second: list[int], count: SpecialTokenCounts, length: int
) -> tuple[list[int], list[int]]:
    """Ids and token types of a pair, put in place token by token."""
    ids, types = [PAD] * length, [0] * length
    half = length // 2
    for column in range(half + count.between if count.after else length, length):
        types[column] = 1
    for column in range(count.before):
        ids[column] = 1
    for offset in range(count.between):
        ids[half + offset] = 2
    for offset in range(count.after):
        ids[length - 1 - offset] = 3
    for offset, token in enumerate(first):
        if count.before + offset < half:
            ids[count.before + offset] = token
    for offset, token in enumerate(second):
        column = half + count.between + offset
        if column < length - count.after:
            ids[column], types[column] = token, 1
    return ids, types


def natural(first: list[int], second: list[int], count: SpecialTokenCounts) -> list[tuple[int, int, bool]]:
    """Id, token type and whether special, for each token of a pair as a tokenizer builds it."""
    before, between, after = [(1, 0, True)] * count.before, [(2, 0, True)] * count.between, [(3, 1, True)] * count.after
    return [*before, *((t, 0, False) for t in first), *between, *((t, 1, False) for t in second), *after]


def tensors(rows: list[list[tuple[int, int, bool]]]) -> dict[str, Any]:
    width = max(map(len, rows))
    full = torch.tensor(
        [[(*token, True) for token in row] + [(PAD, 0, False, False)] * (width - len(row)) for row in rows]
    )
    return {
        "input_ids": full[..., 0],
        "token_type_ids": full[..., 1],
        "special": full[..., 2].bool(),
        "attention_mask": full[..., 3].bool(),
    }


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("length", [8, 9, 16])
def test_pairs_stand_where_one_by_one_puts_them(name: str, length: int) -> None:
    draw, count = random.Random(length), FRAMES[name]
    pairs = [tuple(draw.choices(range(10, 90), k=draw.randrange(12)) for _ in range(2)) for _ in range(50)]
    made = arrange_special_tokens(
        **tensors([natural(*pair, count) for pair in pairs]), count=count, length=length, pad=PAD
    )
    expected = [one_by_one(*pair, count, length) for pair in pairs]
    assert made.input_ids.tolist() == [ids for ids, _ in expected]
    assert made.token_type_ids is not None
    assert made.token_type_ids.tolist() == [types for _, types in expected]
    assert torch.equal(made.attention_mask, made.input_ids != PAD)
    room = (length // 2 - count.before, length - length // 2 - count.between - count.after)
    assert made.truncated.tolist() == [
        any(len(text) > most for text, most in zip(pair, room, strict=True)) for pair in pairs
    ]


def test_one_text_may_take_all_columns_and_loses_only_its_end() -> None:
    count = SpecialTokenCounts(1, 0, 1)
    rows = [[(1, 0, True), *((10 + n, 0, False) for n in range(size)), (3, 0, True)] for size in (0, 2, 6, 9)]
    made = arrange_special_tokens(**tensors(rows), count=count, length=8, pad=PAD)
    assert made.input_ids.tolist() == [
        [1, PAD, PAD, PAD, PAD, PAD, PAD, 3],
        [1, 10, 11, PAD, PAD, PAD, PAD, 3],
        [1, 10, 11, 12, 13, 14, 15, 3],
        [1, 10, 11, 12, 13, 14, 15, 3],
    ]
    assert made.truncated.tolist() == [False, False, False, True]
    assert made.columns[1].tolist() == [0, 1, 2, -1, -1, -1, -1, 3]


def test_without_special_tokens_the_text_stands_on_the_left() -> None:
    rows = [[(10, 0, False), (11, 0, False)], [(10, 0, False)] * 5]
    made = arrange_special_tokens(**tensors(rows), count=SpecialTokenCounts(0, 0, 0), length=4, pad=PAD)
    assert made.input_ids.tolist() == [[10, 11, PAD, PAD], [10] * 4]


def test_the_columns_of_separators() -> None:
    assert separator_columns(SpecialTokenCounts(1, 0, 1), 8) == (0, 7)
    assert separator_columns(SpecialTokenCounts(1, 1, 1), 8) == (0, 4, 7)
    assert separator_columns(SpecialTokenCounts(1, 2, 1), 9) == (0, 4, 5, 8)
    assert separator_columns(SpecialTokenCounts(0, 0, 0), 8) == ()


@pytest.mark.parametrize(
    "count,least",
    [
        (SpecialTokenCounts(1, 0, 1), 3),
        (SpecialTokenCounts(1, 1, 1), 5),
        (SpecialTokenCounts(1, 2, 1), 7),
        (SpecialTokenCounts(3, 1, 1), 8),
    ],
)
def test_each_text_has_room_for_a_token_at_the_least_length(count: SpecialTokenCounts, least: int) -> None:
    row = tensors([natural([10], [11], count) if count.between else [(1, 0, True), (10, 0, False), (3, 0, True)]])
    made = arrange_special_tokens(**row, count=count, length=least, pad=PAD)
    assert not made.truncated.any()
    with pytest.raises(UserError, match=f"expected at least {least}, .* got {least - 1}"):
        arrange_special_tokens(**row, count=count, length=least - 1, pad=PAD)


def test_a_special_token_within_a_text_is_refused() -> None:
    count = FRAMES["bert"]
    row = natural([10, 11], [12], count)
    row[1] = (2, 0, True)
    with pytest.raises(UserError, match="a text holds one more"):
        arrange_special_tokens(**tensors([row]), count=count, length=8, pad=PAD)
