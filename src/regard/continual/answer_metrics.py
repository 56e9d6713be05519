"""How answers are graded, by the name of a metric: how like an answer is to its references, from 0 to 1."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from regard.data.stream import Metric, Stream, TextTask
from regard.errors import UserError, warn_user

_NO_WORD = re.compile("[^a-z0-9]+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MINUS = "\u2212"  # the sign that is printed for it
_SHORTEST_STEMMED = 4
_WITHOUT_SPACES = ("CJK ", "HIRAGANA ", "KATAKANA ", "THAI CHARACTER", "LAO LETTER", "KHMER LETTER", "MYANMAR LETTER")
"""How Unicode's names of letters begin in scripts that have no spaces between words."""


def score_answer(metric: Metric, answer: str, references: Sequence[str], source: str = "") -> float:
    """Return an answer's grade, 0 to 1: the best beside any reference; SARI's beside all, and the source."""
    if metric == "sari":
        return sari_score(source, answer, references)
    return max(_SCORES[metric](answer, reference) for reference in references)


def accuracy_score(answer: str, reference: str) -> float:
    """Return 1 if the answer is the reference, character for character, but for spaces around it."""
    return float(answer.strip() == reference.strip())


def choice_score(answer: str, reference: str) -> float:
    """Return 1 if two texts have the same letter behind "Answer: ", or without that at their beginning (ScienceQA)."""
    letters = [text.partition("Answer:")[2].strip()[:1] or text.strip()[:1] for text in (answer, reference)]
    return float(letters[0] == letters[1] != "")


def edit_similarity_score(answer: str, reference: str) -> float:
    """Return twice the longest common subsequence over the characters of both, in whole per cent; 0 for no text.

    Literals of code such as <NUM_LIT:1> become their values first (Py150).
    """
    one, other = (_LITERAL.sub(_write_literal, text) for text in (answer, reference))
    if not one or not other:
        return 0.0
    return round(200 * longest_common_subsequence(one, other) / (len(one) + len(other))) / 100


_LITERAL = re.compile("<(STR|NUM|CHAR)_LIT(?::(.*?))?>", re.DOTALL)


def _write_literal(match: re.Match[str]) -> str:
    return match[2] if match[2] is not None else "0" if match[1] == "NUM" else ""


def sari_score(source: str, answer: str, references: Sequence[str]) -> float:
    """Return SARI (Xu et al. 2016), 0 to 1: the mean F1 of words kept and added, and precision of words deleted.

    Means over n-grams of one to four tokens, which are words or signs in lower case. A share of nothing is 1.
    """
    texts = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in (source, answer, *references)]
    return (
        sum(_sari_of_ngrams(*([_count_ngrams(words, n) for words in texts]), n=len(references)) for n in range(1, 5))
        / 4
    )


def _sari_of_ngrams(source: Counter[Any], answer: Counter[Any], *references: Counter[Any], n: int) -> float:
    """Return the mean of the three parts of SARI for n-grams of one length, with `n` references."""
    wanted: Counter[Any] = sum(references, Counter())
    before, after = (Counter({gram: n * count for gram, count in grams.items()}) for grams in (source, answer))
    kept, kept_well, to_keep = before & after, before & after & wanted, before & wanted
    keep_precision = sum(count / kept[gram] for gram, count in kept_well.items()) / len(kept) if kept else 1.0
    keep_recall = kept_well.total() / to_keep.total() if to_keep else 1.0
    deleted = before - after
    deleted_well = deleted - wanted
    deletion = sum(count / deleted[gram] for gram, count in deleted_well.items()) / len(deleted) if deleted else 1.0
    added, to_add = answer.keys() - source.keys(), wanted.keys() - source.keys()
    added_well = len(added & wanted.keys())
    addition = _f1(added_well / len(added) if added else 1.0, added_well / len(to_add) if to_add else 1.0)
    return (_f1(keep_precision, keep_recall) + deletion + addition) / 3


