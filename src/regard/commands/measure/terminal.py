"""The summary of a measurement for a terminal of 80 columns."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group
from rich.text import Text

from regard.commands.measure.key_figures import NORMS, SINKS, several_sites, strongest, top_tokens
from regard.report import colors, labels
from regard.report.arrays import Block, Measure, heads, measures, nanmean
from regard.report.terminal import WIDTH, shorten, sparkline, summary, wrap_line

MARGIN = 5
BY_LAYER = ("over_smoothing", "perturbation_spread")
"""Statistics shown as a line over the layers."""
MODALITIES, _MODALITY_TITLE = "modality_mass_", "Modality mass"
MAPS = (SINKS, "column_mass")
"""Statistics shown as a map, by priority; else the first one with heads."""
Name = Callable[[Measure], str]


def measure_summary(table: pd.DataFrame, metadata: dict[str, Any], tokens: pd.DataFrame | None) -> Group:
    """Summarize a run for a terminal of 80 columns: sink map (with numbers), tokens, over-smoothing, spread, norms."""
    all_measures = measures(table)
    name = partial(labels.name, record=metadata, with_site=several_sites(all_measures))
    maps = [_map(measure, name, metadata) for measure in _mapped(all_measures)]
    lines = [
        [line for measure in all_measures for line in _of_model(measure, name, metadata)],
        _by_modality(all_measures, name),
        _tokens(tokens),
        [line for measure in all_measures for line in _by_layer(measure, name)],
        _norms(all_measures, name),
    ]
    lede = labels.join([labels.samples(metadata), labels.run_time(metadata, "in")])
    return summary(labels.model_name(metadata), [lede], [*maps, *lines])


def _mapped(all_measures: Sequence[Measure]) -> list[Measure]:
    """Return the first measure of each site that is shown as a map."""
    with_heads = [measure for measure in all_measures if heads(measure) is not None]
    names = [measure.statistic for measure in with_heads]
    selected = next((name for name in (*MAPS, *names) if name in names), "")
    by_site: dict[str, Measure] = {}
    for measure in with_heads:
        if measure.statistic == selected:
            by_site.setdefault(measure.site, measure)
    sites = dict.fromkeys(measure.site for measure in with_heads)
    return [by_site[site] for site in sites if site in by_site]


def _slice(measure: Measure, metadata: Mapping[str, Any]) -> Block:
    """Return the values by head: of the whole sequence, else of the strongest position."""
    by_position = measure.block("layer", "head", "position")
    position = None
    if by_position is not None and measure.block("layer", "head") is None:
        position = strongest(by_position.mean_over("head").mean_over("layer"), measure, metadata)[0]
    by_head = heads(measure, position)
    assert by_head is not None
    return by_head


def _map(measure: Measure, name: Name, metadata: Mapping[str, Any]) -> Text:
    selected, unit = _slice(measure, metadata), labels.unit(measure.statistic, metadata)
    values, finite = selected.values, np.abs(selected.values[np.isfinite(selected.values)])
    top = 100.0 if unit == "%" else float(finite.max(initial=0.0)) or 1.0
    count = values.shape[1]
    width = max(1, min(4, (WIDTH - MARGIN) // count))
    position = "" if selected.position is None else f" at position {selected.position}"
    scale = "" if unit == "%" else f" of the largest, {labels.number(top)}"
    text = Text(no_wrap=True)
    title = f"{name(measure)}{position}, layers × heads ({'tens of ' if width == 1 else ''}%{scale})"
    text.append("\n".join(wrap_line(title)), style="bold")
    per_row = (WIDTH - MARGIN) // width
    for start in range(0, count, per_row):
        columns = slice(start, start + per_row)
        text.append("\n" + " " * MARGIN + _heads(selected.coordinates["head"][columns], width))
        for layer, row in zip(selected.coordinates["layer"], values[:, columns], strict=True):
            text.append(f"\n{layer:>{MARGIN - 1}} ")
            for value in row:
                text.append(_cell(float(value), top, width), style=_shade(float(value), top))
    return text


def _heads(names: Iterable[int], width: int) -> str:
    names = [int(head) for head in names]
    if width > len(str(names[-1])):
        return "".join(f"{head:>{width}}" for head in names)
    return f"heads {names[0]} to {names[-1]}"


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


def _of_model(measure: Measure, name: Name, metadata: Mapping[str, Any]) -> list[str]:
    block = measure.block("position")
    if block is None:
        return []
    position, value, error = strongest(block, measure, metadata)
    text = labels.with_margin(value, error, labels.unit(measure.statistic, metadata))
    text += " (SE)" if "±" in text else ""
    return [f"{name(measure)}: {text} at position {position} (whole model)"]


def _by_modality(all_measures: Sequence[Measure], name: Name) -> list[str]:
    """Return the attention that tokens of each modality pay to those of each, with the site where there are several."""
    lines = []
    for measure in all_measures:
        block = heads(measure) if measure.statistic.startswith(MODALITIES) else None
        if block is not None and np.isfinite(block.values).any():
            title = name(measure).replace(_MODALITY_TITLE, "").replace(", ", "  ")
            lines.append(f"  {labels.number(float(np.nanmean(block.values)), 3):>6} %  {title.strip()}")
    return ["Attention by modality, mean over layers and heads", *lines] if lines else []


def _tokens(tokens: pd.DataFrame | None) -> list[str]:
    best = top_tokens(tokens, 5)
    lines = ["Sink tokens, share of strongest columns"] if len(best) else []
    multiple_sites = best["site"].nunique() > 1
    for row in best.itertuples(index=False):
        site = f"  {labels.site(str(row.site))}" if multiple_sites else ""
        share = labels.number(100 * float(row.share), 3)
        lines.append(f"  {share:>6} %  position {row.position!s:<5} {labels.visible(str(row.token))}{site}")
    return lines


def _by_layer(measure: Measure, name: Name) -> list[str]:
    block = measure.block("layer")
    if measure.statistic not in BY_LAYER or block is None or np.isnan(block.values).all():
        return []
    layer, values = block.coordinates["layer"], block.values
    index = int(np.nanargmax(values))
    first, last, largest = (labels.number(float(values[i])) for i in (0, -1, index))
    return [
        f"{name(measure)} by layer  {sparkline(values, 40)}",
        f"  layer {layer[0]}: {first}, layer {layer[-1]}: {last}, max. {largest} in layer {layer[index]}",
    ]


def _norms(all_measures: Sequence[Measure], name: Name) -> list[str]:
    """Compare norms at the first position with the mean of the others, in the layer where they differ most."""
    lines = []
    for measure in all_measures:
        by_head, block = measure.block("layer", "head", "position"), measure.block("layer", "position")
        if block is None and by_head is not None:
            block = by_head.mean_over("head")
        if measure.statistic in NORMS and block is not None and block.values.shape[1] > 1:
            lines.append(_norm(name(measure), block))
    return [f"{'Norms':<32}{'layer':>6}{'position':>10}{'there':>12}{'elsewhere':>12}", *lines] if lines else []


def _norm(name: str, block: Block) -> str:
    first, others = block.values[:, 0], nanmean(block.values[:, 1:], 1)
    ratio = np.abs(np.log(np.divide(first, others, out=np.ones_like(first), where=(others > 0) & (first > 0))))
    index = int(np.nanargmax(np.where(np.isnan(ratio), -1.0, ratio)))
    layer, position = block.coordinates["layer"][index], block.coordinates["position"][0]
    first_norm, mean_norm = labels.number(float(first[index])), labels.number(float(others[index]))
    return f"  {shorten(name, 29):<30}{layer:>6}{position:>10}{first_norm:>12}{mean_norm:>12}"
