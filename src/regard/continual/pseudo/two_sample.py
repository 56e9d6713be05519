"""A classifier two-sample test: whether texts of two sorts can be told apart (Lopez-Paz and Oquab, 1610.06545)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.continual.pseudo.parsing import plain_text

COLUMNS = 4096
"""Features that words and pairs of words are hashed to."""
STRENGTH = 10.0
"""The inverse of the penalty, as of scikit-learn's `LogisticRegression(C=…)`."""
MAX_TEXTS = 1000
"""Texts of each sort that are looked at, at most."""
_WORDS = re.compile(r"\w+|[^\w\s]")


class TwoSample(NamedTuple):
    """The share of `rows` held-out texts that a classifier puts right, and the p of so many or more by chance."""

    accuracy: float
    p_value: float
    rows: int


def run_two_sample_test(real: Sequence[str], pseudo: Sequence[str], seed: int) -> TwoSample | None:
    """Return whether a logistic regression on hashed words and pairs of words tells texts apart; spaces do not matter.

    As many of each sort are drawn, and half of them are held out; texts that are the same are on the same side, so that
    two sets that are alike have an accuracy of one half and not less. None for less than four texts of a sort.
    """
    random = torch.Generator().manual_seed(seed)
    count = min(len(real), len(pseudo), MAX_TEXTS)
    if count < 4:
        return None
    sorts = [[plain_text(sample) for sample in _sample_texts(texts, count, random)] for texts in (real, pseudo)]
    train_texts = _select_training_texts(sorts, random)
    rows = [(text, sort) for sort, texts in enumerate(sorts) for text in texts]
    is_train = torch.tensor([text in train_texts for text, _ in rows])
    labels = torch.tensor([float(sort) for _, sort in rows], dtype=torch.float64)
    if not bool(is_train.any()) or bool(is_train.all()) or len(set(labels[is_train].tolist())) < 2:
        return None
    inputs = hash_features([text for text, _ in rows])
    weights, offset = fit_logistic_regression(inputs[is_train], labels[is_train])
    num_correct = int(((inputs[~is_train] @ weights + offset > 0) == (labels[~is_train] > 0)).sum())
    held_out = int((~is_train).sum())
    return TwoSample(num_correct / held_out, binomial_tail(num_correct, held_out), held_out)


def hash_features(texts: Sequence[str]) -> Tensor:
    """Return (text, column): 1 + log of how often a text has the words and pairs hashed to a column, normalized."""
    counts = torch.zeros(len(texts), COLUMNS, dtype=torch.float64)
    for row, text in enumerate(texts):
        words = _WORDS.findall(text)
        for token in [*words, *(f"{first} {second}" for first, second in pairwise(words))]:
            counts[row, zlib.crc32(token.encode()) % COLUMNS] += 1
    counts = torch.where(counts > 0, 1 + counts.clamp_min(1).log(), 0.0)
    return counts / counts.norm(dim=1, keepdim=True).clamp_min(1e-12)


def fit_logistic_regression(rows: Tensor, labels: Tensor, strength: float = STRENGTH) -> tuple[Tensor, Tensor]:
    """Return weights (column,) and offset with the smallest ½‖w‖² + strength · Σ of the rows' logistic losses."""
    weights = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, offset], max_iter=500, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss_sum = nn.functional.binary_cross_entropy_with_logits(rows @ weights + offset, labels, reduction="sum")
        value = weights.square().sum() / 2 + strength * loss_sum
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weights.detach(), offset.detach()


def binomial_tail(right: int, of: int) -> float:
    """Return the probability of so many or more of `of` throws of a fair coin."""
    return sum(math.comb(of, successes) for successes in range(right, of + 1)) / 2**of


def _sample_texts(texts: Sequence[str], count: int, random: torch.Generator) -> list[str]:
    return [texts[number] for number in torch.randperm(len(texts), generator=random)[:count].tolist()]


def _select_training_texts(sorts: Sequence[Sequence[str]], random: torch.Generator) -> set[str]:
    """Return half of the texts that are of the first sort alone, of the second, and of both."""
    first, second = (dict.fromkeys(texts) for texts in sorts)
    first_only, both = [text for text in first if text not in second], [text for text in first if text in second]
    groups = (first_only, [text for text in second if text not in first], both)
    return {text for group in groups for text in _sample_texts(group, (len(group) + 1) // 2, random)}
