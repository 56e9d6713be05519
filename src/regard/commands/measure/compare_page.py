"""Several measurements side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.measure.page import chart_sections, closing_sections, lede
from regard.errors import UserError
from regard.report import labels
from regard.report.arrays import Block, Measure, heads, layers, measures, nanmean
from regard.report.page import Page, Section, Table, read_asset
from regard.report.payload import payload

KEYS = ["statistic", "site", "epsilon", "scope", "position"]
ADDED = ["difference", "standard_error"]
MODEL, MEAN_HEADS, MEAN_LAYERS = "model", "mean over layers and heads", "mean over layers"


@dataclass(frozen=True)
class _Value:
    scope: str
    position: int | None
    value: float
    error: float


def comparison(runs: Mapping[str, tuple[pd.DataFrame, dict[str, Any]]]) -> pd.DataFrame:
    """One row per statistic, site and epsilon: each run's value; for two runs the difference and its standard error.

    Columns: statistic, site, epsilon, scope, position, one per run, and for two runs `difference` (second minus first)
    and `standard_error`. `scope` says what the value is: of the whole model where the table has such a row, else the
    mean over layers and heads, or over layers (the embeddings, layer -1, left out). A value is of the whole sequence
    where measured, else at `position`, the first. Runs that differ in scope or position get rows of their own.

    The standard error is √(a² + b²), right for runs on independent samples; runs on the same texts are paired, and it
    is then mostly too large. It is null where a run has none, as every mean over heads. What keeps the runs from being
    comparable stands in `frame.attrs["notes"]`, see `caveats`. Raises UserError on no run, an empty table, or a run
    named like a column.
    """
    _check_names(list(runs))
    found = {name: measures(table) for name, (table, _) in runs.items()}
    frame = _frame(found)
    frame.attrs["notes"] = caveats({name: record for name, (_, record) in runs.items()})
    return frame


def caveats(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between the runs' data and settings and moves their values, one sentence each."""
    checks = [
        ("data", "length", "sequence length", "sink rates depend on it"),
        ("data", "source", "text", "values are of different texts"),
        ("data", "sha256", "text's checksum", "values are of different texts"),
        ("data", "input", "input", "values are of different inputs"),
        ("data", "bos", "beginning-of-sequence token", "sinks often stand on it"),
        ("data", "samples", "number of samples", "standard errors differ with it"),
    ]
    notes = []
    for part, key, what, why in checks:
        told = {name: labels.section(record, part).get(key) for name, record in records.items()}
        if len({str(value) for value in told.values()}) > 1:
            each = ", ".join(f"{name}: {_short(value)}" for name, value in told.items())
            notes.append(f"The runs differ in {what} ({each}); {why}.")
    return notes


def comparison_page(runs: Mapping[str, tuple[pd.DataFrame, dict[str, Any], pd.DataFrame | None]]) -> str:
    """The runs side by side as one self-contained HTML file: table, maps on one colour scale, curves in one chart."""
    _check_names(list(runs))
    found = {name: measures(table) for name, (table, _, _) in runs.items()}
    records = {name: record for name, (_, record, _) in runs.items()}
    statistics = _merged(records)
    every = [measure for of_run in found.values() for measure in of_run]
    table = _table(_frame(found), list(runs), statistics)
    return Page(
        eyebrow="Regard · comparison",
        title=" against ".join(runs),
        ledes=_ledes(records),
        warnings=caveats(records),
        sections=[
            Section("table", "In numbers", [table], _TABLE),
            *chart_sections(every, several=len(runs) > 1),
            *closing_sections(statistics, _without_labels(records)),
        ],
        data=payload(found, statistics),
        script=read_asset("page.js", __package__),
    ).html()


_TABLE = (
    "Values of the whole model where measured, else means over layers and heads. "
    "SE: the difference's standard error, were the runs' samples independent."
)


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise UserError("expected at least one run to compare; none came")
    taken = sorted(set(names) & {*KEYS, *ADDED})
    if taken:
        raise UserError(f"expected run names other than {', '.join(KEYS + ADDED)}; got {', '.join(taken)}")


def _frame(found: Mapping[str, Sequence[Measure]]) -> pd.DataFrame:
    rows: dict[tuple[Any, ...], dict[str, _Value]] = {}
    for name, of_run in found.items():
        for measure in of_run:
            one = _overall(measure)
            if one is not None:
                rows.setdefault((*measure.key, one.scope, one.position), {})[name] = one
    names = list(found)
    frame = pd.DataFrame([_row(key, row, names) for key, row in rows.items()], columns=_columns(names))
    frame["position"] = frame["position"].astype("Int64")
    numeric = [name for name in frame.columns if name not in ("statistic", "site", "scope", "position")]
    return frame.astype(dict.fromkeys(numeric, "float64"))


def _columns(names: Sequence[str]) -> list[str]:
    return [*KEYS, *names, *(ADDED if len(names) == 2 else [])]


def _row(key: tuple[Any, ...], row: Mapping[str, _Value], names: Sequence[str]) -> dict[str, Any]:
    written = dict(zip(KEYS, key, strict=True))
    for name in names:
        written[name] = row[name].value if name in row else np.nan
    if len(names) == 2:
        first, second = (row.get(name) for name in names)
        if first is not None and second is not None:
            written["difference"] = second.value - first.value
            written["standard_error"] = np.hypot(first.error, second.error)
    return written


def _overall(measure: Measure) -> _Value | None:
    whole, by_position = measure.block(), measure.block("position")
    if whole is not None:
        return _Value(MODEL, None, float(whole.values), float(whole.errors))
    if by_position is not None:
        position = int(by_position.coordinates["position"][0])
        return _Value(MODEL, position, float(by_position.values[0]), float(by_position.errors[0]))
    by_head = heads(measure)
    if by_head is not None:
        return _Value(MEAN_HEADS, by_head.position, float(nanmean(_no_embeddings(by_head.block).values)), np.nan)
    by_layer = layers(measure)
    if by_layer is not None:
        return _Value(MEAN_LAYERS, by_layer.position, float(nanmean(_no_embeddings(by_layer.block).values)), np.nan)
    return None


def _no_embeddings(block: Block) -> Block:
    return block.keep("layer", block.coordinates["layer"] >= 0)


def _table(frame: pd.DataFrame, names: Sequence[str], record: Mapping[str, Any]) -> Table:
    several = frame["site"].nunique() > 1
    head = ["Statistic", *names, *(["Difference", "SE"] if len(names) == 2 else [])]
    rows = []
    for row in frame.to_dict("records"):
        measure = Measure(row["statistic"], row["site"], None if pd.isna(row["epsilon"]) else row["epsilon"], {})
        scope = row["scope"] + ("" if pd.isna(row["position"]) else f", position {row['position']}")
        unit = labels.unit(measure.statistic, record)
        values = [labels.with_unit(row[name], unit) for name in names]
        if len(names) == 2:
            values += [labels.number(row["difference"], 3), labels.number(row["standard_error"], 2)]
        rows.append((labels.name(measure, record, with_site=several), scope, values))
    return Table(rows, head, "The runs in numbers")


def _ledes(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    parts = {name: [labels.model_name(record), lede(record)] for name, record in records.items()}
    return [f"{name}: {', '.join(part for part in of_run if part)}" for name, of_run in parts.items()]


def _merged(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for record in records.values():
        told = {**labels.section(record, "statistics"), **told}
    return {"statistics": told}


def _without_labels(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {key: part for key, part in record.items() if key != "statistics"} for name, record in records.items()
    }


def _short(value: Any) -> str:
    text = "not told" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
