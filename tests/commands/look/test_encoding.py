"""What fits a page, counted by hand: two layers of two heads, or of one, over 64 tokens."""

from collections.abc import Sequence

import pytest

from regard.commands.look.encoding import FIXED, Detail, Shape, choose_detail
from regard.errors import UserError

NUMBERS = 102
ROWS = 64 * 8 * 3
"""Bytes of the rows of a head: eight keys of 64 queries, each with an index and a weight."""
QUIET = {("decoder", 0): [1, 0], ("decoder", 1): [0, 1]}


def choose(room: int, *, heads: int = 2, asked: Sequence[str] = (), texts: int = 0) -> Detail:
    """Choose for a page with so many bytes of room beside its numbers, texts and all else, before Base64."""
    shapes = [Shape("decoder", layer, heads, 64, 64) for layer in range(2)]
    quiet = {key: [head for head in order if head < heads] for key, order in QUIET.items()}
    megabytes = (FIXED + texts + (room + 2 * NUMBERS + 0.1) * 4 / 3) / 1e6
    return choose_detail(shapes, NUMBERS, texts, megabytes, asked, quiet)


WHOLE = 2 * (2 * 2 * 64) + 2 * 2 * 64 * 64
"""α of each key in two bytes, and each weight in one."""
FEW = 2 * 2 * 64 + 2 * 2 * 24 * 24
"""α and tiles in one byte each."""


def test_all_weights_are_kept_where_they_fit() -> None:
    assert choose(WHOLE).whole
    assert choose(WHOLE, texts=5000).whole
    assert not choose(WHOLE - 1).whole


def test_rows_are_of_the_heads_that_were_asked_for_and_of_quiet_ones_as_far_as_they_fit() -> None:
    """The layer in the middle comes first, which of two is the second."""
    assert choose(FEW + 2 * ROWS - 1).heads == {("decoder", 1): [0]}
    assert choose(FEW + 2 * ROWS).heads == {("decoder", 1): [0], ("decoder", 0): [1]}
    assert choose(FEW + 2 * ROWS, asked=["1.0"]).heads == {("decoder", 1): [0], ("decoder", 0): [1]}
    assert choose(FEW + 2 * ROWS, asked=["1.1", "0.0"]).heads == {("decoder", 1): [1], ("decoder", 0): [0]}
    with pytest.raises(UserError, match=r"megabytes: the page would weigh 0\.2 MB a look"):
        choose(FEW + 2 * ROWS - 1, asked=["1.1", "0.0"])


def test_layers_of_one_head_have_no_second() -> None:
    few = 2 * 64 + 2 * 24 * 24
    assert choose(few + 2 * ROWS, heads=1).heads == {("decoder", 1): [0], ("decoder", 0): [0]}


@pytest.mark.parametrize("head", ["0.2", "2.0"])
def test_a_head_that_is_not_there_is_refused(head: str) -> None:
    with pytest.raises(UserError, match=f"layers 0 to 1 and heads 0 to 1; it has no {head}"):
        choose(FEW, asked=[head])
