"""Terminal summary of a measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group
from rich.text import Text

from regard.commands.measure.key_figures import over_layers_and_heads, several_sites, strongest
from regard.commands.measure.tokens import top_tokens
from regard.report import colors, labels, terminal
from regard.report.arrays import Block, Measure, Slice, heads, mean_over_heads, measures, nanmean
from regard.report.terminal import WIDTH, sparkline

MARGIN = 5
NORMS = ("hidden_norm", "key_norm", "value_norm")
MAPS = ("sink_rate", "column_mass")
"""Statistics shown as a map, by priority; else the first one with heads."""


def summary(table: pd.DataFrame, metadata: dict[str, Any], tokens: pd.DataFrame | None) -> Group:
    """Summarize a run for a terminal of 80 columns: sink map, sink tokens, over-smoothing, norms, cost.

    Readable without color, because every cell shows its number. Raises UserError on an empty table.
    """
    all_measures = measures(table)
    maps = [_map(measure, metadata, with_site=several_sites(all_measures)) for measure in _mapped(all_measures)]
    lines = [
        _models(all_measures, metadata),
        _tokens(tokens),
        _smoothing(all_measures, metadata),
        _norms(all_measures, metadata),
    ]
    return terminal.summary(labels.model_name(metadata), [_lede(metadata)], [*maps, *lines])


def _lede(metadata: Mapping[str, Any]) -> str:
    seconds = labels.section(metadata, "cost").get("seconds")
    duration = f"in {labels.number(float(seconds), 3)} s" if isinstance(seconds, (int, float)) else ""
    return ", ".join(part for part in (labels.samples(metadata), duration) if part)


def _mapped(all_measures: Sequence[Measure]) -> list[Measure]:
    with_heads = [measure for measure in all_measures if heads(measure) is not None]
    names = {measure.statistic for measure in with_heads}
    name = next((candidate for candidate in MAPS if candidate in names), with_heads[0].statistic if with_heads else "")
    by_site = {measure.site: measure for measure in reversed(with_heads) if measure.statistic == name}
    sites = dict.fromkeys(measure.site for measure in with_heads)
    return [by_site[site] for site in sites if site in by_site]


def _taken(measure: Measure) -> Slice:
    by_position = measure.block("layer", "head", "position")
    if by_position is not None and measure.block("layer", "head") is None:
        position = strongest(over_layers_and_heads(by_position))[0]
        return Slice(by_position.at("position", position), position)
    by_head = heads(measure)
    assert by_head is not None
    return by_head


def _map(measure: Measure, metadata: Mapping[str, Any], *, with_site: bool) -> Text:
    selected = _taken(measure)
    values, unit = selected.block.values, labels.unit(measure.statistic, metadata)
    top = 100.0 if unit == "%" else _top(values)
    count = values.shape[1]
    width = max(1, min(4, (WIDTH - MARGIN) // count))
    text = Text(no_wrap=True)
    place = "" if selected.position is None else f" at position {selected.position}"
    text.append(f"{labels.name(measure, metadata, with_site=with_site)}{place}, layers × heads", style="bold")
    text.append(_scale(top, width, of_rate=unit == "%"))
    per_row = (WIDTH - MARGIN) // width
    for start in range(0, count, per_row):
        columns = slice(start, start + per_row)
        text.append("\n" + _heads(selected.block, columns, width))
        for layer, row in zip(selected.block.coordinates["layer"], values[:, columns], strict=True):
            text.append(f"\n{layer:>{MARGIN - 1}} ")
            for value in row:
                text.append(_cell(float(value), top, width), style=_shade(float(value), top))
    return text


def _top(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def _scale(top: float, width: int, *, of_rate: bool) -> str:
    step = "tens of " if width == 1 else ""
    return f" ({step}%)" if of_rate else f" ({step}% of the largest, {labels.number(top)})"


def _heads(block: Block, columns: slice, width: int) -> str:
    names = [int(head) for head in block.coordinates["head"][columns]]
    if width > len(str(names[-1])):
        return " " * MARGIN + "".join(f"{head:>{width}}" for head in names)
    return " " * MARGIN + f"heads {names[0]} to {names[-1]}"


def _cell(value: float, top: float, width: int) -> str:
    if not math.isfinite(value):
        return "·".rjust(width)
    percent = 100 * value / top
    if width == 1:
        return str(min(9, max(0, int(percent // 10))))
    text = f"{percent:.0f}"
    return (text if len(text) <= width - (width > 2) else "██"[:width]).rjust(width)


def _shade(value: float, top: float) -> str:
    if not math.isfinite(value):
        return ""
    steps = len(colors.RAMP_LIGHT)
    index = min(steps - 1, max(0, round(value / top * (steps - 1))))
    return f"{'#ffffff' if index > steps // 2 - 1 else '#16202c'} on {colors.RAMP_LIGHT[index]}"


def _models(all_measures: Sequence[Measure], metadata: Mapping[str, Any]) -> list[str]:
    lines = []
    for measure in all_measures:
        block = measure.block("position")
        if block is None:
            continue
        position, value, error = strongest(block)
        margin = "" if math.isnan(error) else f" ± {labels.number(error, 2)}"
        name = labels.name(measure, metadata, with_site=several_sites(all_measures))
        percent = " %" if labels.unit(measure.statistic, metadata) == "%" else ""
        lines.append(f"{name}: {labels.number(value)}{margin}{percent} at position {position} (whole model)")
    return lines


def _tokens(tokens: pd.DataFrame | None) -> list[str]:
    best = top_tokens(tokens, 5)
    lines = ["Sink tokens"] if len(best) else []
    multiple_sites = best["site"].nunique() > 1
    for row in best.itertuples(index=False):
        site = f"  {labels.site(str(row.site))}" if multiple_sites else ""
        share = labels.number(100 * float(row.share), 3)
        lines.append(f"  {share:>6} %  position {row.position!s:<5} {labels.visible(str(row.token))}{site}")
    return lines


def _smoothing(all_measures: Sequence[Measure], metadata: Mapping[str, Any]) -> list[str]:
    lines = []
    for measure in all_measures:
        block = measure.block("layer")
        if measure.statistic != "over_smoothing" or block is None or np.isnan(block.values).all():
            continue
        layer, values = block.coordinates["layer"], block.values
        index = int(np.nanargmax(values))
        name = labels.name(measure, metadata, with_site=several_sites(all_measures))
        first, last, largest = (labels.number(float(values[i])) for i in (0, -1, index))
        lines.append(f"{name} by layer  {sparkline(values, 40)}")
        lines.append(f"  layer {layer[0]}: {first}, layer {layer[-1]}: {last}, max. {largest} in layer {layer[index]}")
    return lines


def _norms(all_measures: Sequence[Measure], metadata: Mapping[str, Any]) -> list[str]:
    """Compare norms at the first position with the mean of the others, in the layer where they differ most."""
    lines = []
    for measure in all_measures:
        by_head, by_layer = measure.block("layer", "head", "position"), measure.block("layer", "position")
        if measure.statistic not in NORMS or (by_head is None and by_layer is None):
            continue
        block = by_layer
        if block is None:
            assert by_head is not None
            block = mean_over_heads(by_head)
        lines += _norm(labels.name(measure, metadata, with_site=several_sites(all_measures)), block)
    return [f"{'Norms':<32}{'layer':>6}{'position':>10}{'there':>12}{'elsewhere':>12}", *lines] if lines else []


def _norm(name: str, block: Block) -> list[str]:
    if block.values.shape[1] < 2:
        return []
    first, others = block.values[:, 0], nanmean(block.values[:, 1:], 1)
    ratio = np.abs(np.log(np.divide(first, others, out=np.ones_like(first), where=(others > 0) & (first > 0))))
    index = int(np.nanargmax(np.where(np.isnan(ratio), -1.0, ratio)))
    layer, position = block.coordinates["layer"][index], block.coordinates["position"][0]
    first_norm, mean_norm = labels.number(float(first[index])), labels.number(float(others[index]))
    return [f"  {name[:29]:<30}{layer:>6}{position:>10}{first_norm:>12}{mean_norm:>12}"]
