"""A sweep's combinations: their means over seeds, and their differences to the first combination."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn.tables import SETTINGS
from regard.errors import UserError
from regard.report import labels
from regard.report.arrays import Floats
from regard.report.panels import DOMAIN, domains, numeric_column
from regard.report.words import format_value
from regard.runs.intervals import t_half_width, welch_half_width

METRICS = {
    "valid_loss": ("Validation loss", ""),
    "sink_rate": ("Sink₁", "%"),
    "virtual_sink_rate": ("Virtual sink rate", "%"),
    "alpha_first": ("Mean α₁", ""),
    "norm_ratio": ("|h₁| / mean |hₜ|", ""),
    "tokens_per_second": ("Tokens per second", ""),
    **{
        f"{name}_{setting}": (f"{learn_metrics.metric(name).title} {words}", unit)
        for setting, words in SETTINGS.items()
        for name, unit in (
            ("average_performance", "%"),
            ("forgetting", ""),
            ("forgetting_rate", ""),
            ("learning_accuracy", "%"),
            ("area", "%"),
        )
    },
}
"""What is told of each combination: the column, its title, its unit."""

TIMED = ("tokens_per_second",)
"""Metrics of the machine: seeds are no sample of them, so no difference is told."""


@dataclass(frozen=True)
class Combination:
    """One choice of the varied fields: its name, its finished trials, and how many were planned."""

    name: str
    rows: pd.DataFrame
    planned: int


@dataclass(frozen=True)
class Mean:
    """A mean over `n` seeds with its standard error, NaN for one seed."""

    n: int
    value: float
    error: float


@dataclass(frozen=True)
class Difference:
    """A difference to the first combination with its 95 % interval, NaN where the seeds give none."""

    value: float
    low: float
    high: float
    paired: bool

    @property
    def sure(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low)

    @property
    def overlaps(self) -> bool:
        """Whether the interval holds 0."""
        return self.low <= 0 <= self.high


def check_trials(trials: pd.DataFrame, record: Mapping[str, Any]) -> None:
    """Nothing, or a UserError: there is no trial at all, a column is missing, or a trial is told twice."""
    if trials.empty:
        if not record.get("trials"):
            raise UserError("trials: expected at least one trial, the table is empty")
        return
    missing = [name for name in ("key", "seed") if name not in trials]
    if missing:
        raise UserError(f"trials: expected the columns key, seed, …; missing: {', '.join(missing)}")
    twice = trials.loc[trials["key"].duplicated(), "key"]
    if len(twice):
        raise UserError(f"trials: expected one row for each trial, several are of {twice.iloc[0]}")


def combinations(trials: pd.DataFrame, record: Mapping[str, Any]) -> list[Combination]:
    """The combinations in the order that they were planned in, those without a finished trial as well."""
    planned = [one for one in record.get("trials") or [] if isinstance(one, Mapping)]
    names = {str(one.get("key")): name_of(labels.section(one, "values")) for one in planned}
    fields = [field for field in labels.section(record, "vary") if field in trials]
    every = [] if trials.empty else [_own_name(row, names, fields) for row in trials.to_dict("records")]
    own = pd.Series(every, index=trials.index, dtype="object")
    found = []
    for name in dict.fromkeys([*names.values(), *every]):
        rows = trials[own == name]
        found.append(Combination(name, rows, max(len(rows), sum(other == name for other in names.values()))))
    return found


def _own_name(row: Mapping[Any, Any], names: Mapping[str, str], fields: Sequence[str]) -> str:
    key = str(row["key"])
    return names[key] if key in names else name_of({field: row[field] for field in fields}) if fields else key


def name_of(values: Mapping[str, Any]) -> str:
    """The combination in words, as in "sigmoid, weight decay 0.1"; a value that is a word needs no field."""
    return ", ".join(_said(field, value) for field, value in values.items()) or "the recipe"


def _said(field: str, value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        value = None
    words = "none" if value is None else format_value(value)
    alone = isinstance(value, str) and value.lower() not in ("none", "")
    return words if alone else f"{field.replace('_', ' ')} {words}"


def unfinished(trials: pd.DataFrame, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The planned trials that the table has no row of."""
    there = set() if trials.empty else {str(key) for key in trials["key"]}
    planned = [one for one in record.get("trials") or [] if isinstance(one, Mapping)]
    return [one for one in planned if str(one.get("key")) not in there]


def metrics(trials: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """The metrics that at least one trial has: their titles and units by column."""
    names = domains(trials)
    own = {f"{DOMAIN}{name}": (f"Validation loss, {name}", "") for name in (names if len(names) > 1 else [])}
    first = {"valid_loss": METRICS["valid_loss"]}
    return {
        key: told for key, told in {**first, **own, **METRICS}.items() if np.isfinite(numeric_column(trials, key)).any()
    }


def mean(rows: pd.DataFrame, metric: str) -> Mean:
    """The mean of the trials that have the metric, with its standard error s/√n."""
    values = numeric_column(rows, metric)
    return of_values(values[np.isfinite(values)])


def of_values(values: Floats) -> Mean:
    """The mean of the values and its standard error."""
    n = len(values)
    if n == 0:
        return Mean(0, math.nan, math.nan)
    error = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Mean(n, float(values.mean()), error)


def difference(first: pd.DataFrame, rows: pd.DataFrame, metric: str) -> Difference | None:
    """How much more of the metric `rows` have than `first`, None where one of them has none.

    With two seeds or more in common the differences are taken seed by seed (Student's t); else the interval is Welch's,
    its degrees of freedom rounded down, for which both need two seeds.
    """
    ours, theirs = (_by_seed(table, metric) for table in (rows, first))
    if not ours or not theirs:
        return None
    common = sorted(set(ours) & set(theirs))
    if len(common) > 1:
        pairs = of_values(np.array([ours[seed] - theirs[seed] for seed in common]))
        half = t_half_width(pairs.n, pairs.error * math.sqrt(pairs.n))
        return Difference(pairs.value, pairs.value - half, pairs.value + half, paired=True)
    a, b = (of_values(np.array(list(values.values()))) for values in (ours, theirs))
    half = welch_half_width(a.n, a.error, b.n, b.error)
    return Difference(a.value - b.value, a.value - b.value - half, a.value - b.value + half, paired=False)


def _by_seed(rows: pd.DataFrame, metric: str) -> dict[Any, float]:
    values = numeric_column(rows, metric)
    seeds = rows["seed"].tolist() if len(rows) else []
    return {seed: float(value) for seed, value in zip(seeds, values, strict=True) if math.isfinite(value)}


def shown(value: Mean, unit: str = "") -> str:
    """The mean and its standard error, to the error's second digit or five digits; to three where there is no error."""
    text = labels.number(value.value, 3)
    if value.error > _ROUNDING * abs(value.value):
        places = min(decimals(value.error), max(0, 4 - _power(value.value)))
        text = f"{value.value:,.{places}f} ± {value.error:,.{places}f}"
    return f"{text} %" if unit == "%" and value.n else text


_ROUNDING = 1e-9
"""Relative errors below this are those of floating-point sums."""


def decimals(error: float) -> int:
    """How many decimals show two digits of an error; at most 6."""
    return min(6, max(0, 1 - _power(error)))


def _power(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0
