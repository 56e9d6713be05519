"""The metrics of the tasks, by name: each takes labels, predictions and the names of the classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from torch import Tensor

from regard.errors import UserError, check_choice
from regard.training.probes import IGNORE_INDEX

Metric = Callable[[Tensor, Tensor, Sequence[str]], float]


def score(metric: str, labels: Tensor, predictions: Tensor, label_names: Sequence[str] = ()) -> float:
    """The metric of that name. `predictions` are as `predict` gives them; what is labelled −100 does not count."""
    check_metric(metric)
    assert labels.shape == predictions.shape, f"{tuple(labels.shape)} labels, {tuple(predictions.shape)} predictions"
    if not bool((labels != IGNORE_INDEX).any()):
        raise UserError(f"{metric}: expected at least one label, got none")
    return METRICS[metric](labels, predictions, label_names)


def check_metric(metric: str) -> None:
    """Nothing, or a UserError: the metric is not known, or the package that it is taken from is not there."""
    check_choice("metric", metric, METRICS)
    if metric in PACKAGES:
        _package(PACKAGES[metric], metric)


def accuracy(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """The share of labels that are predicted, 0 to 1."""
    counted = labels != IGNORE_INDEX
    return float((labels == predictions)[counted].double().mean())


def token_f1(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """The F1 over tokens with all classes counted together, 0 to 1, for tagging such as part of speech.

    Every token has one label and one prediction, so that each wrong one is a false positive of one class and a false
    negative of another: precision, recall, F1 and accuracy are the same number.
    """
    return accuracy(labels, predictions, label_names)


def mcc(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """Matthews' correlation of labels and predictions, −1 to 1; 0 where all predictions are the same class."""
    counted = labels != IGNORE_INDEX
    if len(labels[counted].unique()) < 2:
        raise UserError("mcc: expected labels of at least two classes, got one")
    coefficient = _package(PACKAGES["mcc"], "mcc").matthews_corrcoef
    return float(coefficient(labels[counted].numpy(), predictions[counted].numpy()))


def f1(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """The F1 of class 1 against class 0, 0 to 1."""
    counted = labels != IGNORE_INDEX
    truth, told = labels[counted], predictions[counted]
    if int(truth.max()) > 1 or not bool((truth == 1).any()):
        raise UserError(f"f1: expected labels 0 and 1 with at least one 1, got {sorted(set(truth.tolist()))}")
    return float(_package(PACKAGES["f1"], "f1").f1_score(truth.numpy(), told.numpy(), zero_division=0.0))


def entity_f1(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """The F1 over entities, 0 to 1: one counts as found where its type and both its ends are right (CoNLL-2003).

    `labels` and `predictions`: (sample, position), numbers of `label_names`, which are O, B-type and I-type. An entity
    begins at B, or at I behind O or behind another type.
    """
    wrong = [name for name in label_names if name != "O" and name[:2] not in ("B-", "I-")]
    if wrong or not label_names:
        raise UserError(f"entity_f1: expected labels O, B-type and I-type, got {', '.join(wrong) or 'none'}")
    known = labels != IGNORE_INDEX
    tags = [
        [
            [label_names[number] for number in numbers[counted].tolist()]
            for numbers, counted in zip(rows, known, strict=True)
        ]
        for rows in (labels, predictions)
    ]
    if not any(name != "O" for row in tags[0] for name in row):
        raise UserError("entity_f1: expected at least one entity among the labels, got none")
    types = sorted({name[2:] for name in label_names if name != "O"})
    evaluator = _package(PACKAGES["entity_f1"], "entity_f1").Evaluator(*tags, tags=types, loader="list")
    return float(evaluator.evaluate()["overall"]["strict"].f1)


def negative_log_perplexity(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """The mean log-likelihood of the labels, in nats: at most 0. `predictions` are log-likelihoods of the labels."""
    assert predictions.is_floating_point(), "of an MLM probe the likelihoods are scored"
    return float(predictions[labels != IGNORE_INDEX].double().mean())


METRICS: Mapping[str, Metric] = {
    "mcc": mcc,
    "accuracy": accuracy,
    "f1": f1,
    "entity_f1": entity_f1,
    "token_f1": token_f1,
    "negative_log_perplexity": negative_log_perplexity,
}


PACKAGES = {"mcc": "sklearn.metrics", "f1": "sklearn.metrics", "entity_f1": "nervaluate"}
"""What metrics are taken from where they are not our own."""


def _package(name: str, metric: str) -> ModuleType:
    """The package that a metric is taken from."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(name.split(".")[0], name)
        python = " (Python 3.11 or newer)" if package == "nervaluate" else ""
        raise UserError(f"{metric} needs the package {package}{python}: pip install 'regard[tasks]'") from error
