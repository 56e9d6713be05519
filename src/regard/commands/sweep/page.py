"""Report on a sweep as one self-contained HTML file."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep import words
from regard.commands.sweep.charts import LINES, curve_panels
from regard.commands.sweep.means import Comparison, format_mean
from regard.report.page import Command, Group, Page, Panels, Record, Section, Table, Tables
from regard.report.panels import thinning_note
from regard.report.words import format_value

_AGAIN = "Trials that have finished in the sweep’s folder are not run twice."


def sweep_page(trials: pd.DataFrame, record: dict[str, Any], histories: Mapping[str, pd.DataFrame]) -> str:
    """Return the comparison of all combinations as one self-contained HTML file.

    `trials` has a row for each finished trial, `record` is the metadata in `sweep.json`, and `histories` has the curves
    of each trial by its key.
    """
    comparison = Comparison.of(trials, record)
    curves = Panels(curve_panels(comparison.combinations, histories), "panels", fit=True)
    differences, failures = Tables(_differences(comparison)), Group([_unfinished(comparison)], "texts")
    title = f"Difference to {comparison.combinations[0].name}"
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
        means = [format_mean(sweep_means.mean(item.rows, metric), unit) for metric, (_, unit) in metrics.items()]
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
