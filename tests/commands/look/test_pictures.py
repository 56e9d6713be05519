"""Which tokens are patches of an image."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.commands.look.pictures import Patches, find_patches, name_tokens

PICTURE = 9


def loaded(**config: Any) -> Any:
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=lambda ids: [f"t{one}" for one in ids], all_special_ids=[1], added_tokens_decoder={}
    )
    described = SimpleNamespace(
        image_token_id=PICTURE, vision_config=SimpleNamespace(image_size=8, patch_size=2, **config)
    )
    return SimpleNamespace(model=SimpleNamespace(config=described), tokenizer=tokenizer)


@pytest.mark.parametrize(
    "shape, expected",
    [((1, 3, 4, 8), (1, 2, 4)), ((1, 5, 3, 8, 8), (5, 4, 4)), ((4, 3, 8, 8), (4, 4, 4)), ((1, 16, 12), None)],
)
def test_patches_are_those_of_the_pixels(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """Not of the size that the configuration names: an image may be of another, or of several tiles."""
    assert find_patches(loaded(), {"pixel_values": torch.zeros(shape)}) == expected


@pytest.mark.parametrize("planes, is_grid", [(1, True), (2, False)])
def test_tokens_of_text_are_patches_of_one_whole_image_alone(planes: int, is_grid: bool) -> None:
    ids = torch.tensor([[1, *[PICTURE] * 8, 5]])
    names, special, grid = name_tokens(ids, 10, "decoder", loaded(), Patches(planes, 2, 4))
    assert special == [0]
    assert (grid == {"first": 1, "rows": 2, "columns": 4}) == is_grid
    assert names[8] == ("patch 1,3" if is_grid else "t9")


def test_tokens_between_the_rows_of_an_image_are_no_patches() -> None:
    """As a break behind each row: its name would be that of a patch, and the last patches would have none."""
    row = [PICTURE] * 4
    names, _, grid = name_tokens(torch.tensor([[1, *row, 7, *row, 5]]), 11, "decoder", loaded(), Patches(1, 2, 4))
    assert grid is None
    assert names == ["t1", *["t9"] * 4, "t7", *["t9"] * 4, "t5"]


@pytest.mark.parametrize("extra, is_grid", [(0, True), (2, True), (8, True), (9, False), (-1, False)])
def test_tokens_of_an_encoder_are_patches_behind_a_few_others(extra: int, is_grid: bool) -> None:
    names, special, grid = name_tokens(None, 8 + extra, "encoder", loaded(), Patches(1, 2, 4))
    assert (grid == {"first": extra, "rows": 2, "columns": 4}) == is_grid
    if is_grid:
        assert special == list(range(extra))
        assert names[:extra] == ["[CLS]", *(f"[extra {index}]" for index in range(1, extra))][:extra]
        assert names[extra:] == [f"patch {row},{column}" for row in range(2) for column in range(4)]
    else:
        assert names == [f"#{index}" for index in range(8 + extra)]
