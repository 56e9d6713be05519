"""Diagnostics before and after each task by layer, and forgetting over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.charts import make_dot, make_dot_panel
from regard.report import labels
from regard.report.panels import Panel

STATISTICS = {
    "sink_deviation": "Sink deviation",
    "common_sink_ratio": "Common-sink ratio",
    "over_smoothing": "Over-smoothing",
    "spectral_bound": "Spectral bound",
}
"""Titles of the statistics measured before and after a task."""

TASK_MEAN = "mean over tasks"

_TIMES = {"before": -1, "after": 0}


def average_by_layer(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Average diagnostics over runs.

    Returns:
        `statistics` (titles), `methods`, `tasks` (the mean over tasks first if there are several), `layers`, and
        `values` by statistic, method, task and time, one number per layer. Empty without layer values.
    """
    rows = table[table["statistic"].isin(list(STATISTICS))].dropna(subset=["layer", "value"])
    rows = pd.concat(
        [rows[rows["after_task"] == rows["task_index"] + ahead].assign(time=t) for t, ahead in _TIMES.items()]
    )
    if rows.empty:
        return {}
    names = learn_tables.task_names(matrix)
    layers = sorted(int(layer) for layer in rows["layer"].unique())
    keys = ["statistic", "method", "task_index", "time", "layer"]
    means = rows.astype({"value": "float64"}).groupby(keys, sort=False)["value"].mean().reset_index()
    positions = sorted(int(position) for position in means["task_index"].unique())
    tasks = {names[position - 1]: means[means["task_index"] == position] for position in positions}
    if len(positions) > 1:
        tasks = {TASK_MEAN: means, **tasks}
    statistics = [name for name in STATISTICS if name in set(means["statistic"])]
    methods = [name for name in learn_tables.method_names(matrix) if name in set(means["method"])]
    return {
        "statistics": {name: _title(name) for name in statistics},
        "methods": methods,
        "tasks": list(tasks),
        "layers": layers,
        "values": {name: _by_method(name, methods, tasks, layers) for name in statistics},
    }


def _title(statistic: str) -> str:
    return STATISTICS[statistic] + (", %" if labels.unit(statistic, {}) == "%" else "")


def _by_method(
    statistic: str, methods: Sequence[str], tasks: Mapping[str, pd.DataFrame], layers: Sequence[int]
) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    by_method: dict[str, dict[str, dict[str, list[float | None]]]] = {method: {} for method in methods}
    for task, rows in tasks.items():
        selected = rows[rows["statistic"] == statistic]
        means = selected.groupby(["method", "time", "layer"])["value"].mean().to_dict()
        for method in methods:
            by_method[method][task] = {
                time: [learn_tables.round_value(means.get((method, time, layer))) for layer in layers]
                for time in _TIMES
            }
    return by_method


def average_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Return one value per statistic, run, task and time: the table's own, else the mean over layers."""
    keys = ["method", "seed", "after_task", "task_index", "statistic"]
    finite = table.dropna(subset=["value"]).astype({"value": "float64"})
    totals = finite[finite["layer"].isna()].groupby(keys, sort=False)["value"].mean()
    means = finite[finite["layer"].notna()].groupby(keys, sort=False)["value"].mean()
    return totals.combine_first(means).reset_index()


def make_diagnostic_panels(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """Plot a task's forgetting over each statistic measured right after the task.

    Seeds run in several orders are omitted, because the table of diagnostics has no order.
    """
    rows = average_layers(table)
    titles = {name: (title, _title(name)) for name, title in STATISTICS.items()}
    return make_forgetting_panels(rows[rows["after_task"] == rows["task_index"]], matrix, titles)


def make_forgetting_panels(
    rows: pd.DataFrame, matrix: pd.DataFrame, titles: Mapping[str, tuple[str, str]]
) -> list[Panel]:
    """Plot forgetting over statistics: rows with method, seed, task_index, statistic and value.

    Args:
        rows: Values to plot.
        matrix: Scores; TIL is preferred.
        titles: Title and axis title of each statistic.
    """
    scenarios = learn_tables.find_scenarios(matrix)
    if rows.empty or not scenarios:
        return []
    forgetting = learn_tables.compute_forgetting(matrix, scenarios[0])
    forgetting = forgetting[~forgetting.duplicated(["method", "seed", "task_index"], keep=False)]
    rows = rows[["method", "seed", "task_index", "statistic", "value"]]
    styles, panels = learn_tables.assign_styles(learn_tables.method_names(matrix)), []
    for statistic, (title, axis) in titles.items():
        pairs = rows[rows["statistic"] == statistic].merge(forgetting, on=["method", "seed", "task_index"])
        points = [point for row in pairs.to_dict("records") for point in _dot(row, title)]
        panels += make_dot_panel(title, _note(pairs), axis, points, styles)
    return panels


def _dot(row: Mapping[Any, Any], title: str) -> list[dict[str, Any]]:
    value, forgetting = float(row["value"]), float(row["forgetting"])
    text = f"{title.lower()} {labels.number(value, 3)}, forgotten {learn_metrics.format_fixed(forgetting)}"
    return make_dot(str(row["method"]), f"{row['task']}, seed {int(row['seed'])}", value, forgetting, text)


def _note(pairs: pd.DataFrame) -> str:
    """Describe the dots and their correlation, overall and within methods."""
    overall = learn_tables.compute_correlation(pairs["value"].tolist(), pairs["forgetting"].tolist())
    within = _within(pairs)
    parts = ["points forgotten by the end"]
    parts += [f"r = {learn_metrics.format_fixed(overall)} over {len(pairs)} dots"] if math.isfinite(overall) else []
    parts += [f"{learn_metrics.format_fixed(within)} within methods"] if math.isfinite(within) else []
    return ", ".join(parts)


def _within(pairs: pd.DataFrame) -> float:
    """Correlate after subtracting each method's means; NaN for one method."""
    if pairs["method"].nunique() < 2:
        return math.nan
    centered = pairs[["value", "forgetting"]] - pairs.groupby("method")[["value", "forgetting"]].transform("mean")
    return learn_tables.compute_correlation(
        centered["value"].round(9).tolist(), centered["forgetting"].round(9).tolist()
    )
