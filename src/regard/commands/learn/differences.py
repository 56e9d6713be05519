"""Tables of the differences between methods."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn.metrics import Difference, format_fixed
from regard.commands.learn.tables import SCENARIOS, method_names
from regard.report import page
from regard.report.page import Table
from regard.report.words import format_signed, verdict

UNFOLDED_METRICS = ("average_performance", "forgetting")
"""Metrics whose differences are not folded on the page."""


def make_difference_tables(table: pd.DataFrame, matrix: pd.DataFrame) -> tuple[list[page.Tables], str]:
    """Make a table per scenario and metric, and their description; "" without differences."""
    baseline = find_baseline(table, method_names(matrix))
    unfolded: list[Table] = []
    folded: list[Table] = []
    plotted: list[Difference] = []
    for scenario, name in SCENARIOS.items():
        for metric, differences in learn_metrics.make_differences(table, scenario).items():
            finite = [
                item for item in differences if item.against == baseline != item.method and math.isfinite(item.mean)
            ]
            if finite:
                caption = f"{learn_metrics.get_metric(metric).title}, {name}"
                (unfolded if metric in UNFOLDED_METRICS else folded).append(_table(finite, caption))
                plotted += finite
    names = ", ".join(dict.fromkeys(table.caption.rsplit(", ", 1)[0] for table in folded))
    return [page.Tables(unfolded), page.Tables(folded, names)], _about(plotted, baseline)


def find_baseline(table: pd.DataFrame, methods: Sequence[str]) -> str:
    """Return the first method that the table has differences to."""
    return next((name for name in methods if name in set(table["against"])), "")


def _table(differences: Sequence[Difference], caption: str) -> Table:
    rows = []
    for item in differences:
        result = verdict(item.mean, item.contains_zero if item.has_interval else None)
        interval = format_difference_interval(item) if item.has_interval else "–"
        rows.append((item.method, "", [format_signed(item.mean, 2), interval, format_p_value(item.p), result]))
    head = ["Method", "Difference", "95 % interval", "p, t-test, Holm", ""]
    return Table(rows, head, f"{caption}: differences", caption)


def format_difference_interval(difference: Difference) -> str:
    """Format an interval with signs, as in "+0.51 to +1.33"."""
    return f"{format_signed(difference.ci_low, 2)} to {format_signed(difference.ci_high, 2)}"


def format_p_value(p: float) -> str:
    """Format a p-value to three decimals; "–" for NaN."""
    return "< 0.001" if p < 0.0005 else format_fixed(p, 3)


def _about(differences: Sequence[Difference], baseline: str) -> str:
    if not differences:
        return ""
    sentence = f"Difference to {baseline} in points, paired by run (same seed and order)."
    pair_counts = sorted({item.n for item in differences if item.has_interval})
    if not pair_counts:
        return f"{sentence} One run of each method gives no interval."
    num_pairs = f"{pair_counts[0]} to {pair_counts[-1]}" if len(pair_counts) > 1 else str(pair_counts[0])
    return (
        f"{sentence} 95 % intervals from {num_pairs} pairs; if an interval contains 0, these runs do not "
        "separate the two methods."
    )
