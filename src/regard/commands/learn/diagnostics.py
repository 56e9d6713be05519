"""Diagnostics before and after each task, quality of pseudo samples, and forgetting over both."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import tables as learn_tables
from regard.commands.learn.charts import make_dot_panel
from regard.report import labels
from regard.report.labels import format_fixed
from regard.report.page import Heading, Part, Table
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
    """Average diagnostics over runs: `values` by statistic, method, task and time, one number per layer.

    If there are several tasks, the first is the mean over tasks. Empty without layer values.
    """
    rows = table[table["statistic"].isin(list(STATISTICS))].dropna(subset=["layer"])
    ahead = rows["after_task"] - rows["task_index"]
    rows = pd.concat([rows[ahead == distance].assign(time=time) for time, distance in _TIMES.items()])
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
        means = learn_tables.average_statistic(rows, statistic, "method", "time", "layer")
        for method in methods:
            by_method[method][task] = {
                time: [learn_tables.round_value(means.get((method, time, layer))) for layer in layers]
                for time in _TIMES
            }
    return by_method


def average_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Return one value per statistic, run, task and time: the table's own, else the mean over layers."""
    keys = [*learn_tables.RUN_KEYS, "after_task", "task_index", "statistic"]
    is_total = table["layer"].isna()
    totals, means = (table[mask].groupby(keys, sort=False)["value"].mean() for mask in (is_total, ~is_total))
    return totals.combine_first(means).reset_index()


def make_diagnostic_panels(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """Plot a task's forgetting over each statistic measured right after the task."""
    rows = average_layers(table)
    titles = {name: (title, _title(name)) for name, title in STATISTICS.items()}
    return make_forgetting_panels(rows[rows["after_task"] == rows["task_index"]], matrix, titles)


def make_forgetting_panels(
    rows: pd.DataFrame, matrix: pd.DataFrame, titles: Mapping[str, tuple[str, str]]
) -> list[Panel]:
    """Plot forgetting over each statistic of `titles` (title and axis title) in `rows`, a dot per task and run."""
    if rows.empty:
        return []
    keys, panels = [*learn_tables.RUN_KEYS, "task_index"], []
    forgetting = learn_tables.compute_forgetting(matrix)
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
    overall = learn_tables.compute_correlation(pairs["value"], pairs["forgetting"])
    within = learn_tables.compute_correlation(centered["value"], centered["forgetting"])
    parts = ["points forgotten by the end"]
    parts += [f"r = {format_fixed(overall)} over {len(pairs)} dots"] if math.isfinite(overall) else []
    if math.isfinite(within) and pairs["method"].nunique() > 1:
        parts.append(f"{format_fixed(within)} within methods")
    return ", ".join(parts)


PSEUDO_COLUMNS: dict[str, tuple[str, float, int]] = {
    "kept": ("Samples", 1, 0),
    "two_sample_accuracy": ("Classifier accuracy, %", 100, 1),
    "two_sample_p": ("p, largest", 1, 3),
    "near_duplicates": ("Near duplicates, %", 100, 1),
    "copied_whole": ("Copied whole, %", 100, 1),
    "copied_8grams": ("Copied 8-grams, %", 100, 1),
    "frechet": ("Fréchet", 1, 3),
    "real_frechet": ("Fréchet, real", 1, 3),
    "generated membership": ("Membership", 1, 2),
    "real membership": ("Membership, real", 1, 2),
    "density membership": ("Membership, density", 1, 2),
}
"""Statistics of the table: title, factor, decimals."""

PSEUDO_PLOTTED = {
    "two_sample_accuracy": ("Classifier accuracy against real texts", "share of rows"),
    "frechet": ("Fréchet distance of query vectors", "distance"),
    "copied_8grams": ("Copied 8-grams", "share of 8-grams"),
}
"""Statistics that forgetting is plotted over: title and axis title."""

PSEUDO_ABOUT = (
    "Pseudo samples that stand for each task while later tasks are trained, means over runs. Classifier accuracy: how "
    "well a classifier separates them from dev rows; 50 means it cannot. p: largest p-value of any run that this is "
    "chance. Near duplicates: of one another. Copied: training rows copied whole, or as 8-grams. Fréchet: distance of "
    "their query vectors from those of training rows; real: of as many real vectors from the rest. Membership: how "
    "often a training row is nearer to them than a dev row; 0.5 reveals nothing. Also for real query vectors and for "
    "draws from a density over them. Forgotten: points lost by the end, TIL if available. Correlation is not causation."
)


def make_pseudo_tables(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    """Make a table of `PSEUDO_COLUMNS` and forgetting by task, for each method with pseudo samples."""
    names = learn_tables.task_names(matrix)
    forgetting = learn_tables.compute_forgetting(matrix).groupby(["method", "task_index"])["forgetting"]
    mean_forgetting = forgetting.mean().to_dict()
    parts: list[Part] = []
    head = ["Task", *(title for title, _, _ in PSEUDO_COLUMNS.values()), "Forgotten"]
    for method, method_rows in table.groupby("method", sort=False):
        groups = method_rows.groupby(["task_index", "statistic"])["value"]
        means = {key: values.max() if key[1] == "two_sample_p" else values.mean() for key, values in groups}
        rows = []
        for task in sorted({position for position, _ in means}):
            cells = [
                format_fixed(scale * means.get((task, name), math.nan), digits)
                for name, (_, scale, digits) in PSEUDO_COLUMNS.items()
            ]
            cells.append(format_fixed(mean_forgetting.get((method, task), math.nan), 1))
            rows.append((names[task - 1], "", cells))
        parts += [Heading(method), Table(rows, head, f"{method}, pseudo samples")]
    return parts
