"""Metrics of tasks by name. All take labels, predictions and class names."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from torch import Tensor

from regard.errors import UserError, check_choice
from regard.training.probes import IGNORE_INDEX

Metric = Callable[[Tensor, Tensor, Sequence[str]], float]


def score(metric: str, labels: Tensor, predictions: Tensor, label_names: Sequence[str] = ()) -> float:
    """Return a metric by name; entries with the label −100 do not count, and `predictions` are those of `predict`."""
    check_metric(metric)
    if labels.shape != predictions.shape:
        raise UserError(
            f"{metric}: expected predictions of shape {tuple(labels.shape)}, got {tuple(predictions.shape)}"
        )
    if not bool((labels != IGNORE_INDEX).any()):
        raise UserError(f"{metric}: expected at least one label, got none")
    return METRICS[metric](labels, predictions, label_names)


def check_metric(metric: str) -> None:
    """Check that a metric exists and its package is installed."""
    check_choice("metric", metric, METRICS)
    if metric in PACKAGES:
        _import_package(metric)


def accuracy(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """Return the accuracy, 0 to 1."""
    return float((labels == predictions)[labels != IGNORE_INDEX].double().mean())


def mcc(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """Return Matthews' correlation coefficient, −1 to 1; 0 if all predictions are one class."""
    mask = labels != IGNORE_INDEX
    if len(labels[mask].unique()) < 2:
        raise UserError("mcc: expected labels of at least two classes, got one")
    coefficient = _import_package("mcc").matthews_corrcoef
    return float(coefficient(labels[mask].numpy(), predictions[mask].numpy()))


def f1(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """Return the F1 of class 1, 0 to 1."""
    mask = labels != IGNORE_INDEX
    truth, predicted = labels[mask], predictions[mask]
    if int(truth.max()) > 1 or not bool((truth == 1).any()):
        raise UserError(f"f1: expected labels 0 and 1 with at least one 1, got {sorted(set(truth.tolist()))}")
    return float(_import_package("f1").f1_score(truth.numpy(), predicted.numpy(), zero_division=0.0))


def entity_f1(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """Return the F1 over entities, 0 to 1; type and both ends must be right (CoNLL-2003).

    Labels and predictions (sample, position) are indices of `label_names`: O, B-type and I-type. An entity begins at
    B, or at I after O or after another type.
    """
    invalid = [name for name in label_names if name != "O" and name[:2] not in ("B-", "I-")]
    if invalid or not label_names:
        raise UserError(f"entity_f1: expected labels O, B-type and I-type, got {', '.join(invalid) or 'none'}")
    mask = labels != IGNORE_INDEX

    def tag_names(rows: Tensor) -> list[list[str]]:
        return [[label_names[index] for index in row[valid].tolist()] for row, valid in zip(rows, mask, strict=True)]

    tags = tag_names(labels)
    if not any(name != "O" for row in tags for name in row):
        raise UserError("entity_f1: expected at least one entity among the labels, got none")
    types = sorted({name[2:] for name in label_names if name != "O"})
    evaluator = _import_package("entity_f1").Evaluator(tags, tag_names(predictions), tags=types, loader="list")
    return float(evaluator.evaluate()["overall"]["strict"].f1)


def negative_log_perplexity(labels: Tensor, predictions: Tensor, label_names: Sequence[str]) -> float:
    """Return the mean of `predictions`, log-likelihoods of the labels in nats."""
    assert predictions.is_floating_point(), "of an MLM probe the likelihoods are scored"
    return float(predictions[labels != IGNORE_INDEX].double().mean())


METRICS: Mapping[str, Metric] = {
    "mcc": mcc,
    "accuracy": accuracy,
    "f1": f1,
    "entity_f1": entity_f1,
    "token_f1": accuracy,  # the micro-averaged F1 over tokens, each of which has one label and one prediction
    "negative_log_perplexity": negative_log_perplexity,
}


PACKAGES = {"mcc": "sklearn.metrics", "f1": "sklearn.metrics", "entity_f1": "nervaluate"}
"""Packages of metrics that Regard does not compute itself."""


def _import_package(metric: str) -> ModuleType:
    name = PACKAGES[metric]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(name.split(".")[0], name)
        python = " (Python 3.11 or newer)" if package == "nervaluate" else ""
        raise UserError(f"{metric} needs the package {package}{python}: pip install 'regard[tasks]'") from error
