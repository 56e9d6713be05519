"""Copies and runs of words against plain counts."""

from __future__ import annotations

import random

import pytest

from regard.continual.pseudo.quality import (
    CopiedRuns,
    copied_fraction,
    duplicate_fraction,
    near_duplicate_fraction,
    shingles,
)


def runs(texts: list[str], words: int) -> list[tuple[str, ...]]:
    split = [text.split() for text in texts]
    return [tuple(one[at : at + words]) for one in split for at in range(len(one) - words + 1)]


def share_written_out(texts: list[str], trained: list[str], words: int) -> float | None:
    known, ours = set(runs(trained, words)), runs(texts, words)
    return sum(one in known for one in ours) / len(ours) if ours else None


def drawn(seed: int, many: int, longest: int = 20) -> list[str]:
    made = random.Random(seed)
    return [" ".join(made.choices("ab", k=made.randint(0, longest))) for _ in range(many)]


@pytest.mark.parametrize("seed", range(4))
def test_runs_are_those_that_a_plain_search_finds(seed: int) -> None:
    trained, texts = drawn(seed, 9), drawn(seed + 10, 6)
    copied = CopiedRuns(texts, trained)
    for words in range(1, 22):
        assert copied.copied_fraction(words) == pytest.approx(share_written_out(texts, trained, words))
    expected = max((words for words in range(1, 21) if share_written_out(texts, trained, words)), default=0)
    assert copied.longest_run() == expected
    assert expected > 5


def test_a_run_of_two_texts_is_none() -> None:
    assert CopiedRuns(["c d e f"], ["a b c d", "e f g"]).longest_run() == 2
    assert CopiedRuns(["a b", "c d"], ["a b c d"]).copied_fraction(3) is None


def test_nothing_and_everything() -> None:
    assert CopiedRuns(["x y z"], ["a b c"]).longest_run() == 0
    assert CopiedRuns(["x y z"], ["a b c"]).copied_fraction(1) == 0
    assert CopiedRuns(["a b  c d"], ["x", "a b c d"]).copied_fraction(4) == 1
    assert CopiedRuns(["a b c"], [""]).longest_run() == 0
    assert CopiedRuns(["a b c"], []).copied_fraction(2) == 0


def test_the_order_of_asking_does_not_matter() -> None:
    trained, texts = drawn(1, 5), drawn(2, 5)
    falling, rising = CopiedRuns(texts, trained), CopiedRuns(texts, trained)
    assert [falling.copied_fraction(n) for n in (9, 5, 2)] == [rising.copied_fraction(n) for n in (2, 5, 9)][::-1]


def test_duplicates_are_counted_once_each() -> None:
    assert duplicate_fraction(["a b", "a  b", "c", "a b"]) == 0.5
    assert duplicate_fraction(["a", "b"]) == 0
    assert copied_fraction(["a b", "c", "d"], ["a  b", "d "]) == pytest.approx(2 / 3)


def test_near_duplicates_share_most_runs_of_three_words() -> None:
    ten = "a b c d e f g h i j"
    assert shingles("a b") == {("a", "b")}
    assert len(shingles(ten)) == 8
    assert near_duplicate_fraction([ten, ten + " k"]) == 0.5  # 8 of 9 runs in both
    assert near_duplicate_fraction([ten, "x b c d e f g h i j"]) == 0  # 7 of 9
    assert near_duplicate_fraction([ten + " k", ten, ten]) == pytest.approx(2 / 3)
