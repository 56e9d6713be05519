"""Grades of answers: by hand, and beside the package that the publishers use."""

from __future__ import annotations

import random
import re
import string
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from regard.continual import answer_metrics
from regard.continual.answer_metrics import (
    exact_match_score,
    exact_match_unicode_score,
    longest_common_subsequence,
    normalize_answer,
    rouge_l_score,
    rouge_l_unicode_score,
    score_answer,
    split_stems,
    split_words,
)
from regard.data.stream import Metric, Stream, TextPairs, TextTask
from regard.errors import UserError

pytestmark = pytest.mark.every_value


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("Yes.", "yes", 1.0),
        ("  New   York! ", "new york", 1.0),
        ("don't", "dont", 1.0),
        ("two-fold", "two fold", 0.0),
        ("", "no", 0.0),
        ("yes no", "yes", 0.0),
        ("Größe", "größe", 1.0),
    ],
)
def test_exact_match(answer: str, reference: str, expected: float) -> None:
    assert exact_match_score(answer, reference) == expected
    assert exact_match_score(reference, answer) == expected


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("正确。", "正确", 1.0),
        ("正 确", "正确", 1.0),  # as tokenizers of characters write it
        ("不正确。", "正确", 0.0),
        ("¡Sí!", "sí", 1.0),
        ("«да»…", "Да", 1.0),
        ("„Größe“", "GRÖSSE", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("سؤال؟", "سؤال", 1.0),
        ("सही।", "सही", 1.0),
        ("ＹＥＳ！", "yes", 1.0),
        ("don’t", "don't", 1.0),
        ("yes\u200b", "yes", 1.0),
        ("-5", "5", 0.0),
        ("\u22125", "-5", 1.0),
        ("1.5", "15", 0.0),
        ("1/2", "12", 0.0),
        ("1,000", "1000", 0.0),
        ("10:30", "1030", 0.0),
        ("5.", "5", 1.0),
        ("(5)", "5", 1.0),
        ("5 %", "5%", 1.0),
        ("5%", "5", 0.0),
        ("covid-19", "covid19", 1.0),
        ("C++", "C", 0.0),
        ("C#", "C", 0.0),
        ("#1", "1", 0.0),
        ("**yes**", "yes", 1.0),
        ("€5", "5", 0.0),
        ("😀", "😢", 0.0),
        ("+", "-", 0.0),
        ("?", "!", 0.0),
        ("?", "?", 1.0),
        ("", "?", 0.0),
    ],
)
def test_exact_match_of_any_script(answer: str, reference: str, expected: float) -> None:
    assert exact_match_unicode_score(answer, reference) == expected
    assert score_answer("exact-match-unicode", reference, [answer]) == expected


_PLAIN = st.text(st.sampled_from([*"abcXYZ \n", *set(string.punctuation) - set("$+<=>^`|~%#&@")]))


@given(_PLAIN, _PLAIN)
def test_exact_match_of_any_script_is_that_of_ascii_words(answer: str, reference: str) -> None:
    """Without digits, symbols and texts of punctuation alone."""
    assume(normalize_answer(answer) and normalize_answer(reference))
    assert exact_match_unicode_score(answer, reference) == exact_match_score(answer, reference)


@pytest.mark.parametrize("labels, metric", [(("1", "-1"), "exact-match"), (("yes", "yes!"), "exact-match-unicode")])
def test_labels_that_a_metric_takes_for_one_are_told(labels: tuple[str, str], metric: Metric) -> None:
    pairs = TextPairs(inputs=("a", "b"), targets=((labels[0],), (labels[1],)))
    task = TextTask(name="sign", train=pairs, dev=pairs, test=pairs, metric=metric, labels=labels)
    alike = re.escape(f"metric: labels of 'sign': {labels[0]!r} and {labels[1]!r} are the same answer by {metric}")
    with pytest.warns(UserWarning, match=alike + "; --metric accuracy tells them apart"):
        answer_metrics.warn_of_labels_alike(Stream(name="s", tasks=(task,), order=(0,), seed=0))
    answer_metrics.warn_of_labels_alike(Stream(name="s", tasks=(replace(task, metric="accuracy"),), order=(0,), seed=0))
    numbers = replace(task, metric="exact-match-unicode", labels=("1", "-1", "1.5", "15", "+", "-"))
    answer_metrics.warn_of_labels_alike(Stream(name="s", tasks=(numbers,), order=(0,), seed=0))


