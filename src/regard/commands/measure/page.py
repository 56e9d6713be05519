"""The report page of a measurement, the parts that a comparison shares, and the data that their script reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.measure.key_figures import NO_TOKEN, key_figures, top_tokens
from regard.report import labels
from regard.report.arrays import Block, Floats, Labels, Measure, measures, nanmean
from regard.report.labels import format_value, join, run_time
from regard.report.page import Box, Explorer, Glossary, Page, Record, Section, Table, read_asset

_TOKENS = (
    "How often a head's strongest column stood on this token at this position: "
    "the share of samples, a mean over the heads."
)
_CLICK = "Click a cell, or type its layer and head, to see that head over positions."
_THINNED = "To keep the page small it holds {} positions, the first ones and then ever fewer; the table has all."
NUMBERS = 400_000
"""The most numbers by position that one page holds; beyond it positions are thinned."""
FIRST = 16
"""The first positions, where sinks stand, are never thinned."""
SHORT = {"layer": "l", "head": "h", "position": "p"}


def page(table: pd.DataFrame, metadata: dict[str, Any], tokens: pd.DataFrame | None) -> str:
    """Return the report as one self-contained HTML file. Raises UserError if the table is empty."""
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
    embeddings = "Layer \u22121 is the input of layer 0." if any(-1 in ids for ids in layers) else ""
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
    has_tokens = bool((rows["token"] != NO_TOKEN).any())
    columns = [*(["Site"] if multiple_sites else []), *(["Position"] if has_tokens else []), "Share"]
    shares = [100 * float(share) for share in rows["share"]]
    cells = []
    for row, share in zip(rows.itertuples(index=False), shares, strict=True):
        values = {"Site": labels.site(str(row.site)), "Position": str(row.position)}
        name = labels.visible(str(row.token)) if has_tokens else values["Position"]
        cells.append((name, "", [values.get(column, f"{labels.number(share, 3)} %") for column in columns]))
    head = ["Token" if has_tokens else "Position", *columns]
    return Table(cells, head, "Sink tokens by share", bars=shares, code=has_tokens)


def payload(runs: Mapping[str, Sequence[Measure]], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return run names, sites, and for each measure its labels and its blocks by run (None without it).

    Numbers are rounded to 5 significant digits, standard errors to 2. `record` labels the statistics.
    """
    by_key = [{measure.key: measure for measure in measures} for measures in runs.values()]
    positions = thinned_length([measure for run in by_key for measure in run.values()])
    keys = list(dict.fromkeys(key for run in by_key for key in run))
    written = [
        {
            "statistic": statistic,
            "site": site,
            "epsilon": epsilon,
            "title": labels.title(statistic, record),
            "unit": labels.unit(statistic, record),
            "description": labels.description(statistic, record),
            "runs": [_blocks(run.get((statistic, site, epsilon)), positions) for run in by_key],
        }
        for statistic, site, epsilon in keys
    ]
    return {"runs": list(runs), "sites": {site: labels.site(site) for _, site, _ in keys}, "measures": written}


def thinned_length(measures: Sequence[Measure]) -> Labels | None:
    """The positions that the page keeps, None for all: the first ones and then evenly on a logarithmic scale."""
    blocks = [block for measure in measures for block in measure.blocks.values() if "position" in block.coordinates]
    size = sum(block.values.size for block in blocks)
    if size <= NUMBERS:
        return None
    positions = np.unique(np.concatenate([block.coordinates["position"] for block in blocks]))
    count = max(2 * FIRST, int(len(positions) * NUMBERS / size))
    steps = np.geomspace(FIRST, len(positions) - 1, count - FIRST).round().astype(np.int64)
    return np.asarray(positions[np.unique(np.concatenate([np.arange(FIRST), steps]))])


def rounded(values: Floats, digits: int) -> Any:
    """The values as nested lists, rounded to significant digits; None where not finite."""
    known = np.isfinite(values)
    size = np.abs(np.where(known & (values != 0), values, 1.0))
    power = digits - 1 - np.floor(np.log10(size))
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    short = np.round(np.where(known, values, 0.0) * up / down) / up * down
    whole = np.isfinite(short) & (short == np.round(short)) & (np.abs(short) < 2**53)
    mixed = np.empty(short.shape, dtype=object)
    mixed[known] = short[known]
    mixed[whole & known] = short[whole & known].astype(np.int64)
    return mixed.tolist()


def _blocks(measure: Measure | None, positions: Labels | None) -> dict[str, Any] | None:
    if measure is None:
        return None
    written = {}
    for axes, block in measure.blocks.items():
        if positions is not None and "position" in axes:
            block = block.keep("position", np.isin(block.coordinates["position"], positions))
        written["".join(SHORT[axis] for axis in axes) or "model"] = _block(block)
    rest = _rest(measure)
    return written if rest is None else {**written, "rest": _block(rest)}


def _rest(measure: Measure) -> Block | None:
    """The mean over heads and all positions but the first, by layer; None where layers have a value."""
    if measure.block("layer") is not None or measure.block("layer", "head") is not None:
        return None
    by_head, by_position = measure.block("layer", "head", "position"), measure.block("layer", "position")
    block = by_position if by_position is not None else by_head and by_head.mean_over("head")
    if block is None or len(block.coordinates["position"]) < 2:
        return None
    values = nanmean(block.values[:, 1:], 1)
    return Block({"layer": block.coordinates["layer"]}, values, np.full_like(values, np.nan))


def _block(block: Block) -> dict[str, Any]:
    data: dict[str, Any] = {SHORT[axis]: places.tolist() for axis, places in block.coordinates.items()}
    errors = {"e": rounded(block.errors, 2)} if np.isfinite(block.errors).any() else {}
    return {**data, "v": rounded(block.values, 5), **errors}
