"""Panels of a continual-learning report: curves over tasks, dots for runs and methods."""

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from regard.commands.learn.tables import (
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
from regard.report.labels import format_fixed
from regard.report.panels import INKS, Panel, Styles, line, panel, thin_indices
from regard.runs.intervals import t_half_width

MEANS = ("Mean over tasks trained so far", "Forgotten so far")
"""Captions of the panels that are of all tasks."""
MAX_TASK_PANELS = 12
"""Tasks with a panel each, at most."""

MAX_DOTS = 1500
"""Dots in one panel, at most."""

Dot = tuple[str, str, float, float, str]
"""Method, label, x, y and text of a dot."""

_COSTS = (("whole_seconds", "time of a run", "seconds", 1.0), ("memory_bytes", "memory stored", "MiB", 2.0**20))


def make_curve_panels(matrix: pd.DataFrame) -> dict[str, list[Panel]]:
    """Make the panels of each scenario: mean score, forgetting so far, and score of each task."""
    panels = {scenario: _curves(matrix, scenario) for scenario in find_scenarios(matrix)}
    return {scenario: curves for scenario, curves in panels.items() if curves}


def _curves(matrix: pd.DataFrame, scenario: str) -> list[Panel]:
    rows, names, styles = select_trained(matrix, scenario), task_names(matrix), assign_styles(matrix)
    panels = _panel(MEANS[0], "score, %", average_seen_tasks(rows), styles)
    if count_tasks(matrix) > 1:
        panels += _panel(MEANS[1], "points, mean over old tasks", average_forgetting(rows), styles, -100)
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


def _panel(caption: str, note: str, rows: pd.DataFrame, styles: Styles, least: float = 0) -> list[Panel]:
    """Draw a line per method: means over runs, with 95 % intervals if there are few methods, from `least` to 100."""
    points = []
    for name, _, _ in styles:
        means = rows[rows["method"] == name].groupby("after_task", sort=True)["value"].agg(["mean", "std", "count"])
        margins = [t_half_width(int(row["count"]), float(row["std"])) for _, row in means.iterrows()]
        has_bands = len(styles) <= INKS
        points += line("after", name, [*means.index], [*means["mean"]], "", margins if has_bands else None)
    for point in points:  # scores end at 0 and 100, which the axis of few runs would leave far behind
        if point["low"] is not None:
            point |= {"low": max(point["low"], least), "high": min(point["high"], 100)}
    return panel(caption, note, "after", points, styles)


def make_dot_panel(caption: str, note: str, axis: str, dots: Iterable[Dot], styles: Styles) -> list[Panel]:
    """Make a panel of the finite dots, thinned beyond `MAX_DOTS`; none for fewer than two."""
    methods = {name for name, _, _ in styles}
    known = [dot for dot in dots if dot[0] in methods and math.isfinite(dot[2]) and math.isfinite(dot[3])]
    if len(known) < 2:
        return []
    points = [
        {"series": method, "part": "", "what": label, "x": round_value(x), "value": round_value(y), "shown": text}
        for method, label, x, y, text in (known[i] for i in thin_indices(len(known), MAX_DOTS))
    ]
    return [{**item, "kind": "dots"} for item in panel(caption, note, axis, points, styles)]


def make_metric_panels(metrics: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """Plot AP over FGT, a dot per run, for each scenario."""
    names, panels = run_names(matrix), []
    for scenario in find_scenarios(matrix):
        rows = metrics[metrics["scenario"] == scenario]
        by_run = rows.pivot_table(index=RUN_KEYS, columns="metric", values="value", sort=False)
        dots = []
        for (method, seed, order), row in by_run.iterrows():
            x, y = row.get("forgetting", math.nan), row.get("average_performance", math.nan)
            label = names.get((seed, order), f"seed {seed}")
            dots.append((method, label, x, y, f"FGT {format_fixed(x)}, AP {format_fixed(y)}"))
        note = f"AP (%) over FGT (points), {SCENARIOS[scenario]}"
        panels += make_dot_panel("AP and forgetting", note, "FGT, points", dots, assign_styles(matrix))
    return panels


def make_cost_panels(totals: pd.DataFrame, matrix: pd.DataFrame, scores: Mapping[str, float], name: str) -> list[Panel]:
    """Plot the score `name` over seconds and over stored bytes, a dot per method."""
    panels = []
    for column, title, unit, scale in _COSTS:
        costs = {method: cost / scale for method, cost in totals[column].dropna().items() if method in scores}
        dots = []
        for method, x in costs.items():
            text = f"{labels.number(x, 3)} {unit}, {name} {format_fixed(scores[method])}"
            dots.append((method, "mean over runs", x, scores[method], text))
        if len(set(map(round_value, costs.values()))) > 1:
            panels += make_dot_panel(f"{name}, by {title}", f"AP (%) over {unit}", unit, dots, assign_styles(matrix))
    return panels
