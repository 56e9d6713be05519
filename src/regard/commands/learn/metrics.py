"""Metrics of continual learning and their cost in a report: titles, order, means with intervals, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from regard.commands.learn.tables import SCENARIOS, method_names
from regard.continual.costs import AROUND
from regard.report import labels, page
from regard.report.labels import format_fixed
from regard.report.page import Table
from regard.report.panels import numeric_column

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
    available = list(dict.fromkeys(names))
    return sorted(available, key=lambda name: [*METRICS, *available].index(name))


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` runs, or a mean difference, with its 95 % interval; NaN where there is none."""

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
class Difference(Estimate):
    """Difference of a metric between two methods, and its p-value; `contains_zero` is of its interval."""

    method: str
    against: str
    p: float
    contains_zero: bool

    def reverse(self) -> Difference:
        """Return the difference of the other method against this one."""
        reversed_interval = replace(self, mean=-self.mean, ci_low=-self.ci_high, ci_high=-self.ci_low)
        return replace(reversed_interval, method=self.against, against=self.method)


def make_estimates(summary: pd.DataFrame, scenario: str) -> dict[str, dict[str, Estimate]]:
    """Return the means by metric and method."""
    by_metric: dict[str, dict[str, Estimate]] = {}
    for row in summary[(summary["scenario"] == scenario) & summary["mean"].notna()].to_dict("records"):
        by_metric.setdefault(row["metric"], {})[row["method"]] = Estimate(row["n"], *_interval(row, "mean"))
    return {name: by_metric[name] for name in order_metrics(by_metric)}


def make_differences(table: pd.DataFrame, scenario: str) -> dict[str, list[Difference]]:
    """Return the differences by metric, in the table's order."""
    by_metric: dict[str, list[Difference]] = {}
    for row in table[table["scenario"] == scenario].to_dict("records"):
        value, ci_low, ci_high, p = _interval(row, "difference", "t_test_holm")
        contains_zero = bool(pd.notna(row["overlaps"]) and row["overlaps"])
        difference = Difference(row["n"], value, ci_low, ci_high, row["method"], row["against"], p, contains_zero)
        by_metric.setdefault(row["metric"], []).append(difference)
    return {name: by_metric[name] for name in order_metrics(by_metric)}


def _interval(row: Mapping[Any, Any], name: str, *others: str) -> list[float]:
    """Return a value with its interval, and other numbers of a row; NaN for null."""
    return [float(row[key]) if pd.notna(row[key]) else math.nan for key in (name, "ci_low", "ci_high", *others)]


def rank_methods(methods: Sequence[str], scores: Mapping[str, Estimate]) -> list[str]:
    """Rank methods by a metric, highest first; those without it last."""
    return sorted(methods, key=lambda name: -scores[name].mean if name in scores else math.inf)


def find_ties(methods: Sequence[str], scores: Mapping[str, Estimate]) -> list[str]:
    """Find the methods whose printed mean equals that of the first one."""
    formatted = format_fixed(scores[methods[0]].mean)
    return [name for name in scores if name in methods and format_fixed(scores[name].mean) == formatted]


def format_estimate(estimate: Estimate | None) -> str:
    """Format a mean and margin, as in "90.92 ± 0.41"; both ends if the interval is asymmetric."""
    if estimate is None:
        return "–"
    if not estimate.has_interval:
        return format_fixed(estimate.mean)
    upper, lower = estimate.ci_high - estimate.mean, estimate.mean - estimate.ci_low
    if abs(upper - lower) > 1e-6 * max(1.0, abs(upper)):
        return f"{format_fixed(estimate.mean)} ({format_fixed(estimate.ci_low)} to {format_fixed(estimate.ci_high)})"
    return f"{format_fixed(estimate.mean)} ± {format_fixed(upper)}"


UNFOLDED_METRICS = ("average_performance", "forgetting")
"""Metrics whose differences are not folded on the page."""


def make_difference_tables(table: pd.DataFrame, matrix: pd.DataFrame) -> tuple[list[page.Tables], str]:
    """Make a table per scenario and metric, and their description; "" without differences."""
    baseline = find_baseline(table, method_names(matrix))
    unfolded: list[Table] = []
    folded: list[Table] = []
    plotted: list[Difference] = []
    for scenario, name in SCENARIOS.items():
        for metric, differences in make_differences(table, scenario).items():
            finite = [
                item for item in differences if item.against == baseline != item.method and math.isfinite(item.mean)
            ]
            if finite:
                caption = f"{get_metric(metric).title}, {name}"
                (unfolded if metric in UNFOLDED_METRICS else folded).append(_table(finite, caption))
                plotted += finite
    names = ", ".join(dict.fromkeys(table.caption.rsplit(", ", 1)[0] for table in folded))
    return [page.Tables(unfolded), page.Tables(folded, names)], _about(plotted, baseline)


SIGNIFICANCE = 0.05
"""The p of a difference whose 95 % interval ends at 0."""


def find_baseline(table: pd.DataFrame, methods: Sequence[str]) -> str:
    """Return the first method that the table has differences to."""
    return next((name for name in methods if name in set(table["against"])), "")


