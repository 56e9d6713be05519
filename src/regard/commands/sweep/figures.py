"""A sweep's means as a table and as a figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep.means import Comparison, format_metric
from regard.errors import UserError, check_choice
from regard.report import colors
from regard.report.drawing import grid, plain_text
from regard.runs.intervals import t_half_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tabulate_means(comparison: Comparison) -> pd.DataFrame:
    """Return a row for each combination: seeds, then each metric's mean ± standard error."""
    rows = [
        {
            "combination": item.name,
            "seeds": len(item.rows),
            **{title: format_metric(item.rows, metric, unit) for metric, (title, unit) in comparison.metrics.items()},
        }
        for item in comparison.combinations
    ]
    return pd.DataFrame(rows)


def draw_means(comparison: Comparison, metric: str | None) -> Figure:
    """Draw a metric (None: the first) of each combination: mean over seeds with its 95 % interval."""
    if not comparison.metrics:
        raise UserError("there is nothing to draw: no trial has finished")
    metric = next(iter(comparison.metrics)) if metric is None else metric
    check_choice("metric", metric, comparison.metrics)
    title, unit = comparison.metrics[metric]
    means = [sweep_means.mean(item.rows, metric) for item in comparison.combinations]
    halves = [t_half_width(mean.n, mean.error * math.sqrt(mean.n)) for mean in means]
    figure, (axes,) = grid(1, 1, 5.2, 1.2 + 0.3 * len(means))
    places = [*range(len(means))]
    axes.errorbar([mean.value for mean in means], places, xerr=halves, fmt="o", color=colors.SERIES_LIGHT[0])
    names = [item.name for item in comparison.combinations]
    axes.set_yticks(places, [f"{plain_text(name)} (n = {mean.n})" for name, mean in zip(names, means, strict=True)])
    axes.invert_yaxis()
    axes.set_title("Means over seeds, 95 % intervals", fontsize=10, loc="left")
    axes.set_xlabel(f"{title}, {unit}" if unit else title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
