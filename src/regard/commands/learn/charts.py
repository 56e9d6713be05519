"""Panels of a continual-learning report: curves over tasks, dots for runs and methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn.metrics import format_fixed
from regard.commands.learn.tables import (
    NUM_INKS,
    RUN_KEYS,
    SCENARIOS,
    assign_styles,
    count_tasks,
    find_scenarios,
    round_value,
    run_names,
    select_trained,
    task_names,
)
from regard.report import labels
from regard.report.panels import Panel, line, panel, thin_indices
from regard.runs.intervals import t_half_width

MAX_TASK_PANELS = 12
"""Tasks with a panel each, at most."""

MAX_DOTS = 1500
"""Dots in one panel, at most."""

_COSTS = (("whole_seconds", "time of a run", "seconds", 1.0), ("memory_bytes", "memory stored", "MiB", 2.0**20))


def make_curve_panels(matrix: pd.DataFrame) -> dict[str, list[Panel]]:
    """Make the panels of each scenario: mean score, forgetting so far, and score of each task."""
    panels = {scenario: _curves(matrix, scenario) for scenario in find_scenarios(matrix)}
    return {scenario: curves for scenario, curves in panels.items() if curves}


def _curves(matrix: pd.DataFrame, scenario: str) -> list[Panel]:
    rows, names, styles = select_trained(matrix, scenario), task_names(matrix), assign_styles(matrix)
    panels = _panel("Mean over tasks trained so far", "score, %", average_seen_tasks(rows), styles)
    if count_tasks(matrix) > 1:
        panels += _panel("Forgotten so far", "points, mean over old tasks", average_forgetting(rows), styles)
    for index in thin_indices(max(len(names) - 1, 0), MAX_TASK_PANELS):
        task_rows = rows[rows["task_index"] == index + 1].rename(columns={"score": "value"})
        prefix = "" if names[index] == f"Task {index + 1}" else f"task {index + 1}, "
        panels += _panel(names[index], f"{prefix}score, %", task_rows, styles)
    return panels


def average_seen_tasks(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the scores of the tasks trained so far, by run and their number (`value`)."""
    return _average_complete(rows.rename(columns={"score": "value"}), missing=0)


def average_forgetting(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the points that old tasks lost, by run and number of tasks trained (`value`)."""
    keys = [*RUN_KEYS, "task_index"]
    initial = rows[rows["after_task"] == rows["task_index"]][[*keys, "score"]]
    later = rows[rows["after_task"] > rows["task_index"]].merge(initial, on=keys, suffixes=("", "_at_first"))
    return _average_complete(later.assign(value=later["score_at_first"] - later["score"]), missing=1)


def _average_complete(rows: pd.DataFrame, missing: int) -> pd.DataFrame:
    """Average values over tasks where all trained tasks but the last `missing` have one."""
    means = rows.groupby([*RUN_KEYS, "after_task"], sort=False)["value"].agg(["mean", "count"]).reset_index()
    return means[means["count"] == means["after_task"] - missing].rename(columns={"mean": "value"})


def _panel(caption: str, note: str, rows: pd.DataFrame, styles: Sequence[tuple[str, int, int]]) -> list[Panel]:
    """Draw a line per method: means over runs, with 95 % intervals if there are few methods."""
    points = []
    for name, _, _ in styles:
        means = rows[rows["method"] == name].groupby("after_task", sort=True)["value"].agg(["mean", "std", "count"])
        margins = [t_half_width(int(row["count"]), float(row["std"])) for _, row in means.iterrows()]
        has_bands = len(styles) <= NUM_INKS
        points += line("after", name, [*means.index], [*means["mean"]], "", margins if has_bands else None)
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
    x_rounded, y_rounded = round_value(x), round_value(y)
    if x_rounded is None or y_rounded is None:
        return []
    return [{"series": series, "part": "", "what": label, "x": x_rounded, "value": y_rounded, "shown": text}]


def make_metric_panels(metrics: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """Plot AP over FGT, a dot per run, for each scenario."""
    names, panels = run_names(matrix), []
    for scenario in find_scenarios(matrix):
        rows = metrics[metrics["scenario"] == scenario]
        by_run = rows.pivot_table(index=RUN_KEYS, columns="metric", values="value", sort=False)
        points = []
        for (method, seed, order), row in by_run.iterrows():
            x, y = row.get("forgetting", math.nan), row.get("average_performance", math.nan)
            label = names.get((seed, order), f"seed {seed}")
            points += make_dot(method, label, x, y, f"FGT {format_fixed(x)}, AP {format_fixed(y)}")
        note = f"AP (%) over FGT (points), {SCENARIOS[scenario]}"
        panels += make_dot_panel("AP and forgetting", note, "FGT, points", points, assign_styles(matrix))
    return panels


def make_cost_panels(totals: pd.DataFrame, matrix: pd.DataFrame, scores: Mapping[str, float], name: str) -> list[Panel]:
    """Plot the score `name` over seconds and over stored bytes, a dot per method."""
    panels = []
    for column, title, unit, scale in _COSTS:
        points = []
        for method, value in totals[column].items():
            x, y = float(value) / scale, scores.get(method, math.nan)
            text = f"{labels.number(x, 3)} {unit}, {name} {format_fixed(y)}"
            points += make_dot(method, "mean over runs", x, y, text)
        if len({point["x"] for point in points}) > 1:
            panels += make_dot_panel(f"{name}, by {title}", f"over {unit}", unit, points, assign_styles(matrix))
    return panels
