"""Key figures of a measurement, and the summary for a terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group
from rich.text import Text

from regard.report import colors, labels, terminal
from regard.report.arrays import Block, Measure, heads, measures, nanmean
from regard.report.page import KeyFigure
from regard.report.terminal import WIDTH, shorten, sparkline, wrap_line

MAXIMA = ("common_sink_ratio", "over_smoothing", "hidden_norm_sink_ratio", "perturbation_spread")
MINIMA = ("matrix_entropy",)
"""Statistics whose largest, or smallest, value over the layers is a key figure."""
MARGIN = 5
NO_TOKEN = "–"
"""The token of a position without one, such as a patch of an image."""
BY_LAYER = ("over_smoothing", "perturbation_spread")
"""Statistics shown as a line over the layers."""
NORMS = ("hidden_norm", "key_norm", "value_norm")
SINKS = "sink_rate"
MODALITIES, _MODALITY_TITLE = "modality_mass_", "Modality mass"
MAPS = (SINKS, "column_mass")
"""Statistics shown as a map, by priority; else the first one with heads."""
Name = Callable[[Measure], str]


def key_figures(
    all_measures: Sequence[Measure], metadata: Mapping[str, Any], tokens: pd.DataFrame | None
) -> list[KeyFigure]:
    """Make the key figures: whole-model values, then sink tokens, then extremes over layers."""
    multiple_sites, best = several_sites(all_measures), top_tokens(tokens, 1)

    def make_figure(measure: Measure, value: float, error: float, note: str, extreme: str = "") -> KeyFigure:
        label = labels.name(measure, metadata, with_site=False) + (f", {extreme}." if extreme else "")
        text, margin = labels.number_and_margin(value, error)
        percent = " %" if labels.unit(measure.statistic, metadata) == "%" and not np.isnan(value) else ""
        margin = f"± {margin} (SE), " if margin else ""
        return KeyFigure(label, text + percent, margin + note, labels.site(measure.site) if multiple_sites else "")

    token_figures = [
        _token_figure(row, labels.site(str(row.site)) if len(best) > 1 else "") for row in best.itertuples(index=False)
    ]
    models = [make_figure(measure, *whole) for measure in all_measures if (whole := _whole_model(measure, metadata))]
    extremes = [make_figure(measure, *extreme) for measure in all_measures if (extreme := _extreme(measure))]
    return [*models, *token_figures, *extremes]


def _token_figure(row: Any, site: str) -> KeyFigure:
    share = f"strongest in {labels.number(100 * row.share, 3)} % of samples × heads"
    if row.token == NO_TOKEN:
        return KeyFigure("Top sink position", str(row.position), share, site)
    return KeyFigure("Top sink token", labels.visible(str(row.token)), f"position {row.position}, {share}", site)


def top_tokens(tokens: pd.DataFrame | None, max_tokens: int = 10) -> pd.DataFrame:
    """Return the strongest sinks of each site: site, position, token, share (a fraction, mean over heads).

    Rows of a whole site are used if there are any; else a head without a row for a token counts as 0.
    """
    kept = ["site", "position", "token", "share"]
    if tokens is None or tokens.empty:
        return pd.DataFrame(columns=kept)
    sites = [_of_site(rows) for _, rows in tokens.groupby("site", sort=False, dropna=False)]
    best = [rows.sort_values("share", ascending=False, kind="stable").head(max_tokens) for rows in sites]
    rows = pd.concat(best, ignore_index=True)[kept]
    return rows.assign(token=rows["token"].astype(object).where(rows["token"].notna(), NO_TOKEN))


def _of_site(rows: pd.DataFrame) -> pd.DataFrame:
    whole = rows[rows["layer"].isna() & rows["head"].isna()]
    if not whole.empty:
        return whole
    heads = len(rows[["layer", "head"]].drop_duplicates())
    keys = ["site", "position", "token"]
    summed = rows.groupby(keys, sort=False, dropna=False)["share"].sum()
    return (summed / heads).reset_index()


def several_sites(all_measures: Sequence[Measure]) -> bool:
    """Return whether the measures have several sites."""
    return len({measure.site for measure in all_measures}) > 1


def strongest(block: Block, measure: Measure, metadata: Mapping[str, Any]) -> tuple[int, float, float]:
    """Return position, value and standard error of the largest value of a block of a measure over positions.

    In a causal site these are positions that at least half of the queries see: later ones are averages of few rows, and
    the largest of them would be a sink by chance, or because heads attend to what is near. Norms are no averages.
    """
    positions, values = np.asarray(block.coordinates["position"]), block.values
    if measure.site.startswith("decoder") and measure.statistic not in NORMS and len(positions):
        counted = labels.metadata_number(metadata, "config", "minimum_queries") if measure.statistic == SINKS else None
        queries = positions.max() + int(counted or 1)  # that see the last position of those with a value
        values = np.where(positions <= queries // 2, values, np.nan)
    if np.isnan(values).all():
        return int(positions[0]), float("nan"), float("nan")
    at = int(np.nanargmax(values))
    return int(positions[at]), float(values[at]), float(block.errors[at])


def _whole_model(measure: Measure, metadata: Mapping[str, Any]) -> tuple[float, float, str] | None:
    """Return value, standard error and note of a whole-model value; None if there is none."""
    whole, block, note = measure.block(), measure.block("position"), ""
    if whole is not None:
        return float(whole.values), float(whole.errors), "whole model"
    by_head = measure.block("layer", "head", "position")
    if block is None and measure.statistic == SINKS and by_head is not None:
        block, note = by_head.mean_over("head").mean_over("layer"), ", mean over heads"
    if block is None:
        return None
    position, value, error = strongest(block, measure, metadata)
    return value, error, f"position {position}{note}"


def _extreme(measure: Measure) -> tuple[float, float, str, str] | None:
    """Return value, standard error, note and kind of the extreme over layers; None if there is none."""
    block, is_maximum = measure.block("layer"), measure.statistic in MAXIMA
    if measure.statistic not in MAXIMA + MINIMA or block is None or np.isnan(block.values).all():
        return None
    index = int(np.nanargmax(block.values) if is_maximum else np.nanargmin(block.values))
    note = f"layer {block.coordinates['layer'][index]}".replace("-", "−")  # the embeddings are layer −1
    return float(block.values[index]), float(block.errors[index]), note, "max" if is_maximum else "min"


def summary(table: pd.DataFrame, metadata: dict[str, Any], tokens: pd.DataFrame | None) -> Group:
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
    return terminal.summary(labels.model_name(metadata), [lede], [*maps, *lines])


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
