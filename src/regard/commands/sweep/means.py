"""A sweep's combinations: their means over seeds, and their differences to the first combination."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn.tables import SCENARIOS
from regard.report import labels
from regard.report.arrays import Floats
from regard.report.labels import format_value
from regard.report.panels import DOMAIN, domains, numeric_column
from regard.runs.intervals import SeedDifference, seed_difference

_SCORES = {"average_performance": "%", "forgetting": "", "forgetting_rate": "", "learning_accuracy": "%", "area": "%"}
METRICS = {
    "valid_loss": ("Validation loss", ""),
    "sink_rate": ("Sink₀", "%"),
    "virtual_sink_rate": ("Virtual sink rate", "%"),
    "alpha_first": ("Mean α₀", ""),
    "norm_ratio": ("|h₀| / mean |hₜ|", ""),
    "tokens_per_second": ("Tokens per second", ""),
    **{
        f"{name}_{setting}": (f"{learn_metrics.get_metric(name).title} {words}", unit)
        for setting, words in SCENARIOS.items()
        for name, unit in _SCORES.items()
    },
}
"""Metrics of a combination: the column, its title, its unit."""

TIMED = ("tokens_per_second",)
"""Metrics of the machine: seeds are no sample of them, so no difference is reported."""


@dataclass(frozen=True)
class Combination:
    """One choice of the varied fields: its name, its finished trials, and how many were planned."""

    name: str
    rows: pd.DataFrame
    num_planned: int


@dataclass(frozen=True)
class Mean:
    """A mean over `n` seeds with its standard error, NaN for one seed."""

    n: int
    value: float
    error: float


@dataclass(frozen=True)
class Comparison:
    """What a report compares: finished trials, the record in `sweep.json`, combinations in the order of the plan.

    `metrics` has title and unit of each metric that a trial has, by column. `unfinished` has name of the combination,
    seed, and record of each trial without a result.
    """

    trials: pd.DataFrame
    record: Mapping[str, Any]
    combinations: Sequence[Combination]
    metrics: Mapping[str, tuple[str, str]]
    unfinished: Sequence[tuple[str, str, Mapping[str, Any]]]

    @classmethod
    def of(cls, trials: pd.DataFrame, record: Mapping[str, Any]) -> Comparison:
        """Compare the trials of a sweep with this record."""
        planned = record.get("trials", [])
        names = _name_trials(planned)
        combinations = [
            Combination(name, trials[trials["key"].map(names) == name], count)
            for name, count in Counter(names.values()).items()
        ]
        keys = set(trials["key"])
        unfinished = [(names[t["key"]], f"seed {t['seed']}", t) for t in planned if t["key"] not in keys]
        return cls(trials, record, combinations, _find_metrics(trials), unfinished)

    def differences(self, metric: str) -> list[tuple[str, SeedDifference]]:
        """Return the differences to the first combination, by name, of the combinations that have one."""
        first, *others = self.combinations
        by_name = [(item.name, difference(first.rows, item.rows, metric)) for item in others if metric not in TIMED]
        return [(name, value) for name, value in by_name if value is not None]


def _name_trials(planned: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the name of each trial's combination by key; one that another combination has gets a number behind it."""
    by_key, by_values, taken = dict[str, str](), dict[str, str](), Counter[str]()
    for trial in planned:
        values = json.dumps(trial["values"], default=str)
        if values not in by_values:
            name = name_combination(trial["values"])
            taken[name] += 1
            by_values[values] = name if taken[name] == 1 else f"{name} ({taken[name]})"
        by_key[trial["key"]] = by_values[values]
    return by_key


def name_combination(values: Mapping[str, Any]) -> str:
    """Name a combination, as in "sigmoid, weight decay 0.1"; a value that is a word needs no field."""
    names = []
    for field, value in values.items():
        text = "none" if value is None else format_value(value)
        is_word = isinstance(value, str) and value.lower() not in ("none", "")
        names.append(text if is_word else f"{field.replace('_', ' ')} {text}")
    return ", ".join(names) or "the recipe"


def _find_metrics(trials: pd.DataFrame) -> dict[str, tuple[str, str]]:
    by_domain = {f"{DOMAIN}{name}": (f"Validation loss, {name}", "") for name in domains(trials)}
    metrics = {"valid_loss": METRICS["valid_loss"], **by_domain, **METRICS}
    return {key: title for key, title in metrics.items() if np.isfinite(numeric_column(trials, key)).any()}


def mean(rows: pd.DataFrame, metric: str) -> Mean:
    """Average the trials that have the metric, with the standard error s/√n."""
    values = numeric_column(rows, metric)
    return average(values[np.isfinite(values)])


def average(values: Floats) -> Mean:
    """Average values, with the standard error."""
    n = len(values)
    if n == 0:
        return Mean(0, math.nan, math.nan)
    error = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Mean(n, float(values.mean()), error)


def difference(first: pd.DataFrame, rows: pd.DataFrame, metric: str) -> SeedDifference | None:
    """Return how much more of the metric `rows` have than `first`, None where one of them has none.

    Of seeds in common the differences are paired, else the interval is Welch's: see `seed_difference`.
    """
    values, first_values = (_by_seed(table, metric) for table in (rows, first))
    return seed_difference(values, first_values) if values and first_values else None


def _by_seed(rows: pd.DataFrame, metric: str) -> dict[Any, float]:
    values = numeric_column(rows, metric)
    seeds = rows["seed"].tolist() if len(rows) else []
    return {seed: float(value) for seed, value in zip(seeds, values, strict=True) if math.isfinite(value)}


def format_metric(rows: pd.DataFrame, metric: str, unit: str) -> str:
    """Format the mean of a metric over the trials of a combination, with how many have it where not all do."""
    return format_mean(mean(rows, metric), unit, of=len(rows))


def format_mean(value: Mean, unit: str = "", *, of: int = 0) -> str:
    """Format a mean ± standard error, to the error's second digit or five digits; to three digits without an error.

    `of`: how many trials there are; where fewer have the value, the text says how many.
    """
    is_sure = value.error > labels.ROUNDING * abs(value.value)
    text = labels.with_margin(value.value, value.error if is_sure else math.nan, unit if value.n else "", digits=3)
    return f"{text} (n = {value.n})" if 0 < value.n < of else text
