"""Metrics of continual learning in a report: titles, order, means with intervals, differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from regard.errors import UserError

REFERENCES = {"joint": "all tasks at once", "separate": "a model for each task"}
"""Methods that do not learn task after task: upper bounds, not competitors."""


@dataclass(frozen=True)
class Metric:
    """A metric's title and description, and whether higher is better."""

    title: str
    description: str
    higher_is_better: bool = True


_ZERO_SHOT = (
    "mean score of all tasks but the first, each just before its training, minus chance (100 divided by the number of "
    "its classes, or 0 for generated answers)"
)
METRICS = {
    "average_performance": Metric("AP", "mean score of all tasks at the end"),
    "forgetting": Metric("FGT", "mean loss of old tasks since they were trained", higher_is_better=False),
    "forgetting_rate": Metric("F.Ra", "mean loss of old tasks since their best score", higher_is_better=False),
    "bwt": Metric("BWT", "mean gain of old tasks since they were trained"),
    "fwt": Metric("FWT", "mean score of tasks right after training, minus that of a model for each task"),
    "learning_accuracy": Metric("Learning accuracy", "mean score of tasks right after training"),
    "intransigence": Metric(
        "Intransigence", "score of joint training minus that of tasks right after training", higher_is_better=False
    ),
    "zero_shot_transfer": Metric("Zero-shot", _ZERO_SHOT),
    "area": Metric("Area", "mean over the stream of the mean score of tasks trained so far"),
}
"""Metrics by their names in the tables, in the report's order."""


def get_metric(name: str) -> Metric:
    """Return a metric; an unknown one is titled by its name."""
    return METRICS[name] if name in METRICS else Metric(name.replace("_", " "), "")


def order_metrics(names: Iterable[str]) -> list[str]:
    """Sort metric names into the report's order, unknown ones last."""
    available = [str(name) for name in names]
    return [name for name in METRICS if name in available] + list(
        dict.fromkeys(n for n in available if n not in METRICS)
    )


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` runs with its 95 % interval, NaN where there is none."""

    n: int
    mean: float
    ci_low: float
    ci_high: float

    @property
    def has_interval(self) -> bool:
        """Whether the interval is finite."""
        return math.isfinite(self.ci_low) and math.isfinite(self.ci_high)

    def overlaps(self, other: Estimate) -> bool:
        """Return whether the two intervals overlap."""
        return self.ci_low <= other.ci_high and other.ci_low <= self.ci_high


@dataclass(frozen=True)
class Difference:
    """Difference of a metric between two methods, with interval and p-value; NaN if there are none."""

    method: str
    against: str
    n: int
    value: float
    ci_low: float
    ci_high: float
    p: float
    overlaps: bool

    def reverse(self) -> Difference:
        """Return the difference of the other method against this one."""
        return Difference(
            self.against, self.method, self.n, -self.value, -self.ci_high, -self.ci_low, self.p, self.overlaps
        )

    @property
    def has_interval(self) -> bool:
        """Whether the interval is finite."""
        return math.isfinite(self.ci_low) and math.isfinite(self.ci_high)


def make_estimates(summary: pd.DataFrame, scenario: str) -> dict[str, dict[str, Estimate]]:
    """Return the means by metric and method."""
    by_metric: dict[str, dict[str, Estimate]] = {}
    for row in summary[summary["scenario"] == scenario].to_dict("records"):
        estimate = Estimate(int(row["n"]), *(_float(row[key]) for key in ("mean", "ci_low", "ci_high")))
        if math.isfinite(estimate.mean):
            by_metric.setdefault(str(row["metric"]), {})[str(row["method"])] = estimate
    return {name: by_metric[name] for name in order_metrics(by_metric)}


def make_differences(table: pd.DataFrame, scenario: str) -> dict[str, list[Difference]]:
    """Return the differences by metric, in the table's order."""
    if table.empty:
        return {}
    by_metric: dict[str, list[Difference]] = {}
    p_column = find_p_column(table)
    for row in table[table["scenario"] == scenario].to_dict("records"):
        value, ci_low, ci_high, p = (_float(row[key]) for key in ("difference", "ci_low", "ci_high", p_column))
        overlaps = bool(pd.notna(row["overlaps"]) and row["overlaps"])
        difference = Difference(
            str(row["method"]), str(row["against"]), int(row["n"]), value, ci_low, ci_high, p, overlaps
        )
        by_metric.setdefault(str(row["metric"]), []).append(difference)
    return {name: by_metric[name] for name in order_metrics(by_metric)}


P_COLUMNS = {"t_test_holm": "p, t-test, Holm", "t_test": "p, t-test", "p": "p"}
"""Columns that may hold the p-value, by priority, and their titles."""


def find_p_column(table: pd.DataFrame) -> str:
    """Return the column that holds the p-value, by `P_COLUMNS`. Raises UserError."""
    for name in P_COLUMNS:
        if name in table:
            return name
    columns = ", ".join(map(str, table.columns))
    raise UserError(f"differences: expected a column {' or '.join(P_COLUMNS)}, got {columns}")


def _float(value: object) -> float:
    return float(value) if pd.notna(value) else math.nan  # type: ignore[arg-type]


def final_estimates(summary: pd.DataFrame, scenario: str, name: str = "average_performance") -> dict[str, Estimate]:
    """Return the means of a metric by method; empty if there are none."""
    return make_estimates(summary, scenario).get(name, {})


def rank_methods(methods: Sequence[str], scores: Mapping[str, Estimate]) -> list[str]:
    """Rank methods by a metric, highest first; those without it last."""
    return sorted(methods, key=lambda name: -scores[name].mean if name in scores else math.inf)


def find_ties(methods: Sequence[str], scores: Mapping[str, Estimate]) -> list[str]:
    """Find the methods whose printed mean equals that of the first one."""
    formatted = format_fixed(scores[methods[0]].mean)
    return [name for name in scores if name in methods and format_fixed(scores[name].mean) == formatted]


def format_fixed(value: float, places: int = 2) -> str:
    """Format a number with fixed decimals; "–" if not finite."""
    if not math.isfinite(value):
        return "–"
    text = f"{abs(value):,.{places}f}"
    return f"−{text}" if value < 0 and text.strip("0.,") else text


def format_estimate(estimate: Estimate | None) -> str:
    """Format a mean and margin, as in "90.92 ± 0.41"; both ends if the interval is asymmetric."""
    if estimate is None:
        return "–"
    if not estimate.has_interval:
        return format_fixed(estimate.mean)
    upper, lower = estimate.ci_high - estimate.mean, estimate.mean - estimate.ci_low
    if abs(upper - lower) > 1e-6 * max(1.0, abs(upper)):
        return f"{format_fixed(estimate.mean)} ({format_interval(estimate.ci_low, estimate.ci_high)})"
    return f"{format_fixed(estimate.mean)} ± {format_fixed(upper)}"


def format_interval(low: float, high: float) -> str:
    """Format an interval, as in "90.51 to 91.33"."""
    return f"{format_fixed(low)} to {format_fixed(high)}"
