"""Runs of `regard measure` side by side: their table, what to know of it, and the page."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import rich.console
import rich.table
from rich.text import Text

from regard.commands.measure.page import chart_sections, closing_sections, lede, payload
from regard.commands.measure.unpaired import RowKey, list_unpaired
from regard.errors import UserError
from regard.report import labels
from regard.report.arrays import Measure, heads, layers, measures, nanmean
from regard.report.labels import join
from regard.report.page import Page, Section, Table, read_asset

if TYPE_CHECKING:
    from regard.commands.measure.result import MeasureResult

Runs = Mapping[str, tuple[pd.DataFrame, dict[str, Any]]]
"""Tables and metadata by the names of the runs."""
KEYS = ["statistic", "site", "epsilon", "scope", "position"]
ADDED = ["difference", "standard_error"]
MODEL, MEAN_HEADS, MEAN_LAYERS = "model", "mean over layers and heads", "mean over layers"
_TABLE = (
    "Values of the whole model where measured, else means over layers and heads, without the embeddings (layer −1)."
)
_ERROR = " Difference: {1} − {0}; SE: its standard error, were the runs' samples independent."


def compare(runs: Mapping[str, "MeasureResult"]) -> tuple[pd.DataFrame, str]:
    """Return a table of measurements by name, a column per run and its notes in `.attrs["notes"]`, and a page."""
    tables = {name: (run.table, run.metadata) for name, run in runs.items()}
    return comparison(tables), comparison_page(tables)


def comparison(runs: Runs) -> pd.DataFrame:
    """Make a row per statistic, site and epsilon: `KEYS`, the value of each run, and for two runs `ADDED`.

    The standard error of the difference is √(a² + b²), as of independent samples; null for means over heads. `scope` is
    the whole model if measured, else the mean over layers (without embeddings) and heads. `position` is null for values
    of the whole sequence, else the first. `frame.attrs["notes"]` holds `caveats`, and what cannot be paired. Raises
    UserError for runs without a name or a row.
    """
    measures_by_run = _measures(runs)
    frame = _frame(measures_by_run)
    frame.attrs["notes"] = _notes(runs, measures_by_run)
    return frame


def _notes(runs: Runs, measures_by_run: Mapping[str, Sequence[Measure]]) -> list[str]:
    keys = {name: [key for key, _, _ in map(_row, of_run) if key] for name, of_run in measures_by_run.items()}
    return [*caveats({name: metadata for name, (_, metadata) in runs.items()}), *list_unpaired(keys)]


def caveats(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List differences in data and settings that affect the values, one sentence each."""
    checks = [
        ("data", "length", "sequence length", "sink rates depend on it"),
        ("data", "source", "text", "values are of different texts"),
        ("data", "sha256", "text's checksum", "values are of different texts"),
        ("data", "input", "input", "values are of different inputs"),
        ("data", "bos", "beginning-of-sequence token", "sinks often stand on it"),
        ("data", "chat_template_sha256", "chat template's checksum", "values are of different texts"),
        ("data", "chat_template_date", "date that the chat template writes", "values are of different texts"),
        ("data", "samples", "number of samples", "standard errors differ with it"),
        ("data", "frames", "frames of a video", "values are of different inputs"),
        ("data", "prompt", "prompt", "values are of different inputs"),
        ("config", "part", "part of the model", "its layers are other ones"),
        ("config", "layer_ids", "layers", "means over layers are of other layers"),
        ("config", "seed", "seed", "what is measured is drawn by it"),
        ("model", "dtype", "type of the weights", "values are rounded to it"),
        ("config", "minimum_queries", "queries that must see a sink", "sink rates depend on it"),
        ("config", "perturb", "replaced token", "the perturbation spread depends on it"),
    ]
    notes = []
    versions = {name: str(metadata.get("version")) for name, metadata in records.items()}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name}: {version}" for name, version in versions.items())
        notes.append(f"The runs are of different versions of Regard ({listed}).")
    for part, key, quantity, why in checks:
        values = {name: labels.section(metadata, part).get(key) for name, metadata in records.items()}
        if key == "layer_ids" and any(value is not None for value in values.values()):
            values = {name: value or "all" for name, value in values.items()}
        if key == "seed" and not any(map(_is_drawn, records.values())):
            continue
        if len({str(value) for value in values.values() if part == "data" or value is not None}) > 1:
            described = ", ".join(f"{name}: {_short(value)}" for name, value in values.items())
            notes.append(f"The runs differ in {quantity} ({described}); {why}.")
    return notes


def _is_drawn(metadata: Mapping[str, Any]) -> bool:
    """Return whether the seed chose what was measured: windows, or some of more images, sounds or videos."""
    read, config = labels.section(metadata, "data"), labels.section(metadata, "config")
    return read.get("input") not in ("images", "audio", "videos") or read.get("samples") == config.get("samples")


