"""Report page of `regard measure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.measure.key_figures import key_figures, top_tokens
from regard.report import labels
from regard.report.arrays import Measure, measures
from regard.report.page import Box, Explorer, Glossary, Page, Record, Section, Table, read_asset
from regard.report.payload import payload, thinned_length
from regard.report.words import format_value, join, run_time

_TOKENS = (
    "How often a head's strongest column stood on this token at this position: "
    "the share of samples, a mean over the heads."
)
_CLICK = "Click a cell, or type its layer and head, to see that head over positions."
_THINNED = "To keep the page small it holds {} positions, the first ones and then ever fewer; the table has all."


def page(table: pd.DataFrame, metadata: dict[str, Any], tokens: pd.DataFrame | None) -> str:
    """Return the report as one self-contained HTML file. Raises UserError if the table is empty.

    The tables have the schemas of `statistics.parquet` and `tokens.parquet`, the metadata that of `results.json`.
    """
    all_measures = measures(table)
    name = labels.model_name(metadata)
    return Page(
        eyebrow="Regard · attention report",
        title=name,
        ledes=[lede(metadata)],
        key_figures=key_figures(all_measures, metadata, tokens),
        sections=[
            *chart_sections(all_measures, multiple_runs=False),
            Section("tokens", "Sink tokens", [_tokens(top_tokens(tokens))], _TOKENS),
            *closing_sections(metadata, metadata),
        ],
        record=metadata,
        data=payload({name: all_measures}, metadata),
        script=read_asset("page.js", __package__),
    ).html()


def chart_sections(all_measures: Sequence[Measure], *, multiple_runs: bool) -> list[Section]:
    """Make the sections that the page's script fills, if they have values."""
    blocks = [(axes, block) for measure in all_measures for axes, block in measure.blocks.items()]
    has_map = any("layer" in axes and len(axes) > 1 for axes, _ in blocks)
    layers = [block.coordinates["layer"] for axes, block in blocks if "layer" in axes]
    embeddings = "Layer \u22121 is the input of the first layer." if any(-1 in ids for ids in layers) else ""
    positions = thinned_length(all_measures)
    thinning = "" if positions is None else f" {_THINNED.format(len(positions))}"
    has_positions = any(axes == ("position",) for axes, _ in blocks)
    return [
        Section("heads", "Layers and heads", [Explorer(has_map, multiple_runs)], f"{_CLICK}{thinning}"),
        Section("layers", "By layer", [Box(bool(layers), ["curves"])], embeddings),
        Section("model", "Whole model, by position", [Box(has_positions, ["models"])]),
    ]


def closing_sections(statistics: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Section]:
    """Make the glossary of statistics, and the rest of the metadata."""
    rest = {key: value for key, value in metadata.items() if key != "statistics"}
    return [
        Section("glossary", "What the statistics are", [Glossary(_glossary(statistics))]),
        Section("provenance", "Provenance", [Record(rest)]),
    ]


def lede(metadata: Mapping[str, Any]) -> str:
    """Describe what was measured, in one line."""
    return join([labels.model_size(metadata), labels.samples(metadata), run_time(metadata, "measured in")], " · ")


def _glossary(metadata: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    entries = []
    for name, fields in labels.section(metadata, "statistics").items():
        facts_by_name = dict(fields) if isinstance(fields, Mapping) else {}
        description = str(facts_by_name.pop("description", ""))
        facts_by_name.pop("title", None)
        facts = [f"{key.capitalize()}: {format_value(value)}." for key, value in facts_by_name.items() if value]
        entries.append((labels.title(name, metadata), name, " ".join([description, *facts]).strip()))
    return entries


def _tokens(rows: pd.DataFrame) -> Table:
    multiple_sites = rows["site"].nunique() > 1
    head = ["Token", *(["Site"] if multiple_sites else []), "Position", "Share"]
    shares = [100 * float(share) for share in rows["share"]]
    cells = []
    for row, share in zip(rows.itertuples(index=False), shares, strict=True):
        site = [labels.site(str(row.site))] if multiple_sites else []
        cells.append((labels.visible(str(row.token)), "", [*site, str(row.position), f"{labels.number(share, 3)} %"]))
    return Table(cells, head, "Sink tokens", bars=shares, code=True)
