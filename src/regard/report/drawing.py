"""Figures of Matplotlib: a statistic, maps, and panels of lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from regard.errors import UserError
from regard.report import colors, labels
from regard.report.arrays import Block, Floats, Labels, Measure, heads, layers, measures, nanmean
from regard.report.panels import INKS, Panel, assign_styles
from regard.report.terminal import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Kind = Literal["map", "profile", "layers"]
KINDS: dict[Kind, tuple[str, ...]] = {"map": ("layer", "head"), "layers": ("layer",), "profile": ("position",)}
"""The kinds of figures of a statistic, and the axes that each needs."""
FIRST = "sink_rate"
"""The statistic that is drawn if none is named."""
AXIS_TITLES = {"fraction": "Dynamic heads", "after": "Tasks trained"}
DASHES, MARKED = ("-", "--", ":"), 40
"""Strokes of lines, and the most points of a line that are marked."""
TICK = 24
"""Letters of a name at an axis, at most; a longer one loses its middle."""
INCHES = 0.075
"""The width of a letter of a title."""


class Map(NamedTuple):
    """A matrix to draw, with the names of its rows and columns."""

    title: str
    values: Floats
    rows: Sequence[Any] | Labels
    columns: Sequence[Any] | Labels
    row_title: str = "Layer"
    column_title: str = "Head"


def draw_statistic(
    table: pd.DataFrame, *, site: str | None, epsilon: float | None, position: int | None, kind: Kind | None
) -> Figure:
    """Draw the first statistic of a tidy table that can be drawn, the sink rate if it has it.

    What is None is the first one possible; a position of None is the whole sequence if measured, else the first
    position. Raises UserError for what the table lacks.
    """
    matching = _matching(measures(table), site, epsilon)
    drawable = [measure for measure in matching if _kinds(measure)]
    if not drawable:
        raise UserError(f"{matching[0].statistic} has one value for the whole model: there is nothing to draw")
    measure = next((one for one in drawable if one.statistic == FIRST), drawable[0])
    possible = _kinds(measure)
    by_position = {"map": heads(measure, position), "layers": layers(measure, position)}
    fitting = possible if position is None else [name for name in possible if by_position.get(name) is not None]
    selected_kind = (fitting or possible)[0] if kind is None else kind
    if selected_kind not in possible:
        expected = f"expected one of {', '.join(possible)}"
        raise UserError(f"{measure.statistic} cannot be drawn as {kind!r}: {expected}")
    if selected_kind == "profile":
        return _profile(measure, position)
    selected = heads(measure, position) if selected_kind == "map" else layers(measure, position)
    if selected is None:
        raise UserError(f"{measure.statistic} has no values by position: leave position out")
    at = "" if selected.position is None else f", position {selected.position}"
    title = labels.name(measure, {}, with_site=True) + at
    if selected_kind == "map":
        return draw_maps([Map(title, selected.values, selected.coordinates["layer"], selected.coordinates["head"])])
    return _layers(title, selected)


def statistic_overview(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean, smallest and largest value of each statistic over the heads, else the layers, that a map shows."""
    rows = []
    for measure in measures(table) if len(table) else []:
        block = next((shown for shown in (heads(measure), layers(measure), measure.block()) if shown is not None), None)
        if block is not None and "layer" in block.coordinates:
            block = block.keep("layer", block.coordinates["layer"] >= 0)  # the embeddings are no layer
        if block is None or np.isnan(block.values).all():
            continue
        over = [labels.pluralize(len(places), axis) for axis, places in block.coordinates.items()]
        position = "" if block.position is None else block.position
        numbers = [float(nanmean(block.values)), float(np.nanmin(block.values)), float(np.nanmax(block.values))]
        name = measure.statistic + ("" if measure.epsilon is None else f", ε = {measure.epsilon:g}")
        rows.append([name, measure.site, position, " × ".join(over) or "model", *map(labels.number, numbers)])
    overview = pd.DataFrame(rows, columns=["statistic", "site", "position", "over", "mean", "smallest", "largest"])
    return overview.sort_values("statistic", key=lambda names: ~names.str.startswith(FIRST), kind="stable")


