"""How good written answers are: Rouge-L and exact match, 0 to 1, as the collections' publishers compute them."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from regard.data.stream import Metric
from regard.errors import UserError

_NO_WORD = re.compile("[^a-z0-9]+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SHORTEST_STEMMED = 4


def score_answer(metric: Metric, answer: str, references: Sequence[str]) -> float:
    """Return an answer's grade by a metric: the best that it has beside any of the references."""
    score = rouge_l_score if metric == "rouge-l" else exact_match_score
    return max(score(answer, reference) for reference in references)


def exact_match_score(answer: str, reference: str) -> float:
    """Return 1 if the answer is the reference but for capitals, punctuation and how it is spaced, else 0."""
    return float(normalize_answer(answer) == normalize_answer(reference))


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII's punctuation, with single spaces between its words."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def rouge_l_score(answer: str, reference: str) -> float:
    """Return the Rouge-L F-measure of two texts, 0 if one has no words (Lin 2004, with β = 1).

    Words are runs of a–z and 0–9 in lower case, so texts in other scripts have none. Words of four letters and more are
    stemmed as by nltk (Porter 1980); raises UserError if that is not installed.
    """
    answer_stems, reference_stems = split_stems(answer), split_stems(reference)
    common = longest_common_subsequence(answer_stems, reference_stems)
    return 2 * common / (len(answer_stems) + len(reference_stems)) if common else 0.0


def split_stems(text: str) -> list[str]:
    """Return the stemmed words that Rouge compares."""
    return [_stem(word) for word in _NO_WORD.sub(" ", text.lower()).split()]


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by bits (Allison and Dix 1986)."""
    places: dict[str, int] = {}
    for position, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << position
    row = 0
    for word in other:
        matches = row | places.get(word, 0)
        row = matches & ~(matches - (row << 1 | 1))
    return row.bit_count()


@lru_cache(maxsize=65536)
def _stem(word: str) -> str:
    return word if len(word) < _SHORTEST_STEMMED else str(_stemmer().stem(word))


@cache
def _stemmer() -> Any:
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError as error:
        raise UserError("rouge-l needs the package nltk: pip install 'regard[learn]'") from error
    return PorterStemmer()
