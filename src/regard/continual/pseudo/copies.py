"""How much of some texts is a copy: of one another, and of the texts that their generator was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from regard.continual.pseudo.parsing import plain_text

MIN_SIMILARITY = 0.8
"""The Jaccard similarity of two texts that are nearly the same."""
SHINGLE = 3


def duplicate_fraction(texts: Sequence[str]) -> float:
    """Return the share of texts that another before them is the same as, but for white space."""
    return 1 - len({plain_text(text) for text in texts}) / len(texts)


def near_duplicate_fraction(texts: Sequence[str]) -> float:
    """Return the share of texts that another before them is nearly the same as, or the same.

    Two are where the runs of three words that are in both are at least 80 % of those in one of them (Broder 1997).
    """
    sets = [shingles(text) for text in texts]
    return sum(
        any(len(shingle_set & other) >= MIN_SIMILARITY * len(shingle_set | other) for other in sets[:index])
        for index, shingle_set in enumerate(sets)
    ) / len(texts)


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the runs of three words in a text; of a shorter one the whole."""
    words = text.split()
    return frozenset(iterate_runs([words], min(SHINGLE, len(words))))


def copied_fraction(texts: Sequence[str], train_texts: Sequence[str]) -> float:
    """Return the share of texts that are texts trained on, but for white space."""
    training_texts = {plain_text(text) for text in train_texts}
    return sum(plain_text(text) in training_texts for text in texts) / len(texts)


class CopiedRuns:
    """Runs of words of some texts that are in texts trained on."""

    def __init__(self, texts: Sequence[str], train_texts: Sequence[str]) -> None:
        self._words = [text.split() for text in texts]
        self._train_words = [text.split() for text in train_texts]

    def copied_fraction(self, words: int) -> float | None:
        """Return the share of the texts' runs of so many words that are in a text trained on; None without a run."""
        runs = list(iterate_runs(self._words, words))
        copied = set(runs).intersection(iterate_runs(self._train_words, words))
        return sum(run in copied for run in runs) / len(runs) if runs else None

    def longest_run(self) -> int:
        """Return the most words of a run that is in a text trained on."""
        low, high = 0, max(map(len, self._words), default=0)
        while low < high:
            middle = (low + high + 1) // 2
            runs = set(iterate_runs(self._words, middle))
            if runs.isdisjoint(iterate_runs(self._train_words, middle)):
                high = middle - 1
            else:
                low = middle
        return low


def iterate_runs(texts: Iterable[Sequence[str]], words: int) -> Iterator[tuple[str, ...]]:
    """Iterate over the runs of so many words in texts that are split into words."""
    for text in texts:
        for start in range(len(text) - words + 1):
            yield tuple(text[start : start + words])
