"""Diagnostics before and after each task, by layer, and forgetting beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.charts import dot, dots
from regard.report import labels
from regard.report.panels import Panel

STATISTICS = {
    "sink_deviation": "Sink deviation",
    "common_sink_ratio": "Common-sink ratio",
    "over_smoothing": "Over-smoothing",
    "spectral_bound": "Spectral bound",
}
"""What is measured before and after a task, and its title."""

EVERY = "mean over tasks"

_TIMES = {"before": -1, "after": 0}


def by_layer(table: pd.DataFrame, matrix: pd.DataFrame) -> dict[str, Any]:
    """Means over runs, before and after each task, by statistic, method and task; empty where no layer has a value.

    Keys: `statistics` (titles by name), `methods`, `tasks` (the mean over tasks first where there are several),
    `layers`, and `values` by statistic, method and task: for before and after, a number a layer, None where missing.
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
    places = sorted(int(place) for place in means["task_index"].unique())
    tasks = {names[place - 1]: means[means["task_index"] == place] for place in places}
    if len(places) > 1:
        tasks = {EVERY: means, **tasks}
    there = [name for name in STATISTICS if name in set(means["statistic"])]
    methods = [name for name in learn_tables.methods(matrix) if name in set(means["method"])]
    return {
        "statistics": {name: _title(name) for name in there},
        "methods": methods,
        "tasks": list(tasks),
        "layers": layers,
        "values": {name: _by_method(name, methods, tasks, layers) for name in there},
    }


def _title(statistic: str) -> str:
    return STATISTICS[statistic] + (", %" if labels.unit(statistic, {}) == "%" else "")


def _by_method(
    statistic: str, methods: Sequence[str], tasks: Mapping[str, pd.DataFrame], layers: Sequence[int]
) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    found: dict[str, dict[str, dict[str, list[float | None]]]] = {method: {} for method in methods}
    for task, rows in tasks.items():
        ours = rows[rows["statistic"] == statistic]
        by = ours.groupby(["method", "time", "layer"])["value"].mean().to_dict()
        for method in methods:
            found[method][task] = {
                time: [learn_tables.rounded(by.get((method, time, layer))) for layer in layers] for time in _TIMES
            }
    return found


def whole(table: pd.DataFrame) -> pd.DataFrame:
    """One value of each statistic for all layers, by run, task and time: the table's own, else the mean over layers."""
    keys = ["method", "seed", "after_task", "task_index", "statistic"]
    known = table.dropna(subset=["value"]).astype({"value": "float64"})
    own = known[known["layer"].isna()].groupby(keys, sort=False)["value"].mean()
    means = known[known["layer"].notna()].groupby(keys, sort=False)["value"].mean()
    return own.combine_first(means).reset_index()


def beside_forgetting(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """For each statistic a panel: a task's forgetting over its value when the task was learnt, a dot for each task.

    The setting is TIL where there is one. Seeds that were run in several orders are left out: the table of
    diagnostics does not tell them apart.
    """
    rows = whole(table)
    titles = {name: (title, _title(name)) for name, title in STATISTICS.items()}
    return forgetting_over(rows[rows["after_task"] == rows["task_index"]], matrix, titles)


def forgetting_over(rows: pd.DataFrame, matrix: pd.DataFrame, titles: Mapping[str, tuple[str, str]]) -> list[Panel]:
    """The same for rows with method, seed, position, statistic and value; `titles` of a statistic and of its axis."""
    known = learn_tables.settings(matrix)
    if rows.empty or not known:
        return []
    lost = learn_tables.forgotten(matrix, known[0])
    lost = lost[~lost.duplicated(["method", "seed", "task_index"], keep=False)]
    rows = rows[["method", "seed", "task_index", "statistic", "value"]]
    told, found = learn_tables.styles(learn_tables.methods(matrix)), []
    for statistic, (title, axis) in titles.items():
        pairs = rows[rows["statistic"] == statistic].merge(lost, on=["method", "seed", "task_index"])
        points = [point for row in pairs.to_dict("records") for point in _dot(row, title)]
        found += dots(title, _note(pairs), axis, points, told)
    return found


def _dot(row: Mapping[Any, Any], title: str) -> list[dict[str, Any]]:
    value, lost = float(row["value"]), float(row["forgetting"])
    shown = f"{title.lower()} {labels.number(value, 3)}, forgotten {learn_metrics.format_fixed(lost)}"
    return dot(str(row["method"]), f"{row['task']}, seed {int(row['seed'])}", value, lost, shown)


def _note(pairs: pd.DataFrame) -> str:
    """What the dots are and how they correlate, over all of them and within the methods."""
    overall = learn_tables.correlation(pairs["value"].tolist(), pairs["forgetting"].tolist())
    inside = _within(pairs)
    parts = ["points forgotten until the end"]
    parts += [f"r = {learn_metrics.format_fixed(overall)} over {len(pairs)} dots"] if math.isfinite(overall) else []
    parts += [f"{learn_metrics.format_fixed(inside)} within methods"] if math.isfinite(inside) else []
    return ", ".join(parts)


def _within(pairs: pd.DataFrame) -> float:
    """The correlation once each method's means are taken away; NaN for one method."""
    if pairs["method"].nunique() < 2:
        return math.nan
    centred = pairs[["value", "forgetting"]] - pairs.groupby("method")[["value", "forgetting"]].transform("mean")
    return learn_tables.correlation(centred["value"].round(9).tolist(), centred["forgetting"].round(9).tolist())
