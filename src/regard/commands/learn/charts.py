"""The panels of a report on continual learning: curves over tasks, and dots for runs and methods."""

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

SHOWN_TASKS = 12
"""The most tasks with a panel of their own."""

DOTS = 1500
"""The most dots of one panel."""


def curve_panels(matrix: pd.DataFrame) -> dict[str, list[Panel]]:
    """By setting: the mean over the tasks seen, what was forgotten so far, and each task's score, by tasks learnt."""
    return {one: found for one in learn_tables.settings(matrix) if (found := _curves(matrix, one))}


def _curves(matrix: pd.DataFrame, setting: str) -> list[Panel]:
    rows, names = learn_tables.learnt(matrix, setting), learn_tables.task_names(matrix)
    told = learn_tables.styles(learn_tables.methods(matrix))
    seen, lost = _panel("Mean over the tasks seen", "score, %", means_seen(rows), told), []
    if learn_tables.count_tasks(matrix) > 1:
        lost = _panel("Forgotten so far", "points, mean over old tasks", lost_so_far(rows), told)
    each = []
    for index in thin_indices(max(len(names) - 1, 0), SHOWN_TASKS):
        ours = rows[rows["task_index"] == index + 1].rename(columns={"score": "value"})
        place = "" if names[index] == f"Task {index + 1}" else f"task {index + 1}, "
        each += _panel(names[index], f"{place}score, %", ours, told)
    return [*seen, *lost, *each]


def means_seen(rows: pd.DataFrame) -> pd.DataFrame:
    """By run and number of tasks learnt: the mean score of the tasks seen, where all have a score (`value`)."""
    grouped = rows.groupby([*learn_tables.RUN, "after_task"], sort=False)["score"].agg(["mean", "count"]).reset_index()
    return grouped[grouped["count"] == grouped["after_task"]].rename(columns={"mean": "value"})


def lost_so_far(rows: pd.DataFrame) -> pd.DataFrame:
    """By run and number of tasks learnt: the mean of what old tasks lost since they were learnt (`value`)."""
    keys = [*learn_tables.RUN, "task_index"]
    first = rows[rows["after_task"] == rows["task_index"]][[*keys, "score"]].rename(columns={"score": "at_first"})
    old = rows[rows["after_task"] > rows["task_index"]].merge(first, on=keys)
    old = old.assign(value=old["at_first"] - old["score"])
    grouped = old.groupby([*learn_tables.RUN, "after_task"], sort=False)["value"].agg(["mean", "count"]).reset_index()
    return grouped[grouped["count"] == grouped["after_task"] - 1].rename(columns={"mean": "value"})


def _panel(caption: str, note: str, rows: pd.DataFrame, told: Sequence[tuple[str, int, int]]) -> list[Panel]:
    """A line for each method: means over runs, with 95 % intervals unless so many bands would hide each other."""
    points, bands = [], len(told) <= learn_tables.INKS
    for name, _, _ in told:
        ours = rows[rows["method"] == name].groupby("after_task", sort=True)["value"].agg(["mean", "std", "count"])
        half = [
            t_half_width(int(n), float(deviation)) if bands else math.nan
            for deviation, n in zip(ours["std"], ours["count"], strict=True)
        ]
        points += line("after", name, [float(after) for after in ours.index], ours["mean"].tolist(), "", half)
    return panel(caption, note, "after", points, told)


def dots(
    caption: str, note: str, axis: str, points: Iterable[Mapping[str, Any]], told: Sequence[tuple[str, int, int]]
) -> list[Panel]:
    """One panel of dots, none without two of them; beyond `DOTS` they are thinned evenly."""
    drawn = {name for name, _, _ in told}
    found = [dict(point) for point in points if point["series"] in drawn]
    kept = [found[i] for i in thin_indices(len(found), DOTS)]
    return [{**one, "kind": "dots"} for one in panel(caption, note, axis, kept, told)] if len(kept) > 1 else []


def dot(series: str, what: str, x: float, y: float, shown: str) -> list[dict[str, Any]]:
    """A dot; none where a number is missing."""
    across, up = learn_tables.rounded(x), learn_tables.rounded(y)
    if across is None or up is None:
        return []
    return [{"series": series, "part": "", "what": what, "x": across, "value": up, "shown": shown}]


def metric_panels(metrics: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """By setting: how much a run forgot against how well it ended, a dot for each run; none where FGT is missing."""
    told, names, found = learn_tables.styles(learn_tables.methods(matrix)), learn_tables.run_names(matrix), []
    for setting in learn_tables.settings(matrix):
        ours = metrics[metrics["scenario"] == setting]
        wide = ours.pivot_table(index=learn_tables.RUN, columns="metric", values="value", sort=False)
        points = []
        for (method, seed, order), row in wide.iterrows():
            what = names.get((int(seed), str(order)), f"seed {seed}")
            x, y = float(row.get("forgetting", math.nan)), float(row.get("average_performance", math.nan))
            shown = f"FGT {learn_metrics.format_fixed(x)}, AP {learn_metrics.format_fixed(y)}"
            points += dot(str(method), what, x, y, shown)
        note = f"AP (%) over FGT (points), {learn_tables.SETTINGS[setting]}"
        found += dots("Kept and forgotten", note, "FGT, points", points, told)
    return found


def cost_panels(totals: pd.DataFrame, matrix: pd.DataFrame, scores: Mapping[str, float], name: str) -> list[Panel]:
    """The score `name` by method over seconds, and over bytes stored where some differ; a dot for each method."""
    told, found = learn_tables.styles(learn_tables.methods(matrix)), []
    for column, title, unit, scale in _COSTS:
        points = []
        for method, row in totals.iterrows():
            x, y = float(row[column]) / scale, scores.get(str(method), math.nan)
            shown = f"{labels.number(x, 3)} {unit}, {name} {learn_metrics.format_fixed(y)}"
            points += dot(str(method), "mean over runs", x, y, shown)
        if len({point["x"] for point in points}) > 1:
            found += dots(f"{name}, by {title}", f"over {unit}", unit, points, told)
    return found


_COSTS = (("whole_seconds", "time of a run", "seconds", 1.0), ("memory_bytes", "memory kept", "MiB", 2.0**20))
