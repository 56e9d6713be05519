"""Panels of a report on a sweep: curves over steps, a line for each combination."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from regard.commands.sweep.means import METRICS, Combination
from regard.report import labels
from regard.report.arrays import Floats
from regard.report.panels import Panel, last_value, line, numeric_column, panel

INKS, STROKES = 6, 3
LINES = INKS * STROKES
"""Combinations that are drawn, at most: each has its own ink and stroke."""

_CURVES = {
    **dict.fromkeys(("valid_loss", "sink_rate", "alpha_first", "virtual_sink_rate", "norm_ratio"), "step"),
    **dict.fromkeys(("average_performance_til", "average_performance_cil"), "tasks"),
}
"""The metrics that are drawn, each over its axis."""


def curve_panels(combinations: Sequence[Combination], histories: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """Make a panel for each metric in the histories, else one for the training loss; bands are ± standard errors."""
    panels = {metric: _panel(combinations, histories, metric, *METRICS[metric]) for metric in _CURVES}
    if not panels["valid_loss"]:
        panels["valid_loss"] = _panel(combinations, histories, "loss", "Training loss", "")
    return [item for metric_panels in panels.values() for item in metric_panels]


def _panel(
    combinations: Sequence[Combination], histories: Mapping[str, pd.DataFrame], metric: str, title: str, unit: str
) -> list[Panel]:
    axis, points = _CURVES.get(metric, "step"), []
    frames = {item.name: [histories[key] for key in item.rows["key"] if key in histories] for item in combinations}
    names = list(frames)[:LINES]
    for name in names:
        steps, mean, error = over_seeds(frames[name], metric, axis)
        points += line(axis, name, steps, mean, unit, error)
    styles = [(name, i % INKS, i // INKS) for i, name in enumerate(names)]
    note = _note([frame for of_name in frames.values() for frame in of_name], metric)
    return panel(title, note, axis, points, styles)


def _note(frames: Sequence[pd.DataFrame], metric: str) -> str:
    """Describe the unit; for α_1 the value of uniform attention, if all runs have the same."""
    if metric in ("valid_loss", "loss"):
        return "nats per token"
    if _CURVES[metric] == "tasks":
        return "mean score of the tasks learnt so far, %"
    if metric != "alpha_first":
        return "% of heads × samples" if METRICS[metric][1] == "%" else "largest of all layers"
    values = (last_value(frame, "alpha_uniform") for frame in frames)
    known = {f"{value:.6g}" for value in values if value is not None}
    return f"uniform attention: {labels.number(float(known.pop()), 3)}" if len(known) == 1 else ""


def over_seeds(frames: Sequence[pd.DataFrame], metric: str, axis: str = "step") -> tuple[Floats, Floats, Floats]:
    """Return the steps at which every run that has the metric has a value, the mean over runs, its standard error."""
    runs = [run for run in (_finite_values(frame, metric, axis) for frame in frames) if len(run)]
    if not runs:
        empty = np.empty(0)
        return empty, empty, empty
    table = pd.concat(runs, axis=1, join="inner").sort_index()
    values = table.to_numpy(dtype=np.float64)
    count = values.shape[1]
    error = values.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else np.full(len(values), np.nan)
    return table.index.to_numpy(dtype=np.float64), values.mean(axis=1), np.asarray(error)


def _finite_values(frame: pd.DataFrame, metric: str, axis: str) -> pd.Series:
    values, steps = numeric_column(frame, metric), numeric_column(frame, axis)
    is_finite = np.isfinite(values) & np.isfinite(steps)
    run = pd.Series(values[is_finite], index=steps[is_finite])
    return run[~run.index.duplicated(keep="last")]
