"""A sweep over runs of training as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep import words
from regard.commands.sweep.charts import LINES, curve_panels
from regard.commands.sweep.means import Combination
from regard.report import html as markup
from regard.report import labels
from regard.report.page import assemble
from regard.report.panels import specifications, thinning_note


def sweep_page(trials: pd.DataFrame, record: dict[str, Any], histories: Mapping[str, pd.DataFrame]) -> str:
    """The comparison of all combinations as one self-contained HTML file: it fetches nothing.

    `trials` has a row for each finished trial, as `trials.parquet`; `record` is that of `sweep.json`, to which it may
    add `command`; `histories` holds `history.parquet` by the trials' keys. What is empty is not shown. Raises
    UserError where there is no trial, a column is missing, or a trial stands twice.
    """
    sweep_means.check_trials(trials, record)
    found = sweep_means.combinations(trials, record)
    metrics = sweep_means.metrics(trials)
    panels = curve_panels(found, histories)
    title = words.title(record)
    top = markup.header(
        "Regard · sweep",
        title,
        words.ledes(found, metrics, record, trials),
        words.key_figures(found, metrics),
        words.warnings(found, trials, record),
    )
    against = f"Difference to {found[0].name}"
    body = "".join(
        [
            top,
            "<main>",
            markup.section("means", "In numbers", _means(found, metrics), words.about_means(found, metrics)),
            markup.section(
                "curves", "While training", markup.panels("panels", panels, fit=True), _about_curves(found, histories)
            ),
            markup.section(
                "differences", against, _differences(found, metrics), words.about_differences(found, metrics)
            ),
            markup.section("unfinished", "Trials without a result", _unfinished(trials, record)),
            markup.section("again", "How to run it again", _again(record), _AGAIN),
            markup.section("provenance", "Provenance", markup.provenance(_rest(record))),
            "</main>",
            markup.footer(record),
        ]
    )
    data = {"panels": {"panels": panels} if panels else {}, "maps": []}
    return assemble(
        f"{title} · Regard", body, data, specifications=specifications(), script=markup.asset("training.js")
    )


_AGAIN = "Trials that have finished in the sweep’s folder are not run twice."


def _means(found: Sequence[Combination], metrics: Mapping[str, tuple[str, str]]) -> str:
    """A row for each combination: seeds, then each metric's mean ± standard error."""
    if not metrics:
        return ""
    rows, watched = [], any(words.EMERGENCE in one.rows for one in found)
    for one in found:
        cells = [sweep_means.shown(sweep_means.mean(one.rows, metric), unit) for metric, (_, unit) in metrics.items()]
        emerged = [words.emerged(one)] if watched else []
        rows.append((one.name, "", [words.seeds_of(one), *cells, *emerged]))
    head = ["Combination", "Seeds", *(name for name, _ in metrics.values()), *(["Sink emerged"] if watched else [])]
    return markup.values_table(head, rows, "Means over seeds by combination")


def _about_curves(found: Sequence[Combination], histories: Mapping[str, pd.DataFrame]) -> str:
    several = any(len(one.rows) > 1 for one in found)
    parts = ["Means over seeds, at the steps that every seed has; band: ± standard error." if several else ""]
    parts += [f"Only the first {LINES} of {len(found)} combinations are drawn."] if len(found) > LINES else []
    parts.append(thinning_note([len(frame) for frame in histories.values()], "each trial’s history.parquet"))
    return " ".join(part for part in parts if part)


def _differences(found: Sequence[Combination], metrics: Mapping[str, tuple[str, str]]) -> str:
    """A table for each metric, with the combinations that can be held against the first one."""
    tables = []
    for metric, (name, unit) in metrics.items():
        rows: list[tuple[str, str, list[str]]] = []
        for one in found[1:] if metric not in sweep_means.TIMED else []:
            difference = sweep_means.difference(found[0].rows, one.rows, metric)
            if difference is not None:
                rows.append((one.name, "", words.difference_cells(difference, unit)))
        head = ["Combination", "Difference", "95 % interval", ""]
        if rows:
            tables.append((name, markup.values_table(head, rows, f"{name}: differences")))
    return markup.tables(tables)


def _unfinished(trials: pd.DataFrame, record: Mapping[str, Any]) -> str:
    rows = [
        (
            sweep_means.name_of(labels.section(one, "values")),
            f"seed {markup.in_words(one.get('seed'))}",
            [markup.in_words(one.get(key)) for key in ("state", "attempts", "error")],
        )
        for one in sweep_means.unfinished(trials, record)
    ]
    table = markup.values_table(["Trial", "State", "Attempts", "Error"], rows, "Trials without a result")
    return f'<div class="texts">{table}</div>' if rows else ""


def _again(record: Mapping[str, Any]) -> str:
    return markup.command(str(record["command"])) if record.get("command") else ""


def _rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """What no other section shows."""
    return {key: value for key, value in record.items() if key not in ("trials", "command")}
