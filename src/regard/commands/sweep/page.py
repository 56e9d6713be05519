"""Report on a sweep as one self-contained HTML file: tables, and curves with a line for each combination."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.sweep import words
from regard.commands.sweep.means import METRICS, Combination, Comparison, format_metric
from regard.report import labels
from regard.report.arrays import Floats
from regard.report.labels import format_value
from regard.report.page import Command, Group, Page, Panels, Record, Section, Table, Tables
from regard.report.panels import LINES, Panel, assign_styles, last_value, line, numeric_column, panel, thinning_note

_AGAIN = "Trials that have finished in the sweep’s folder are not run twice."


def sweep_page(trials: pd.DataFrame, record: dict[str, Any], histories: Mapping[str, pd.DataFrame]) -> str:
    """Return the comparison of all combinations as one self-contained HTML file.

    `trials` has a row for each finished trial, `record` is the metadata in `sweep.json`, and `histories` has the curves
    of each trial by its key.
    """
    comparison = Comparison.of(trials, record)
    curves = Panels(curve_panels(comparison.combinations, histories), "panels", fit=True)
    differences, failures = Tables(_differences(comparison)), Group([_unfinished(comparison)], "texts")
    title = f"Difference from {comparison.combinations[0].name}"
    provenance = {key: value for key, value in record.items() if key not in ("trials", "command_line")}
    return Page(
        eyebrow="Regard · sweep",
        title=words.write_title(comparison),
        ledes=words.write_ledes(comparison),
        key_figures=words.make_key_figures(comparison),
        warnings=words.write_warnings(comparison),
        sections=[
            Section("means", "In numbers", [_means(comparison)], words.describe_means(comparison)),
            Section("curves", "While training", [curves], _about_curves(comparison, histories)),
            Section("differences", title, [differences], words.describe_differences(comparison)),
            Section("unfinished", "Trials without a result", [failures]),
            Section("again", "How to run it again", [Command(record.get("command_line", ""))], _AGAIN),
            Section("provenance", "Provenance", [Record(provenance)]),
        ],
        record=record,
    ).html()


def _means(comparison: Comparison) -> Table:
    """Make a row for each combination: seeds, then each metric's mean ± standard error."""
    rows, metrics = [], comparison.metrics
    has_emergence = words.EMERGENCE in comparison.trials
    for item in comparison.combinations if metrics else []:
        means = [format_metric(item.rows, metric, unit) for metric, (_, unit) in metrics.items()]
        emergence = [words.describe_emergence(item)] if has_emergence else []
        rows.append((item.name, "", [words.count_seeds(item), *means, *emergence]))
    titles = [title for title, _ in metrics.values()]
    head = ["Combination", "Seeds", *titles, *(["Sink emerged"] if has_emergence else [])]
    return Table(rows, head, "Means over seeds by combination")


def _about_curves(comparison: Comparison, histories: Mapping[str, pd.DataFrame]) -> str:
    parts, num_combinations = [], len(comparison.combinations)
    if words.has_seeds(comparison):
        parts.append("Means over seeds, at the steps that every seed has; band: ± standard error.")
    if num_combinations > LINES:
        parts.append(f"Only the first {LINES} of {num_combinations} combinations are drawn.")
    parts.append(thinning_note([len(frame) for frame in histories.values()], "each trial’s history.parquet"))
    return " ".join(part for part in parts if part)


def _differences(comparison: Comparison) -> list[Table]:
    """Make a table for each metric, with the combinations that can be compared with the first one."""
    tables = []
    for metric, (title, unit) in comparison.metrics.items():
        rows = [(name, "", words.format_difference(item, unit)) for name, item in comparison.differences(metric)]
        tables.append(Table(rows, ["Combination", "Difference", "95 % interval", ""], f"{title}: differences", title))
    return [table for table in tables if table]


def _unfinished(comparison: Comparison) -> Table:
    keys = ("state", "attempts", "error")
    rows = [(name, seed, [format_value(trial[key]) for key in keys]) for name, seed, trial in comparison.unfinished]
    return Table(rows, ["Trial", "State", "Attempts", "Error"], "Trials without a result")


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
    note = _note([frame for of_name in frames.values() for frame in of_name], metric)
    return panel(title, note, axis, points, assign_styles(names))


def _note(frames: Sequence[pd.DataFrame], metric: str) -> str:
    """Describe the unit; for α_0 the value of uniform attention, if all runs have the same."""
    if metric in ("valid_loss", "loss"):
        return "nats per token"
    if _CURVES[metric] == "tasks":
        return "mean score of the tasks learnt so far, %"
    if metric != "alpha_first":
        where = ", position 0" if metric == "sink_rate" else ""
        return f"% of heads × samples{where}" if METRICS[metric][1] == "%" else "largest of all layers"
    values = (last_value(frame, "alpha_uniform") for frame in frames)
    known = {f"{value:.6g}" for value in values if value is not None}
    uniform = f"uniform attention: {labels.number(float(known.pop()), 3)}" if len(known) == 1 else ""
    return labels.join(["mean over heads, position 0", uniform], "; ")


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