def _table(differences: Sequence[Difference], caption: str) -> Table:
    rows = []
    for item in differences:
        result = labels.verdict(item.mean, item.contains_zero if item.has_interval else None)
        if item.has_interval and not item.contains_zero and item.p >= SIGNIFICANCE:
            result += " before correction"
        interval = format_difference_interval(item) if item.has_interval else "–"
        rows.append((item.method, "", [labels.format_signed(item.mean, 2), interval, format_p_value(item.p), result]))
    head = ["Method", "Difference", "95 % interval", "p, t-test, Holm", ""]
    return Table(rows, head, f"{caption}: differences", caption)


def format_difference_interval(difference: Difference) -> str:
    """Format an interval with signs, as in "+0.51 to +1.33"."""
    return f"{labels.format_signed(difference.ci_low, 2)} to {labels.format_signed(difference.ci_high, 2)}"


def format_p_value(p: float) -> str:
    """Format a p-value to three decimals; "–" for NaN."""
    return "< 0.001" if p < 0.0005 else format_fixed(p, 3)


def _about(differences: Sequence[Difference], baseline: str) -> str:
    if not differences:
        return ""
    sentence = f"Difference from {baseline} in points, paired by run (same seed and order)."
    pair_counts = sorted({item.n for item in differences if item.has_interval})
    if not pair_counts:
        why = "Equal differences give" if any(item.n > 1 for item in differences) else "One run of each method gives"
        return f"{sentence} {why} no interval."
    num_pairs = f"{pair_counts[0]} to {pair_counts[-1]}" if len(pair_counts) > 1 else str(pair_counts[0])
    return (
        f"{sentence} 95 % intervals from {num_pairs} pairs; if an interval contains 0, these runs do not "
        "separate the two methods."
    )


_COSTS = {
    **dict.fromkeys(("seconds", *AROUND, "flops"), "sum"),
    **dict.fromkeys(("peak_memory_mib", "memory_bytes", "memory_examples"), "max"),
}
COST_ABOUT = (
    "Means over runs. Time and FLOPs are summed over tasks; memory, bytes and examples are the maximum over tasks. "
    "Peak memory on a GPU is that of the task, including what a method prepares and what is measured before its steps. "
    "On the CPU it is the peak of the process so far, so methods of one process inherit it; regard sweep learn starts "
    "a process for each. Time covers training and the method’s work before and after it, which is also shown alone. "
    "Scoring, diagnostics (with the gate) and saving are not in it. FLOPs and examples/s cover training steps, "
    "including gradient correction. "
    "Computation before an answer (mbpa++ adapts itself to each text) is in no column. Stored: what a method stores "
    "beside the model. Stored examples: rows stored unchanged; vectors, densities and texts made of rows count as "
    "Stored only."
)
"""Description of the table's columns."""

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def sum_costs(cost: pd.DataFrame) -> pd.DataFrame:
    """Sum costs over tasks and average them over runs, by method; `whole_seconds` adds the time around training."""
    keys = [cost[key] for key in ("method", "seed", "order") if key in cost]
    numbers = pd.DataFrame({name: numeric_column(cost, name) for name in _COSTS}, index=cost.index)
    numbers["examples"] = numeric_column(cost, "examples_per_second") * numbers["seconds"]
    runs = numbers.groupby(keys, sort=False)
    by_run = {
        name: runs[name].sum(min_count=1) if reduction == "sum" else runs[name].agg(reduction)
        for name, reduction in _COSTS.items()
    }
    by_run["examples_per_second"] = runs["examples"].sum(min_count=1) / by_run["seconds"]
    means = pd.DataFrame(by_run).groupby(level=0, sort=False).mean()
    return means.assign(whole_seconds=means["seconds"] + means["hook_seconds"].fillna(0.0))


def make_cost_table(costs: pd.DataFrame, methods: Sequence[str], scores: Mapping[str, Estimate], name: str) -> Table:
    """Make a row per method: its score `name`, then its cost."""
    rows = []
    for method in methods:
        cost = costs.loc[method]
        cells = [format_estimate(scores.get(method)), *(_time(cost[name]) for name in ("whole_seconds", *AROUND))]
        cells += [labels.number(cost["flops"] / 1e12, 3), labels.number(cost["peak_memory_mib"], 3)]
        cells.append(format_bytes(cost["memory_bytes"]))
        cells += [labels.number(cost[key], 3) for key in ("memory_examples", "examples_per_second")]
        rows.append((method, REFERENCES.get(method, ""), cells))
    head = ["Method", name, "Time a run", "Around training", "Scores", "Diagnostics", "Files", "TFLOPs a run"]
    head += ["Peak memory, MiB", "Stored", "Stored examples", "Examples/s"]
    return Table(rows, head, "Cost by method")


def _time(seconds: float) -> str:
    return "–" if pd.isna(seconds) else labels.format_duration(float(seconds))


def format_bytes(count: float) -> str:
    """Format bytes in a suitable unit, as in "1.5 MiB"; "–" for NaN."""
    if pd.isna(count):
        return "–"
    unit, name = next(((unit, name) for unit, name in _SIZES if count >= unit), (1, "B"))
    return f"{labels.number(float(count) / unit, 3)} {name}" if unit > 1 else f"{count:.0f} B"