def _count_ngrams(words: Sequence[str], n: int) -> Counter[Any]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def exact_match_score(answer: str, reference: str) -> float:
    """Return 1 if the answer is the reference but for capitals, punctuation and how it is spaced, else 0."""
    return float(normalize_answer(answer) == normalize_answer(reference))


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII's punctuation, with single spaces between its words."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def exact_match_unicode_score(answer: str, reference: str) -> float:
    """Return 1 if the answer is the reference but for case, spaces and the punctuation of any script, else 0."""
    return float(normalize_unicode_answer(answer) == normalize_unicode_answer(reference))


def normalize_unicode_answer(text: str) -> str:
    """Return the text without case and punctuation of any script, with single spaces between its words.

    What belongs to a number stays (-5, 1.5, 5%), and so do symbols (+, €, #, &, @). Characters are words where a script
    has no spaces between words. A text of punctuation alone stays as it is.
    """
    folded = _fold(text).replace(_MINUS, "-")
    padded = f" {folded} "
    signs = (_write_sign(*padded[at : at + 3]) for at in range(len(folded)))
    return " ".join("".join(signs).split() or folded.split())


def _write_sign(before: str, sign: str, after: str) -> str:
    """Return a character between two others as answers are compared by it, nothing for punctuation."""
    category = unicodedata.category(sign)
    if (category[0] != "P" and category != "Cf") or sign in "#&@":
        return _space_out(sign) if category[0] in "LMN" else sign
    if sign in "%‰":
        return f" {sign} "
    is_inside, begins = before.isdigit() and sign in "-.,:/", not before.isalnum() and sign in "-."
    return sign if after.isdigit() and (is_inside or begins) else ""


def rouge_l_score(answer: str, reference: str) -> float:
    """Return the Rouge-L F-measure of two texts, 0 if one has no words (Lin 2004, with β = 1).

    Words are runs of a–z and 0–9 in lower case; those of four letters and more are stemmed as by nltk (Porter 1980).
    """
    return _rouge_l(split_stems(answer), split_stems(reference))


def _rouge_l(answer: Sequence[str], reference: Sequence[str]) -> float:
    common = longest_common_subsequence(answer, reference)
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def rouge_l_unicode_score(answer: str, reference: str) -> float:
    """Return the Rouge-L F-measure over words of any script; of ASCII texts it is `rouge_l_score`.

    Words are runs of letters, digits and their marks; where a script has no spaces between words, characters.
    """
    return _rouge_l(split_words(answer), split_words(reference))


def split_words(text: str) -> list[str]:
    """Return the words of a text in any script, without case; those of a–z and 0–9 are stemmed."""
    return [_stem(word) if word.isascii() else word for word in "".join(map(_space_out, _fold(text))).split()]


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


@lru_cache(maxsize=65536)
def _space_out(character: str) -> str:
    """Return a character of words as it is, one that is a word by itself between spaces, and a space for any other."""
    if unicodedata.category(character)[0] not in "LMN":
        return " "
    return f" {character} " if unicodedata.name(character, "").startswith(_WITHOUT_SPACES) else character


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


_SCORES: Mapping[Metric, Callable[[str, str], float]] = {
    "rouge-l": rouge_l_score,
    "rouge-l-unicode": rouge_l_unicode_score,
    "exact-match": exact_match_score,
    "exact-match-unicode": exact_match_unicode_score,
    "accuracy": accuracy_score,
    "choice": choice_score,
    "edit-similarity": edit_similarity_score,
}
NORMALIZERS: Mapping[str, Callable[[str], str]] = {
    "exact-match": normalize_answer,
    "exact-match-unicode": normalize_unicode_answer,
}
"""What two answers have in common that a metric of exact matches takes for the same."""
RIGHT_OR_WRONG = (*NORMALIZERS, "accuracy", "choice")
"""The metrics of answers that give 0 or 1."""


def warn_of_labels_alike(stream: Stream) -> None:
    """Warn of labels that are written as answers and that their task's metric takes for the same."""
    for task in stream.tasks:
        if not (isinstance(task, TextTask) and task.metric in NORMALIZERS):
            continue
        by_form: dict[str, str] = {}
        for label in task.labels:
            other = by_form.setdefault(NORMALIZERS[task.metric](label), label)
            if other != label:
                problem = f"{other!r} and {label!r} are the same answer by {task.metric}"
                warn_user(f"metric: labels of {task.name!r}: {problem}; --metric accuracy tells them apart")
                break
