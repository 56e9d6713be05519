"""How much of some texts is a copy: of one another, and of the texts that their generator was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from regard.continual.pseudo.parsing import plain_text

MIN_SIMILARITY = 0.8
"""The Jaccard similarity of two texts that are nearly the same."""
SHINGLE = 3
_Numbers = NDArray[np.int64]


def duplicate_fraction(texts: Sequence[str]) -> float:
    """Return the share of texts that another before them is the same as, but for white space."""
    return 1 - len({plain_text(text) for text in texts}) / len(texts)


def near_duplicate_fraction(texts: Sequence[str]) -> float:
    """Return the share of texts that another before them is nearly the same as, or the same.

    Two are where the runs of three words that are in both are at least 80 % of those in one of them (Broder 1997).
    """
    sets = [shingles(shingle_set) for shingle_set in texts]
    return sum(
        any(len(shingle_set & other) >= MIN_SIMILARITY * len(shingle_set | other) for other in sets[:index])
        for index, shingle_set in enumerate(sets)
    ) / len(texts)


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the runs of three words in a text; of a shorter one the whole."""
    words = text.split()
    last = max(1, len(words) - SHINGLE + 1)
    return frozenset(tuple(words[start : start + SHINGLE]) for start in range(last))


def copied_fraction(texts: Sequence[str], train_texts: Sequence[str]) -> float:
    """Return the share of texts that are texts trained on, but for white space."""
    training_texts = {plain_text(text) for text in train_texts}
    return sum(plain_text(text) in training_texts for text in texts) / len(texts)


class CopiedRuns:
    """Runs of words of some texts that are in texts trained on.

    All words lie in one row, as numbers, with a number of its own between two texts. A run of n words is known by those
    of its first and its last 2^k, which is exact and takes as long for any n.
    """

    def __init__(self, texts: Sequence[str], train_texts: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        words: list[int] = []
        words_left: list[int] = []
        border = 0
        for index, text in enumerate((*train_texts, *texts)):
            border = len(words) if index == len(train_texts) else border
            word_ids = [numbers.setdefault(word, len(numbers)) for word in text.split()]
            words += [*word_ids, -1 - index]
            words_left += [*range(len(word_ids), 0, -1), 0]
        self._border = border if texts else len(words)
        self._words_left = np.array(words_left, dtype=np.int64)
        self._ranks = [_rank_values(np.array(words, dtype=np.int64))]

    def copied_fraction(self, words: int) -> float | None:
        """Return the share of the texts' runs of so many words that are in a text trained on.

        None where there is no run.
        """
        runs, known = self._runs(words)
        return float(np.isin(runs, known).mean()) if len(runs) else None

    def longest_run(self) -> int:
        """Return the most words of a run that is in a text trained on."""
        low, high = 0, int(self._words_left.max(initial=0))
        while low < high:
            middle = (low + high + 1) // 2
            runs, known = self._runs(middle)
            low, high = (middle, high) if bool(np.isin(runs, known).any()) else (low, middle - 1)
        return low

    def _runs(self, words: int) -> tuple[_Numbers, _Numbers]:
        """Return the runs of so many words of the texts, and of those trained on, as numbers."""
        level = words.bit_length() - 1
        while len(self._ranks) <= level:
            last, step = self._ranks[-1], 2 ** (len(self._ranks) - 1)
            self._ranks.append(_rank_values(_pair_codes(last[:-step], last[step:])))
        ranks, behind = self._ranks[level], words - 2**level
        count = len(ranks) - behind
        if count <= 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        codes = _pair_codes(ranks[:count], ranks[behind : behind + count])
        is_complete = self._words_left[:count] >= words
        is_pseudo = np.arange(count) >= self._border
        return codes[is_complete & is_pseudo], codes[is_complete & ~is_pseudo]


def _rank_values(values: _Numbers) -> _Numbers:
    """Return each value as its place among those that there are."""
    ranks: _Numbers = np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return ranks


def _pair_codes(first: _Numbers, second: _Numbers) -> _Numbers:
    """Return two ranks as one number."""
    return first * (max(int(first.max(initial=0)), int(second.max(initial=0))) + 1) + second
