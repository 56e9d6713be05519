"""The panels of a report on a sweep: curves over steps, a line for each combination."""

from __future__ import annotations

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
"""The most combinations that are drawn: each has an ink and a stroke of its own."""

_CURVES = {
    **dict.fromkeys(("valid_loss", "sink_rate", "alpha_first", "virtual_sink_rate", "norm_ratio"), "step"),
    **dict.fromkeys(("average_performance_til", "average_performance_cil"), "tasks"),
}
"""The metrics that are drawn, each over its axis."""


def curve_panels(found: Sequence[Combination], histories: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """A panel for each metric that was watched, else one for the training loss; bands are ± standard errors."""
    panels = [one for metric in _CURVES for one in _panel(found, histories, metric, *METRICS[metric])]
    watched_loss = any(one["caption"] == METRICS["valid_loss"][0] for one in panels)
    return panels if watched_loss else [*_panel(found, histories, "loss", "Training loss", ""), *panels]


def _panel(
    found: Sequence[Combination], histories: Mapping[str, pd.DataFrame], metric: str, title: str, unit: str
) -> list[Panel]:
    drawn, axis = found[:LINES], _CURVES.get(metric, "step")
    points = []
    for one in drawn:
        places, mean, error = over_seeds(_frames(one, histories), metric, axis)
        points += line(axis, one.name, places, mean, unit, error)
    styles = [(one.name, i % INKS, i // INKS) for i, one in enumerate(drawn)]
    return panel(title, _note(found, histories, metric), axis, points, styles)


def _note(found: Sequence[Combination], histories: Mapping[str, pd.DataFrame], metric: str) -> str:
    """The unit; for α_1 the value of uniform attention, where all runs have the same."""
    if metric in ("valid_loss", "loss"):
        return "nats per token"
    if _CURVES[metric] == "tasks":
        return "mean score of the tasks learnt so far, %"
    if metric != "alpha_first":
        return "% of heads × samples" if METRICS[metric][1] == "%" else "largest of all layers"
    every = [last_value(frame, "alpha_uniform") for one in found for frame in _frames(one, histories)]
    known = {f"{value:.6g}" for value in every if value is not None}
    return f"uniform attention: {labels.number(float(known.pop()), 3)}" if len(known) == 1 else ""


def _frames(one: Combination, histories: Mapping[str, pd.DataFrame]) -> list[pd.DataFrame]:
    keys = [str(key) for key in one.rows["key"]] if len(one.rows) else []
    return [histories[key] for key in keys if key in histories]


def over_seeds(frames: Sequence[pd.DataFrame], metric: str, axis: str = "step") -> tuple[Floats, Floats, Floats]:
    """Steps at which every run that has the metric has a value; the mean over the runs; its standard error."""
    runs = [_known(frame, metric, axis) for frame in frames]
    runs = [run for run in runs if len(run)]
    if not runs:
        empty = np.empty(0)
        return empty, empty, empty
    table = pd.concat(runs, axis=1, join="inner").sort_index()
    values = table.to_numpy(dtype=np.float64)
    count = values.shape[1]
    error = values.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else np.full(len(values), np.nan)
    return table.index.to_numpy(dtype=np.float64), values.mean(axis=1), np.asarray(error)


def _known(frame: pd.DataFrame, metric: str, axis: str) -> pd.Series:
    values, steps = numeric_column(frame, metric), numeric_column(frame, axis)
    kept = np.isfinite(values) & np.isfinite(steps)
    run = pd.Series(values[kept], index=steps[kept])
    return run[~run.index.duplicated(keep="last")]
