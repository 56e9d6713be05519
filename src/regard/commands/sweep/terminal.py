"""The summary of a sweep for a terminal of 80 columns."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.sweep.means import Comparison, format_metric
from regard.commands.sweep.words import count_seeds, has_seeds, write_ledes, write_title, write_warnings
from regard.report import labels
from regard.report.terminal import WIDTH, plain, shorten, summary

SEEDS, CELL, GAP = 8, 18, 2
"""Widths of the columns of seeds and of means, at least, and blanks before a mean that is longer."""
COLUMNS = (
    *("valid_loss", "sink_rate", "alpha_first"),
    *("average_performance_til", "forgetting_til", "average_performance_cil"),
)
_HEAD = "combination"


def sweep_summary(trials: pd.DataFrame, record: Mapping[str, Any]) -> Group:
    """Summarize a sweep for a terminal of 80 columns: means by combination, differences, trials without a result."""
    comparison = Comparison.of(trials, record)
    lede, *outcomes = write_ledes(comparison)
    unfinished = [
        plain(f"{name}, {seed}: {labels.format_value(trial['error'] or trial['state'])}")
        for name, seed, trial in comparison.unfinished
    ]
    notes = [*outcomes, *write_warnings(comparison)]
    return summary(write_title(comparison), [lede], [_means(comparison), unfinished], notes)


def _means(comparison: Comparison) -> list[str]:
    """Format a line for each combination; the last metrics are omitted if names are long."""
    metrics = [metric for metric in COLUMNS if metric in comparison.metrics]
    names = [plain(item.name) for item in comparison.combinations]
    longest = max(map(len, [_HEAD, *names]))
    if not metrics:
        return []
    means = [
        [format_metric(item.rows, metric, comparison.metrics[metric][1]) for metric in metrics]
        for item in comparison.combinations
    ]
    cell = max([CELL, *(len(text) + GAP for of_item in means for text in of_item)])
    count = max(1, min(len(metrics), (WIDTH - SEEDS - longest) // cell))
    width = min(longest, WIDTH - SEEDS - cell * count)
    titles = [comparison.metrics[metric][0] for metric in metrics]
    rows = zip(names, map(count_seeds, comparison.combinations), means, strict=True)
    lines = [
        f"{shorten(name, width):<{width}}{seeds:>{SEEDS}}" + "".join(f"{text:>{cell}}" for text in texts[:count])
        for name, seeds, texts in [(_HEAD, "seeds", titles), *rows]
    ]
    return [*lines, "± is the standard error over seeds"] if has_seeds(comparison) else lines