def comparison_page(runs: Runs) -> str:
    """Return the comparison as one self-contained HTML file: table, maps on one color scale, curves in one chart."""
    measures_by_run = _measures(runs)
    records = {name: metadata for name, (_, metadata) in runs.items()}
    described: dict[str, Any] = {}
    for metadata in reversed(records.values()):
        described |= labels.section(metadata, "statistics")
    statistics = {"statistics": described}
    provenance = {
        name: {key: part for key, part in metadata.items() if key != "statistics"} for name, metadata in records.items()
    }
    all_measures = [measure for run_measures in measures_by_run.values() for measure in run_measures]
    table = _table(_frame(measures_by_run), list(runs), statistics)
    return Page(
        eyebrow="Regard · comparison",
        title=" against ".join(runs),
        ledes=[join([f"{name}: {labels.model_name(metadata)}", lede(metadata)]) for name, metadata in records.items()],
        warnings=_notes(runs, measures_by_run),
        sections=[
            Section("table", "In numbers", [table], _TABLE + (_ERROR.format(*runs) if len(runs) == 2 else "")),
            *chart_sections(all_measures, multiple_runs=len(runs) > 1),
            *closing_sections(statistics, provenance),
        ],
        data=payload(measures_by_run, statistics),
        script=read_asset("page.js", __package__),
    ).html()


def terminal_table(table: pd.DataFrame) -> rich.console.Group:
    """Return a comparison as a terminal shows it."""
    has_sites = table["site"].nunique() > 1
    numbers = list(table.columns[table.columns.get_loc("position") + 1 :])
    lines = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    lines.add_column("statistic", overflow="fold")
    for column in numbers:
        lines.add_column(Text(str(column).replace("_", " ")), justify="right", overflow="fold")
    for row in table.to_dict("records"):
        parts = [str(row["statistic"])]
        parts += [] if pd.isna(row["epsilon"]) else [f"ε={row['epsilon']:g}"]
        parts += [] if pd.isna(row["position"]) else [f"at {row['position']}"]
        parts += [str(row["site"])] if has_sites else []
        lines.add_row(Text(" ".join(parts)), *("" if pd.isna(row[n]) else f"{row[n]:.4g}" for n in numbers))
    means = (
        "Of the whole model where that is measured, else means over layers (not the embeddings) and heads; at N: of "
        "position N."
    )
    return rich.console.Group(lines, Text(means, style="italic"))


def _measures(runs: Runs) -> dict[str, list[Measure]]:
    if not runs:
        raise UserError("expected at least one run to compare; none came")
    reserved = sorted(set(runs) & {*KEYS, *ADDED})
    if reserved:
        raise UserError(f"expected run names other than {', '.join(KEYS + ADDED)}; got {', '.join(reserved)}")
    return {name: measures(table) for name, (table, _) in runs.items()}


def _frame(measures_by_run: Mapping[str, Sequence[Measure]]) -> pd.DataFrame:
    names = list(measures_by_run)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    errors: dict[tuple[Any, ...], list[float]] = {}
    for name, run_measures in measures_by_run.items():
        for measure in run_measures:
            key, value, error = _row(measure)
            if key is not None:
                rows.setdefault(key, dict(zip(KEYS, key, strict=True)))[name] = value
                errors.setdefault(key, []).append(error)
    if len(names) == 2:
        first, second = names
        for row, row_errors in zip(rows.values(), errors.values(), strict=True):
            if len(row_errors) == 2:
                row["difference"] = row[second] - row[first]
                row["standard_error"] = np.hypot(row_errors[0], row_errors[1])
    frame = pd.DataFrame(list(rows.values()), columns=[*KEYS, *names, *(ADDED if len(names) == 2 else [])])
    numeric = [name for name in frame.columns if name not in ("statistic", "site", "scope", "position")]
    return frame.astype({"position": "Int64", **dict.fromkeys(numeric, "float64")})


def _row(measure: Measure) -> tuple[RowKey | None, float, float]:
    """Return the key of a measure's one value, the value and its standard error; no key if it has none."""
    whole, by_position = measure.block(), measure.block("position")
    if whole is not None:
        return RowKey(*measure.key, MODEL, None), float(whole.values), float(whole.errors)
    if by_position is not None:
        position = int(by_position.coordinates["position"][0])
        return RowKey(*measure.key, MODEL, position), float(by_position.values[0]), float(by_position.errors[0])
    by_head = heads(measure)
    values = by_head or layers(measure)
    if values is None:
        return None, np.nan, np.nan
    mean = float(nanmean(values.keep("layer", values.coordinates["layer"] >= 0).values))
    scope = MEAN_LAYERS if by_head is None else MEAN_HEADS
    return RowKey(*measure.key, scope, values.position), mean, np.nan


def _table(frame: pd.DataFrame, names: Sequence[str], metadata: Mapping[str, Any]) -> Table:
    multiple_sites = frame["site"].nunique() > 1
    head = ["Statistic", *names, *(["Difference", "SE"] if len(names) == 2 else [])]
    rows = []
    for row in frame.to_dict("records"):
        measure = Measure(row["statistic"], row["site"], None if pd.isna(row["epsilon"]) else row["epsilon"], {})
        scope = row["scope"] + ("" if pd.isna(row["position"]) else f", position {row['position']}")
        unit = labels.unit(measure.statistic, metadata)
        values = [labels.with_unit(row[name], unit) for name in names]
        if len(names) == 2:
            points = " points" if unit == "%" and np.isfinite(row["difference"]) else ""
            values += [labels.number(row["difference"], 3) + points, labels.number(row["standard_error"], 2)]
        scope += f", in {unit}" if unit not in ("", "%") else ""
        rows.append((labels.name(measure, metadata, with_site=multiple_sites), scope, values))
    return Table(rows, head, "The runs in numbers")


def _short(value: Any) -> str:
    text = "not told" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
