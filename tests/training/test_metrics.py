"""The metrics against plain implementations of their definitions."""

import importlib.util
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from regard import UserError
from regard.training import METRICS, score

needs_nervaluate = pytest.mark.skipif(
    importlib.util.find_spec("nervaluate") is None, reason="nervaluate needs Python 3.11"
)
NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "I-MISC", "B-MISC")


def drawn(seed: int, classes: int, samples: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels, told = torch.randint(0, classes, (2, samples), generator=generator)
    return labels, torch.where(torch.rand(samples, generator=generator) < 0.5, labels, told)


def counts(labels: Tensor, told: Tensor) -> tuple[int, int, int, int]:
    """True positives, true negatives, false positives, false negatives of class 1."""
    pairs = list(zip(labels.tolist(), told.tolist(), strict=True))
    return tuple(pairs.count(pair) for pair in ((1, 1), (0, 0), (0, 1), (1, 0)))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(5))
def test_mcc_and_f1_are_their_formulas(seed: int) -> None:
    labels, told = drawn(seed, 2)
    tp, tn, fp, fn = counts(labels, told)
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert score("mcc", labels, told) == pytest.approx(expected)
    assert score("f1", labels, told) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert score("accuracy", labels, told) == pytest.approx((tp + tn) / 60)


def test_mcc_at_its_ends() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1])
    assert score("mcc", labels, labels) == pytest.approx(1)
    assert score("mcc", labels, 1 - labels) == pytest.approx(-1)
    assert score("mcc", labels, torch.ones_like(labels)) == 0


def test_f1_counts_class_one() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    assert score("f1", labels, torch.zeros_like(labels)) == 0
    assert score("f1", labels, torch.ones_like(labels)) == pytest.approx(2 / 5)


@pytest.mark.parametrize("seed", range(3))
def test_token_f1_counts_all_classes_together(seed: int) -> None:
    labels, told = drawn(seed, 5)
    labels[::4] = -100
    known = labels != -100
    tp = fp = fn = 0
    for tag in range(5):
        truth, said = (labels == tag)[known], (told == tag)[known]
        tp, fp, fn = tp + int((truth & said).sum()), fp + int((~truth & said).sum()), fn + int((truth & ~said).sum())
    assert score("token_f1", labels, told) == pytest.approx(2 * tp / (2 * tp + fp + fn))


def chunks(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The entities by conlleval's rule, from where one tag and the next differ."""
    found, began = set(), None
    for place, (tag, after) in enumerate(zip(tags, [*tags, "O"][1:], strict=True)):
        before = tags[place - 1] if place else "O"
        if tag != "O" and (tag[0] == "B" or before == "O" or before[2:] != tag[2:]):
            began = place
        if tag != "O" and (after == "O" or after[0] == "B" or after[2:] != tag[2:]):
            assert began is not None
            found.add((began, place, tag[2:]))
    return found


def entity_f1_by_sets(labels: Tensor, told: Tensor) -> float:
    correct = given = said = 0
    for truth, guess in zip(labels.tolist(), told.tolist(), strict=True):
        kept = [(NAMES[a], NAMES[b]) for a, b in zip(truth, guess, strict=True) if a != -100]
        real, guessed = chunks([a for a, _ in kept]), chunks([b for _, b in kept])
        correct, given, said = correct + len(real & guessed), given + len(real), said + len(guessed)
    return 2 * correct / (given + said)


@needs_nervaluate
@pytest.mark.parametrize("seed", range(20))
def test_entity_f1_is_that_of_conlleval(seed: int) -> None:
    """Over tags drawn without any grammar: entities that begin with I, change type inside, and stand side by side."""
    draw = random.Random(seed)
    labels = torch.tensor([[draw.choice((0, 0, *range(7))) for _ in range(12)] for _ in range(10)])
    told = torch.where(torch.tensor([[draw.random() < 0.7 for _ in range(12)] for _ in range(10)]), labels, 0)
    told[:, ::5] = torch.tensor([[draw.randrange(7) for _ in range(3)] for _ in range(10)])
    labels[:, 6] = -100
    labels[3] = -100
    expected = entity_f1_by_sets(labels, torch.where(labels == -100, 1, told))
    assert 0.05 < expected < 0.95
    assert score("entity_f1", labels, told, NAMES) == pytest.approx(expected)


@needs_nervaluate
@pytest.mark.parametrize(
    "guess, expected",
    [
        ("B-PER I-PER O B-LOC", 1.0),
        ("I-PER I-PER O I-LOC", 1.0),
        ("B-PER B-PER O B-LOC", 0.4),
        ("B-PER O O B-LOC", 0.5),
        ("B-PER I-PER I-PER B-LOC", 0.5),
        ("B-LOC I-LOC O B-LOC", 0.5),
        ("O O O O", 0.0),
    ],
)
def test_an_entity_counts_with_its_type_and_both_ends(guess: str, expected: float) -> None:
    labels, told = (
        torch.tensor([[NAMES.index(tag) for tag in tags.split()]]) for tags in ("B-PER I-PER O B-LOC", guess)
    )
    assert score("entity_f1", labels, told, NAMES) == pytest.approx(expected)


def test_perplexity_is_over_labelled_tokens_in_nats() -> None:
    labels = torch.tensor([[3, -100, 1], [-100, -100, 2]])
    likelihoods = torch.tensor([[0.5, 1.0, 0.25], [1.0, 1.0, 0.125]]).log()
    expected = (math.log(0.5) + math.log(0.25) + math.log(0.125)) / 3
    assert score("negative_log_perplexity", labels, likelihoods) == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
def test_nothing_to_score_is_refused(metric: str) -> None:
    labels = torch.full((2, 3), -100)
    with pytest.raises(UserError, match=f"{metric}: expected at least one label"):
        score(metric, labels, torch.zeros(2, 3), NAMES)


@pytest.mark.parametrize(
    "metric, labels, message",
    [
        ("bleu", [0, 1], "metric: expected one of mcc, .* got 'bleu'"),
        ("f1", [0, 0], "f1: expected labels 0 and 1 with at least one 1"),
        ("f1", [1, 2], "f1: expected labels 0 and 1"),
        ("mcc", [1, 1], "mcc: expected labels of at least two classes"),
    ],
)
def test_labels_that_the_metric_does_not_define_are_refused(metric: str, labels: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(metric, torch.tensor(labels), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "labels, names, message",
    [
        ([[0, 0]], NAMES, "expected at least one entity among the labels"),
        pytest.param([[0, 1]], ("O", "NOUN"), "expected labels O, B-type and I-type, got NOUN", marks=needs_nervaluate),
        pytest.param([[0, 1]], (), "expected labels O, B-type and I-type, got none", marks=needs_nervaluate),
    ],
)
def test_labels_without_entities_are_refused(labels: list[list[int]], names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        score("entity_f1", torch.tensor(labels), torch.tensor(labels), names)


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    monkeypatch.setitem(sys.modules, "nervaluate", None)
    with pytest.raises(UserError, match=r"mcc needs the package scikit-learn: pip install 'regard\[tasks\]'"):
        score("mcc", torch.tensor([0, 1]), torch.tensor([0, 1]))
    with pytest.raises(UserError, match=r"entity_f1 needs the package nervaluate .*regard\[tasks\]"):
        score("entity_f1", torch.tensor([[1, 2]]), torch.tensor([[1, 2]]), NAMES)


def test_predictions_of_another_shape_are_refused() -> None:
    with pytest.raises(UserError, match=r"accuracy: expected predictions of shape \(2,\), got \(3,\)"):
        score("accuracy", torch.tensor([0, 1]), torch.tensor([0, 1, 1]))