def draw_maps(maps: Sequence[Map]) -> Figure:
    """Draw matrices side by side, on one scale."""
    largest = max(max(np.shape(item.values)) for item in maps)
    size = min(0.32, 12 / largest)
    rows, columns = np.max([np.shape(item.values) for item in maps], axis=0)
    width = max(3.2, 1.6 + size * columns)
    figure, all_axes = grid(len(maps), 4, width, max(2.2, 0.9 + size * rows))
    finite = np.concatenate([np.ravel(item.values)[np.isfinite(np.ravel(item.values))] for item in maps])
    low, high = (finite.min(), finite.max()) if finite.size else (0, 1)
    if low == high:  # one value alone is an end of the scale, as on a page, and not amid numbers that nothing has
        low, high = min(0, low), max(0, high) if low else 1
    for axes, item in zip(all_axes, maps, strict=True):
        shade: dict[str, Any] = {"cmap": colors.ramp(), "aspect": "equal", "interpolation": "nearest"}
        image = axes.imshow(item.values, vmin=low, vmax=high, **shade)
        title = textwrap.fill(item.title, int((width - 0.8) / INCHES), break_on_hyphens=False)
        axes.set_title(plain_text(title), fontsize=10, loc="left")
        axes.set_anchor("W")
        axes.set(xlabel=plain_text(item.column_title), ylabel=plain_text(item.row_title))
        places, names = _ticks(item.columns)
        axes.set_xticks(places, names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(*_ticks(item.rows))
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.8, panchor=False)
    return figure


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Draw panels of lines as a page shows them, with the intervals that they have."""
    from matplotlib.ticker import MaxNLocator

    figure, all_axes = grid(len(panels), 3, 3.6, 2.9)
    first: list[str] = []
    for axes, panel in zip(all_axes, panels, strict=True):
        drawn: dict[str, Line2D] = {}
        points, axis = pd.DataFrame(panel["points"]), str(panel["axis"])
        across = "place" if "ticks" in panel else axis
        groups = dict(iter(points.groupby("series", sort=False)))
        for name, ink, stroke in panel.get("lines") or assign_styles([*groups], repeat=True):
            if name in groups:
                drawn[name] = _panel_line(
                    axes, groups[name], across, str(name), colors.SERIES_LIGHT[ink % INKS], DASHES[stroke]
                )
        axes.set_title(plain_text(panel["caption"]), fontsize=9, loc="left")
        if "ticks" in panel:
            axes.set_xticks(panel["ticks"]["places"], list(map(plain_text, panel["ticks"]["names"])))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(AXIS_TITLES.get(axis, axis.capitalize()))
        axes.set_ylabel(plain_text(panel["note"]), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        names = list(drawn)
        if len(names) > 1 and names != first:
            axes.legend([*drawn.values()], list(map(plain_text, names)), fontsize=7, frameon=False)
        first = names if axes is all_axes[0] else first
    return figure


def plain_text(text: object) -> str:
    """Return a text as Matplotlib shows it without reading formulas between dollars."""
    return str(text).replace("$", r"\$")


def grid(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many axes in rows, each of a width and height in inches."""
    from regard.report.figure import NotebookFigure

    num_columns = min(count, columns)
    num_rows = math.ceil(count / num_columns)
    figure = NotebookFigure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for unused in all_axes[count:]:
        unused.remove()
    return figure, all_axes[:count]


def _matching(candidates: Sequence[Measure], site: str | None, epsilon: float | None) -> Sequence[Measure]:
    for name, requested in {"site": site, "epsilon": epsilon}.items():
        matching = [measure for measure in candidates if requested is None or getattr(measure, name) == requested]
        if not matching:
            available = ", ".join(dict.fromkeys(str(getattr(measure, name)) for measure in candidates))
            raise UserError(f"{name} {requested!r} is not in the table: expected one of {available}")
        candidates = matching
    return candidates


def _kinds(measure: Measure) -> list[Kind]:
    return [name for name, axes in KINDS.items() if any(set(axes) <= set(key) for key in measure.blocks)]


def _ticks(names: Sequence[Any] | Labels) -> tuple[list[int], list[str]]:
    step = max(1, len(names) // 12)
    at = list(range(0, len(names), step))
    return at, [plain_text(shorten(str(names[i]), TICK)) for i in at]


def _line_axes(title: str, axis: str) -> tuple[Figure, Axes]:
    figure, (axes,) = grid(1, 1, 5.2, 3.0)
    axes.set_title(plain_text(title), fontsize=10, loc="left")
    axes.set(xlabel=axis)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _layers(title: str, block: Block) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _line_axes(title, "Layer")
    _line(axes, block, "layer", colors.SERIES_LIGHT[0])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _profile(measure: Measure, position: int | None) -> Figure:
    if position is not None:
        raise UserError("a profile is over all positions: leave position out")
    figure, axes = _line_axes(labels.name(measure, {}, with_site=True), "Position")
    whole = measure.block("position")
    if whole is not None:
        _line(axes, whole, "position", colors.SERIES_LIGHT[0])
        return figure
    by_head = measure.block("layer", "head", "position")
    block = by_head.mean_over("head") if by_head is not None else measure.blocks["layer", "position"]
    shades = colors.ramp()(np.linspace(0.25, 1.0, len(block.coordinates["layer"])))
    for layer, shade in zip(block.coordinates["layer"], shades, strict=True):
        _line(axes, block.at("layer", int(layer)), "position", shade, f"layer {layer}")
    if len(block.coordinates["layer"]) <= 12:
        axes.legend(fontsize=7, frameon=False, ncols=2)
    return figure


def _line(axes: Axes, block: Block, axis: str, color: object, label: str | None = None) -> None:
    across = block.coordinates[axis]
    axes.plot(across, block.values, color=color, linewidth=1.5, marker="o", markersize=2.5, label=label)
    if not np.isnan(block.errors).all():
        low, high = block.values - block.errors, block.values + block.errors
        axes.fill_between(across, low, high, color=color, alpha=0.16, linewidth=0)


def _panel_line(axes: Axes, points: pd.DataFrame, across: str, name: str, color: str, dashes: str) -> Line2D:
    marker = "o" if len(points) <= MARKED else ""
    line: Mapping[str, Any] = {"color": color, "linewidth": 1.5, "marker": marker, "markersize": 3, "label": name}
    value, low, high = (points[column].astype(float) for column in ("value", "low", "high"))
    (drawn,) = axes.plot(points[across], value, dashes, **line)
    axes.vlines(points[across], low, high, color=color, linewidth=1, alpha=0.6)
    return drawn
