"""Panels of a continual-learning report: curves over tasks, dots for runs and methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.report import labels
from regard.report.panels import Panel, line, panel, thin_indices
from regard.runs.intervals import t_half_width

MAX_TASK_PANELS = 12
"""Tasks with a panel each, at most."""

MAX_DOTS = 1500
"""Dots in one panel, at most."""


def make_curve_panels(matrix: pd.DataFrame) -> dict[str, list[Panel]]:
    """Make the panels of each scenario: mean score, forgetting so far, and score of each task."""
    panels = {scenario: _curves(matrix, scenario) for scenario in learn_tables.find_scenarios(matrix)}
    return {scenario: curves for scenario, curves in panels.items() if curves}


def _curves(matrix: pd.DataFrame, scenario: str) -> list[Panel]:
    rows, names = learn_tables.select_trained(matrix, scenario), learn_tables.task_names(matrix)
    styles = learn_tables.assign_styles(learn_tables.method_names(matrix))
    mean_panel, forgetting_panel = (
        _panel("Mean over tasks trained so far", "score, %", average_seen_tasks(rows), styles),
        [],
    )
    if learn_tables.count_tasks(matrix) > 1:
        forgetting_panel = _panel("Forgotten so far", "points, mean over old tasks", average_forgetting(rows), styles)
    task_panels = []
    for index in thin_indices(max(len(names) - 1, 0), MAX_TASK_PANELS):
        task_rows = rows[rows["task_index"] == index + 1].rename(columns={"score": "value"})
        prefix = "" if names[index] == f"Task {index + 1}" else f"task {index + 1}, "
        task_panels += _panel(names[index], f"{prefix}score, %", task_rows, styles)
    return [*mean_panel, *forgetting_panel, *task_panels]


def average_seen_tasks(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the scores of the tasks trained so far, by run and their number (`value`)."""
    keys = [*learn_tables.RUN_KEYS, "after_task"]
    means = rows.groupby(keys, sort=False)["score"].agg(["mean", "count"]).reset_index()
    return means[means["count"] == means["after_task"]].rename(columns={"mean": "value"})


def average_forgetting(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the points that old tasks lost, by run and number of tasks trained (`value`)."""
    keys = [*learn_tables.RUN_KEYS, "task_index"]
    initial = rows[rows["after_task"] == rows["task_index"]][[*keys, "score"]].rename(columns={"score": "at_first"})
    later = rows[rows["after_task"] > rows["task_index"]].merge(initial, on=keys)
    later = later.assign(value=later["at_first"] - later["score"])
    keys = [*learn_tables.RUN_KEYS, "after_task"]
    means = later.groupby(keys, sort=False)["value"].agg(["mean", "count"]).reset_index()
    return means[means["count"] == means["after_task"] - 1].rename(columns={"mean": "value"})


def _panel(caption: str, note: str, rows: pd.DataFrame, styles: Sequence[tuple[str, int, int]]) -> list[Panel]:
    """Draw a line per method: means over runs, with 95 % intervals if there are few methods."""
    points, bands = [], len(styles) <= learn_tables.NUM_INKS
    for name, _, _ in styles:
        means = rows[rows["method"] == name].groupby("after_task", sort=True)["value"].agg(["mean", "std", "count"])
        margins = [
            t_half_width(int(n), float(deviation)) if bands else math.nan
            for deviation, n in zip(means["std"], means["count"], strict=True)
        ]
        points += line("after", name, [float(after) for after in means.index], means["mean"].tolist(), "", margins)
    return panel(caption, note, "after", points, styles)


def make_dot_panel(
    caption: str, note: str, axis: str, points: Iterable[Mapping[str, Any]], styles: Sequence[tuple[str, int, int]]
) -> list[Panel]:
    """Make a panel of dots, thinned beyond `MAX_DOTS`; none for fewer than two."""
    methods = {name for name, _, _ in styles}
    known = [dict(point) for point in points if point["series"] in methods]
    thinned = [known[i] for i in thin_indices(len(known), MAX_DOTS)]
    panels = panel(caption, note, axis, thinned, styles) if len(thinned) > 1 else []
    return [{**item, "kind": "dots"} for item in panels]


def make_dot(series: str, label: str, x: float, y: float, text: str) -> list[dict[str, Any]]:
    """Make a dot; none if a coordinate is not finite."""
    x_rounded, y_rounded = learn_tables.round_value(x), learn_tables.round_value(y)
    if x_rounded is None or y_rounded is None:
        return []
    return [{"series": series, "part": "", "what": label, "x": x_rounded, "value": y_rounded, "shown": text}]


def make_metric_panels(metrics: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """Plot AP over FGT, a dot per run, for each scenario."""
    styles, names, panels = (
        learn_tables.assign_styles(learn_tables.method_names(matrix)),
        learn_tables.run_names(matrix),
        [],
    )
    for scenario in learn_tables.find_scenarios(matrix):
        rows = metrics[metrics["scenario"] == scenario]
        by_run = rows.pivot_table(index=learn_tables.RUN_KEYS, columns="metric", values="value", sort=False)
        points = []
        for (method, seed, order), row in by_run.iterrows():
            label = names.get((int(seed), str(order)), f"seed {seed}")
            x, y = float(row.get("forgetting", math.nan)), float(row.get("average_performance", math.nan))
            text = f"FGT {learn_metrics.format_fixed(x)}, AP {learn_metrics.format_fixed(y)}"
            points += make_dot(str(method), label, x, y, text)
        note = f"AP (%) over FGT (points), {learn_tables.SCENARIOS[scenario]}"
        panels += make_dot_panel("AP and forgetting", note, "FGT, points", points, styles)
    return panels


def make_cost_panels(totals: pd.DataFrame, matrix: pd.DataFrame, scores: Mapping[str, float], name: str) -> list[Panel]:
    """Plot the score `name` over seconds and over stored bytes, a dot per method."""
    styles, panels = learn_tables.assign_styles(learn_tables.method_names(matrix)), []
    for column, title, unit, scale in _COSTS:
        points = []
        for method, row in totals.iterrows():
            x, y = float(row[column]) / scale, scores.get(str(method), math.nan)
            text = f"{labels.number(x, 3)} {unit}, {name} {learn_metrics.format_fixed(y)}"
            points += make_dot(str(method), "mean over runs", x, y, text)
        if len({point["x"] for point in points}) > 1:
            panels += make_dot_panel(f"{name}, by {title}", f"over {unit}", unit, points, styles)
    return panels


_COSTS = (("whole_seconds", "time of a run", "seconds", 1.0), ("memory_bytes", "memory stored", "MiB", 2.0**20))
