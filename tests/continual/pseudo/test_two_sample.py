"""The two-sample test against scikit-learn, against a count of throws, and on sets that are known."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from regard.continual.pseudo.quality import (
    binomial_tail,
    fit_logistic_regression,
    hash_features,
    run_two_sample_test,
)

WORDS = ["sun", "ice", "rain", "wind", "snow", "fog", "hail", "storm", "cloud", "frost", "dew", "mist"]


def drawn(seed: int, words: list[str], many: int = 60) -> list[str]:
    made = random.Random(seed)
    return [" ".join(made.choices(words, k=8)) + f" {seed}x{row}" for row in range(many)]


def test_the_regression_is_that_of_scikit_learn() -> None:
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 6, generator=made, dtype=torch.float64)
    labels = (rows[:, 0] + torch.randn(40, generator=made, dtype=torch.float64) > 0.3).double()
    weights, offset = fit_logistic_regression(rows, labels, strength=3.0)
    reference = LogisticRegression(C=3.0, tol=1e-10, max_iter=5000).fit(rows.numpy(), labels.numpy())
    assert np.allclose(weights.numpy(), reference.coef_[0], atol=1e-5)
    assert float(offset) == pytest.approx(float(reference.intercept_[0]), abs=1e-5)


@pytest.mark.parametrize("right", range(7))
def test_the_probability_is_that_of_all_throws(right: int) -> None:
    throws = list(itertools.product((0, 1), repeat=6))
    assert binomial_tail(right, 6) == pytest.approx(sum(sum(one) >= right for one in throws) / len(throws))


def test_features_are_words_and_pairs_in_logarithms() -> None:
    found = hash_features(["sun sun ice", "ice sun sun", ""])
    values = sorted(found[0][found[0] > 0].tolist())
    raw = [1.0, 1.0, 1.0, 1 + np.log(2)]  # ice, "sun sun", "sun ice", and sun twice
    assert np.allclose(values, np.array(raw) / np.linalg.norm(raw))
    assert not torch.equal(found[0], found[1])
    assert bool((found[2] == 0).all())


def test_sets_that_are_the_same_cannot_be_told_apart() -> None:
    texts = drawn(1, WORDS)
    for seed in range(3):
        found = run_two_sample_test(texts, list(reversed(texts)), seed)
        assert found is not None
        assert found.accuracy == 0.5
        assert found.p_value > 0.5


@pytest.mark.exhaustive
def test_sets_of_the_same_sort_are_told_apart_no_better_than_chance() -> None:
    found = [run_two_sample_test(drawn(1, WORDS), drawn(2, WORDS), seed) for seed in range(5)]
    assert all(one is not None and one.rows == 60 for one in found)
    assert sum(one.accuracy for one in found if one is not None) / 5 == pytest.approx(0.5, abs=0.15)
    assert max(one.p_value for one in found if one is not None) > 0.1


def test_sets_without_a_common_word_are_told_apart() -> None:
    found = run_two_sample_test(drawn(1, WORDS[:6]), drawn(2, WORDS[6:]), 0)
    assert found is not None
    assert found.accuracy == 1
    assert found.p_value == pytest.approx(2.0**-60, abs=0)


@pytest.mark.exhaustive
def test_spaces_tell_nothing_and_seeds_everything() -> None:
    one, other = drawn(1, WORDS), drawn(2, WORDS)
    assert run_two_sample_test(one, other, 3) == run_two_sample_test(
        [text.replace(" ", "\n") for text in one], other, 3
    )
    assert len({run_two_sample_test(one, other, seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("real, pseudo", [([], ["a"] * 9), (["a", "b", "c"], ["d"] * 9), (["a"] * 9, ["a"] * 9)])
def test_too_few_texts_are_no_test(real: list[str], pseudo: list[str]) -> None:
    assert run_two_sample_test(real, pseudo, 0) is None
