"""The report page of `regard measure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.measure.key_figures import key_figures
from regard.commands.measure.tokens import top_tokens
from regard.report import labels
from regard.report.arrays import Measure, measures
from regard.report.page import Box, Explorer, Glossary, Page, Record, Section, Table, read_asset
from regard.report.payload import payload, thinned_length
from regard.report.words import format_value


def page(table: pd.DataFrame, record: dict[str, Any], tokens: pd.DataFrame | None) -> str:
    """Return the report as one self-contained HTML file.

    Args:
        table: Statistics in the schema of `statistics.parquet`.
        record: The metadata in `results.json`. What it lacks is left out.
        tokens: Sink tokens in the schema of `tokens.parquet`, or None.

    Raises:
        UserError: The table is empty.
    """
    every = measures(table)
    name = labels.model_name(record)
    return Page(
        eyebrow="Regard · attention report",
        title=name,
        ledes=[lede(record)],
        key_figures=key_figures(every, record, tokens),
        sections=[
            *chart_sections(every, several=False),
            Section("tokens", "Sink tokens", [_tokens(top_tokens(tokens))], _TOKENS),
            *closing_sections(record, record),
        ],
        record=record,
        data=payload({name: every}, record),
        script=read_asset("page.js", __package__),
    ).html()


_TOKENS = (
    "How often a head's strongest column stood on this token at this position: "
    "the share of samples, a mean over the heads."
)


def chart_sections(every: Sequence[Measure], *, several: bool) -> list[Section]:
    """The sections that the page's script fills, those only for which there are values."""
    axes = {key for measure in every for key in measure.blocks}
    has_map = any("layer" in key and len(key) > 1 for key in axes)
    has_lines = any("layer" in key for key in axes)
    layers = [block.coordinates["layer"] for one in every for block in one.blocks.values() if "layer" in block.axes]
    embeddings = "Layer \u22121 is the input of the first layer." if any(-1 in places for places in layers) else ""
    return [
        Section("heads", "Layers and heads", [Explorer(has_map, several)], f"{_CLICK} {_thinning(every)}".strip()),
        Section("layers", "By layer", [Box(has_lines, ["curves"])], embeddings),
        Section("model", "Whole model, by position", [Box(("position",) in axes, ["models"])]),
    ]


_CLICK = "Click a cell, or type its layer and head, to see that head over positions."


def closing_sections(statistics: Mapping[str, Any], record: Mapping[str, Any]) -> list[Section]:
    """What the statistics are, by the labels in the first record, and all else that the second one holds."""
    rest = {key: value for key, value in record.items() if key != "statistics"}
    return [
        Section("glossary", "What the statistics are", [Glossary(_glossary(statistics))]),
        Section("provenance", "Provenance", [Record(rest)]),
    ]


def lede(record: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    cost = labels.section(record, "cost")
    parts = [labels.model_size(record), labels.samples(record)]
    if isinstance(cost.get("seconds"), (int, float)):
        parts.append(f"measured in {labels.number(float(cost['seconds']), 3)} s")
    return " · ".join(part for part in parts if part)


def _thinning(every: Sequence[Measure]) -> str:
    """A sentence on positions left away, "" where the page holds all."""
    kept = thinned_length(every)
    if kept is None:
        return ""
    return (
        f"To keep the page small it holds {len(kept)} positions, the first ones and then ever fewer; the table has all."
    )


def _glossary(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The title, name and description of each statistic; none where the record does not say."""
    entries = []
    for name, fields in labels.section(record, "statistics").items():
        about = dict(fields) if isinstance(fields, Mapping) else {}
        description = str(about.pop("description", ""))
        about.pop("title", None)
        facts = [f"{key.capitalize()}: {format_value(value)}." for key, value in about.items() if value]
        entries.append((labels.title(name, record), name, " ".join([description, *facts]).strip()))
    return entries


def _tokens(rows: pd.DataFrame) -> Table:
    """The top sink tokens, with a bar for each share."""
    several = rows["site"].nunique() > 1
    head = ["Token", *(["Site"] if several else []), "Position", "Share"]
    shares = [100 * float(share) for share in rows["share"]]
    cells = [
        (
            labels.visible(str(row.token)),
            "",
            [*([labels.site(str(row.site))] if several else []), str(row.position), f"{labels.number(share, 3)} %"],
        )
        for row, share in zip(rows.itertuples(index=False), shares, strict=True)
    ]
    return Table(cells, head, "Sink tokens", bars=shares, code=True)
