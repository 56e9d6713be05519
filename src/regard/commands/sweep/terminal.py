"""The summary of a sweep for a terminal of 80 columns."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep.means import Comparison
from regard.commands.sweep.words import count_seeds, has_seeds, write_ledes, write_title, write_warnings
from regard.report import labels
from regard.report.terminal import WIDTH, plain, summary

SEEDS, CELL = 8, 18
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
    longest = max(map(len, names))
    while len(metrics) > 1 and longest > _room(len(metrics)):
        metrics.pop()
    if not metrics:
        return []
    width = min(max(longest, len(_HEAD)), _room(len(metrics)))
    titles = "".join(f"{comparison.metrics[metric][0]:>{CELL}}" for metric in metrics)
    lines = [f"{_HEAD:<{width}}{'seeds':>{SEEDS}}{titles}"]
    for name, item in zip(names, comparison.combinations, strict=True):
        means = [(sweep_means.mean(item.rows, metric), comparison.metrics[metric][1]) for metric in metrics]
        cells = "".join(f"{sweep_means.format_mean(mean, unit):>{CELL}}" for mean, unit in means)
        lines.append(f"{_shorten(name, width):<{width}}{count_seeds(item):>{SEEDS}}{cells}")
    return [*lines, "± is the standard error over seeds"] if has_seeds(comparison) else lines


def _room(num_metrics: int) -> int:
    return WIDTH - SEEDS - CELL * num_metrics


def _shorten(name: str, width: int) -> str:
    """Omit the middle of a long name: combinations differ at both ends."""
    return name if len(name) <= width else f"{name[: width // 2]}…{name[len(name) - (width - width // 2 - 1) :]}"
