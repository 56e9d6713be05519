"""Diagnostics before and after each task by layer, and forgetting over them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import tables as learn_tables
from regard.commands.learn.charts import make_dot_panel
from regard.commands.learn.metrics import format_fixed
from regard.commands.learn.tables import average_statistic, compute_correlation, round_value
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
    rows = table[table["statistic"].isin(list(STATISTICS))].dropna(subset=["layer"])
    rows = pd.concat(
        [rows[rows["after_task"] == rows["task_index"] + ahead].assign(time=time) for time, ahead in _TIMES.items()]
    )
    if rows.empty:
        return {}
    keys = ["statistic", "method", "task_index", "time", "layer"]
    means = rows.groupby(keys, sort=False)["value"].mean().reset_index()
    names, positions = learn_tables.task_names(matrix), sorted(set(means["task_index"]))
    tasks = {names[position - 1]: means[means["task_index"] == position] for position in positions}
    if len(positions) > 1:
        tasks = {TASK_MEAN: means, **tasks}
    layers = sorted(set(rows["layer"].tolist()))
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
) -> dict[str, dict[str, Any]]:
    by_method: dict[str, dict[str, Any]] = {method: {} for method in methods}
    for task, rows in tasks.items():
        means = average_statistic(rows, statistic, "method", "time", "layer")
        for method in methods:
            by_method[method][task] = {
                time: [round_value(means.get((method, time, layer))) for layer in layers] for time in _TIMES
            }
    return by_method


def average_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Return one value per statistic, run, task and time: the table's own, else the mean over layers."""
    keys = ["method", "seed", "after_task", "task_index", "statistic"]
    totals, means = (
        table[table["layer"].isna() == is_total].groupby(keys, sort=False)["value"].mean() for is_total in (True, False)
    )
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
    """Plot forgetting over each statistic of `titles` (title and axis title) in `rows`, a dot per task and run."""
    if rows.empty:
        return []
    keys, panels = ["method", "seed", "task_index"], []
    forgetting = learn_tables.compute_forgetting(matrix)
    forgetting = forgetting[~forgetting.duplicated(keys, keep=False)]
    for statistic, (title, axis) in titles.items():
        values = rows.loc[rows["statistic"] == statistic, [*keys, "value"]]
        pairs = values.merge(forgetting, on=keys)
        dots = []
        for row in pairs.to_dict("records"):
            text = f"{title.lower()} {labels.number(row['value'], 3)}, forgotten {format_fixed(row['forgetting'])}"
            label = f"{row['task']}, seed {row['seed']}"
            dots.append((row["method"], label, row["value"], row["forgetting"], text))
        panels += make_dot_panel(title, _note(pairs), axis, dots, learn_tables.assign_styles(matrix))
    return panels


def _note(pairs: pd.DataFrame) -> str:
    """Describe the dots and their correlation, overall and after subtracting each method's means."""
    columns = ["value", "forgetting"]
    centered = (pairs[columns] - pairs.groupby("method")[columns].transform("mean")).round(9)
    overall = compute_correlation(pairs["value"], pairs["forgetting"])
    within = compute_correlation(centered["value"], centered["forgetting"])
    parts = ["points forgotten by the end"]
    parts += [f"r = {format_fixed(overall)} over {len(pairs)} dots"] if math.isfinite(overall) else []
    if math.isfinite(within) and pairs["method"].nunique() > 1:
        parts.append(f"{format_fixed(within)} within methods")
    return ", ".join(parts)
