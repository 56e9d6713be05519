"""A sweep over runs of training as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep import words
from regard.commands.sweep.charts import LINES, curve_panels
from regard.commands.sweep.means import Combination
from regard.report import labels
from regard.report.page import Command, Group, Page, Panels, Record, Section, Table, Tables
from regard.report.panels import thinning_note
from regard.report.words import format_value


def sweep_page(trials: pd.DataFrame, record: dict[str, Any], histories: Mapping[str, pd.DataFrame]) -> str:
    """Return the comparison of all combinations as one self-contained HTML file.

    Args:
        trials: A row for each finished trial, in the schema of `trials.parquet`.
        record: The metadata in `sweep.json`. It may add `command_line`.
        histories: The tables of `history.parquet` by the keys of the trials.

    Raises:
        UserError: There is no trial, a column is missing, or a trial stands twice.
    """
    sweep_means.check_trials(trials, record)
    found = sweep_means.combinations(trials, record)
    metrics = sweep_means.metrics(trials)
    curves = Panels(curve_panels(found, histories), "panels", fit=True)
    differences, failures = Tables(_differences(found, metrics)), Group([_unfinished(trials, record)], "texts")
    return Page(
        eyebrow="Regard · sweep",
        title=words.title(record),
        ledes=words.ledes(found, metrics, record, trials),
        key_figures=words.key_figures(found, metrics),
        warnings=words.warnings(found, trials, record),
        sections=[
            Section("means", "In numbers", [_means(found, metrics)], words.about_means(found, metrics)),
            Section("curves", "While training", [curves], _about_curves(found, histories)),
            Section(
                "differences",
                f"Difference to {found[0].name}",
                [differences],
                words.about_differences(found, metrics),
            ),
            Section("unfinished", "Trials without a result", [failures]),
            Section("again", "How to run it again", [Command(str(record.get("command_line") or ""))], _AGAIN),
            Section("provenance", "Provenance", [Record(_rest(record))]),
        ],
        record=record,
    ).html()


_AGAIN = "Trials that have finished in the sweep’s folder are not run twice."


def _means(found: Sequence[Combination], metrics: Mapping[str, tuple[str, str]]) -> Table:
    """A row for each combination: seeds, then each metric's mean ± standard error."""
    rows, watched = [], any(words.EMERGENCE in one.rows for one in found)
    for one in found if metrics else []:
        cells = [sweep_means.shown(sweep_means.mean(one.rows, metric), unit) for metric, (_, unit) in metrics.items()]
        emerged = [words.emerged(one)] if watched else []
        rows.append((one.name, "", [words.seeds_of(one), *cells, *emerged]))
    head = ["Combination", "Seeds", *(name for name, _ in metrics.values()), *(["Sink emerged"] if watched else [])]
    return Table(rows, head, "Means over seeds by combination")


def _about_curves(found: Sequence[Combination], histories: Mapping[str, pd.DataFrame]) -> str:
    several = any(len(one.rows) > 1 for one in found)
    parts = ["Means over seeds, at the steps that every seed has; band: ± standard error." if several else ""]
    parts += [f"Only the first {LINES} of {len(found)} combinations are drawn."] if len(found) > LINES else []
    parts.append(thinning_note([len(frame) for frame in histories.values()], "each trial’s history.parquet"))
    return " ".join(part for part in parts if part)


def _differences(found: Sequence[Combination], metrics: Mapping[str, tuple[str, str]]) -> list[Table]:
    """A table for each metric, with the combinations that can be compared with the first one."""
    tables = []
    for metric, (name, unit) in metrics.items():
        rows = []
        for one in found[1:] if metric not in sweep_means.TIMED else []:
            difference = sweep_means.difference(found[0].rows, one.rows, metric)
            if difference is not None:
                rows.append((one.name, "", words.difference_cells(difference, unit)))
        tables.append(Table(rows, ["Combination", "Difference", "95 % interval", ""], f"{name}: differences", name))
    return [table for table in tables if table]


def _unfinished(trials: pd.DataFrame, record: Mapping[str, Any]) -> Table:
    rows = [
        (
            sweep_means.name_of(labels.section(trial, "values")),
            f"seed {format_value(trial.get('seed'))}",
            [format_value(trial.get(key)) for key in ("state", "attempts", "error")],
        )
        for trial in sweep_means.unfinished(trials, record)
    ]
    return Table(rows, ["Trial", "State", "Attempts", "Error"], "Trials without a result")


def _rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """What no other section shows."""
    return {key: value for key, value in record.items() if key not in ("trials", "command_line")}