def test_what_is_compared() -> None:
    assert normalize_answer("The  «Cat», sat!\n") == "the «cat» sat"
    assert split_stems("Running dogs' run, 3 cats—ponies") == ["run", "dog", "run", "3", "cat", "poni"]
    assert split_stems("кошка") == []


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("the cat", "the cat sat on the mat", 2 * 1 * (2 / 6) / (1 + 2 / 6)),
        ("police killed the gunman", "the gunman police killed", 0.5),
        ("jumping", "jumps", 1.0),
        ("a", "b", 0.0),
        ("", "b", 0.0),
        ("кошка", "кошка", 0.0),
        ("THE CAT!", "the cat", 1.0),
    ],
)
def test_rouge_l_by_hand(answer: str, reference: str, expected: float) -> None:
    assert rouge_l_score(answer, reference) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("Кошка спит", "кошка не спит", 0.8),
        ("Größe", "GRÖSSE", 1.0),
        ("我喜欢猫", "我喜欢狗", 0.75),  # each character is a word
        ("ねこ が すき", "ねこがすき", 1.0),
        ("हिन्दी भाषा", "हिन्दी", 2 / 3),  # marks belong to their word
        ("안녕 세상", "안녕 하세요", 0.5),
        ("cafe\u0301 noir", "caf\u00e9 noir", 1.0),
        ("…", "—", 0.0),
    ],
)
def test_rouge_l_of_any_script_by_hand(answer: str, reference: str, expected: float) -> None:
    assert rouge_l_unicode_score(answer, reference) == pytest.approx(expected, rel=1e-12)
    assert score_answer("rouge-l-unicode", answer, [reference]) == pytest.approx(expected, rel=1e-12)


@given(st.text(st.characters(max_codepoint=127)), st.text(st.characters(max_codepoint=127)))
def test_rouge_l_of_any_script_is_rouge_l_of_ascii(answer: str, reference: str) -> None:
    assert split_words(answer) == split_stems(answer)
    assert rouge_l_unicode_score(answer, reference) == rouge_l_score(answer, reference)


def test_the_best_reference_counts() -> None:
    assert score_answer("exact-match", "B", ("a", "b")) == 1.0
    assert score_answer("rouge-l", "one two", ("three", "one", "one two four")) == pytest.approx(0.8)


def plain(one: Sequence[str], other: Sequence[str]) -> int:
    """The longest common subsequence by its recurrence."""
    rows = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            rows[i + 1][j + 1] = rows[i][j] + 1 if a == b else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@given(st.lists(st.sampled_from("abcd"), max_size=90), st.lists(st.sampled_from("abcd"), max_size=90))
def test_the_longest_common_subsequence(one: list[str], other: list[str]) -> None:
    assert longest_common_subsequence(one, other) == plain(one, other) == longest_common_subsequence(other, one)


def test_parity_with_the_publishers_package() -> None:
    drawn, scorer = random.Random(0), RougeScorer(["rougeL"], use_stemmer=True)
    said = [
        "The",
        "running",
        "runners",
        "ran;",
        "dogs'",
        "ponies,",
        "generously",
        "relational",
        "(ties)",
        "12",
        "skies",
        "dying",
        "news",
        "é_x",
        "Größe",
        "it's",
    ]
    for _ in range(300):
        answer, reference = (" ".join(drawn.choices(said, k=drawn.randint(0, 12))) for _ in range(2))
        expected = scorer.score(reference, answer)["rougeL"].fmeasure
        assert rouge_l_score(answer, reference) == pytest.approx(expected, abs=1e-12), (answer, reference)


def test_the_stemmer_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk.stem.porter", None)
    answer_metrics._stemmer.cache_clear()
    answer_metrics._stem.cache_clear()
    with pytest.raises(UserError, match=r"rouge-l needs the package nltk: pip install 'regard\[learn\]'"):
        rouge_l_score("a word", "a word")
    assert score_answer("exact-match", "a word", ("a word",)) == 1.0
    monkeypatch.undo()
    assert rouge_l_score("a word", "a word") == 1.0
