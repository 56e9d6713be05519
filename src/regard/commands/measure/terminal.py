"""A measurement as a few lines for the terminal."""

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
"""The statistics whose map is shown, the best first; where none is there, the first one with heads."""


def summary(table: pd.DataFrame, record: dict[str, Any], tokens: pd.DataFrame | None) -> Group:
    """What matters most, for a terminal of 80 columns: sink map, sink tokens, over-smoothing, norms, cost.

    Readable without colour: every cell of a map shows its number. Raises UserError on an empty table.
    """
    found = measures(table)
    maps = [_map(measure, record, with_site=several_sites(found)) for measure in _mapped(found)]
    lines = [_models(found, record), _tokens(tokens), _smoothing(found, record), _norms(found, record)]
    return terminal.summary(labels.model_name(record), [_lede(record)], [*maps, *lines])


def _lede(record: Mapping[str, Any]) -> str:
    seconds = labels.section(record, "cost").get("seconds")
    took = f"in {labels.number(float(seconds), 3)} s" if isinstance(seconds, (int, float)) else ""
    return ", ".join(part for part in (labels.samples(record), took) if part)


def _mapped(every: Sequence[Measure]) -> list[Measure]:
    with_heads = [measure for measure in every if heads(measure) is not None]
    names = {measure.statistic for measure in with_heads}
    name = next((wanted for wanted in MAPS if wanted in names), with_heads[0].statistic if with_heads else "")
    first = {measure.site: measure for measure in reversed(with_heads) if measure.statistic == name}
    sites = dict.fromkeys(measure.site for measure in with_heads)
    return [first[site] for site in sites if site in first]


def _taken(measure: Measure) -> Slice:
    by_position = measure.block("layer", "head", "position")
    if by_position is not None and measure.block("layer", "head") is None:
        position = strongest(over_layers_and_heads(by_position))[0]
        return Slice(by_position.at("position", position), position)
    taken = heads(measure)
    assert taken is not None
    return taken


def _map(measure: Measure, record: Mapping[str, Any], *, with_site: bool) -> Text:
    taken = _taken(measure)
    values, unit = taken.block.values, labels.unit(measure.statistic, record)
    top = 100.0 if unit == "%" else _top(values)
    count = values.shape[1]
    wide = max(1, min(4, (WIDTH - MARGIN) // count))
    text = Text(no_wrap=True)
    where = "" if taken.position is None else f" at position {taken.position}"
    text.append(f"{labels.name(measure, record, with_site=with_site)}{where}, layers × heads", style="bold")
    text.append(_scale(top, wide, of_rate=unit == "%"))
    per_row = (WIDTH - MARGIN) // wide
    for start in range(0, count, per_row):
        columns = slice(start, start + per_row)
        text.append("\n" + _heads(taken.block, columns, wide))
        for layer, row in zip(taken.block.coordinates["layer"], values[:, columns], strict=True):
            text.append(f"\n{layer:>{MARGIN - 1}} ")
            for value in row:
                text.append(_cell(float(value), top, wide), style=_shade(float(value), top))
    return text


def _top(values: np.ndarray) -> float:
    known = np.abs(values[np.isfinite(values)])
    return float(known.max()) if known.size and known.max() > 0 else 1.0


def _scale(top: float, wide: int, *, of_rate: bool) -> str:
    step = "tens of " if wide == 1 else ""
    return f" ({step}%)" if of_rate else f" ({step}% of the largest, {labels.number(top)})"


def _heads(block: Block, columns: slice, wide: int) -> str:
    names = [int(head) for head in block.coordinates["head"][columns]]
    if wide > len(str(names[-1])):
        return " " * MARGIN + "".join(f"{head:>{wide}}" for head in names)
    return " " * MARGIN + f"heads {names[0]} to {names[-1]}"


def _cell(value: float, top: float, wide: int) -> str:
    if not math.isfinite(value):
        return "·".rjust(wide)
    percent = 100 * value / top
    if wide == 1:
        return str(min(9, max(0, int(percent // 10))))
    shown = f"{percent:.0f}"
    return (shown if len(shown) <= wide - (wide > 2) else "██"[:wide]).rjust(wide)


def _shade(value: float, top: float) -> str:
    if not math.isfinite(value):
        return ""
    steps = len(colors.RAMP_LIGHT)
    at = min(steps - 1, max(0, round(value / top * (steps - 1))))
    return f"{'#ffffff' if at > steps // 2 - 1 else '#16202c'} on {colors.RAMP_LIGHT[at]}"


def _models(every: Sequence[Measure], record: Mapping[str, Any]) -> list[str]:
    lines = []
    for measure in every:
        block = measure.block("position")
        if block is None:
            continue
        position, value, error = strongest(block)
        sure = "" if math.isnan(error) else f" ± {labels.number(error, 2)}"
        name = labels.name(measure, record, with_site=several_sites(every))
        percent = " %" if labels.unit(measure.statistic, record) == "%" else ""
        lines.append(f"{name}: {labels.number(value)}{sure}{percent} at position {position} (whole model)")
    return lines


def _tokens(tokens: pd.DataFrame | None) -> list[str]:
    best = top_tokens(tokens, 5)
    lines = ["Sink tokens"] if len(best) else []
    several = best["site"].nunique() > 1
    for row in best.itertuples(index=False):
        site = f"  {labels.site(str(row.site))}" if several else ""
        share = labels.number(100 * float(row.share), 3)
        lines.append(f"  {share:>6} %  position {row.position!s:<5} {labels.visible(str(row.token))}{site}")
    return lines


def _smoothing(every: Sequence[Measure], record: Mapping[str, Any]) -> list[str]:
    lines = []
    for measure in every:
        block = measure.block("layer")
        if measure.statistic != "over_smoothing" or block is None or np.isnan(block.values).all():
            continue
        layer, values = block.coordinates["layer"], block.values
        at = int(np.nanargmax(values))
        name = labels.name(measure, record, with_site=several_sites(every))
        first, last, most = (labels.number(float(values[place])) for place in (0, -1, at))
        lines.append(f"{name} by layer  {sparkline(values, 40)}")
        lines.append(f"  layer {layer[0]}: {first}, layer {layer[-1]}: {last}, max. {most} in layer {layer[at]}")
    return lines


def _norms(every: Sequence[Measure], record: Mapping[str, Any]) -> list[str]:
    """Norms at the first position against the mean of the others, in the layer where they differ most."""
    lines = []
    for measure in every:
        by_head, by_layer = measure.block("layer", "head", "position"), measure.block("layer", "position")
        if measure.statistic not in NORMS or (by_head is None and by_layer is None):
            continue
        block = by_layer
        if block is None:
            assert by_head is not None
            block = mean_over_heads(by_head)
        lines += _norm(labels.name(measure, record, with_site=several_sites(every)), block)
    return [f"{'Norms':<32}{'layer':>6}{'position':>10}{'there':>12}{'elsewhere':>12}", *lines] if lines else []


def _norm(name: str, block: Block) -> list[str]:
    if block.values.shape[1] < 2:
        return []
    first, others = block.values[:, 0], nanmean(block.values[:, 1:], 1)
    ratio = np.abs(np.log(np.divide(first, others, out=np.ones_like(first), where=(others > 0) & (first > 0))))
    at = int(np.nanargmax(np.where(np.isnan(ratio), -1.0, ratio)))
    layer, position = block.coordinates["layer"][at], block.coordinates["position"][0]
    there, elsewhere = labels.number(float(first[at])), labels.number(float(others[at]))
    return [f"  {name[:29]:<30}{layer:>6}{position:>10}{there:>12}{elsewhere:>12}"]
