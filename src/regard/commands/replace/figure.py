"""Matplotlib figure of a run with replaced heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import pandas as pd
from torch import Tensor

from regard.commands.replace import charts as replace_charts
from regard.commands.replace import pictures as replace_pictures
from regard.commands.replace.scores import Outcome
from regard.errors import UserError
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ReplaceKind = Literal["fractions", "orders", "constants"]


def replace_figure(
    kind: ReplaceKind,
    scores: pd.DataFrame,
    heads: pd.DataFrame,
    metadata: Mapping[str, Any],
    matrices: Mapping[str, Tensor],
) -> Figure:
    """Draw a figure without touching pyplot's global state. Raises UserError if there is nothing to draw.

    "fractions" are scores by fraction, a line per source of constants; "orders" have a line per head ranking (PAPA,
    figure 5); both have 95 % intervals. "constants" are matrices of some heads.
    """
    if kind == "constants":
        images = replace_pictures.pictures(heads, matrices)
        if not images:
            raise UserError("there are no constant matrices to draw: expected those of at least one layer")
        return _matrices(images)
    if kind not in get_args(ReplaceKind):
        raise UserError(f"cannot draw {kind!r}: expected one of {', '.join(get_args(ReplaceKind))}")
    draw, needed = replace_charts.score_panels, "scores with constant heads"
    if kind == "orders":
        draw, needed = replace_charts.order_panels, "scores in at least two orders of the heads"
    panels = draw(Outcome(scores, metadata))
    if not panels:
        raise UserError(f"there are no {kind} to draw: expected {needed}")
    return _lines(panels)


def _grid(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    num_columns = min(count, columns)
    num_rows = math.ceil(count / num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for unused in all_axes[count:]:
        unused.remove()
    return figure, all_axes[:count]


def _lines(panels: list[dict[str, Any]]) -> Figure:
    figure, all_axes = _grid(len(panels), 3, 3.6, 2.9)
    for axes, panel in zip(all_axes, panels, strict=True):
        points = pd.DataFrame(panel["points"])
        for index, (name, line) in enumerate(points.groupby("series", sort=False)):
            _line(axes, line.astype({"value": float, "low": float, "high": float}), str(name), index)
        axes.set_title(f"{panel['caption']}, {panel['note']}", fontsize=9, loc="left")
        axes.set_xticks(panel["ticks"]["places"], panel["ticks"]["names"])
        axes.set_xlabel("Dynamic heads")
        axes.spines[["top", "right"]].set_visible(False)
    lines, names = all_axes[0].get_legend_handles_labels()
    if len(names) > 1:
        all_axes[0].legend(lines, names, fontsize=7, frameon=False)
    return figure


def _line(axes: Axes, line: pd.DataFrame, name: str, index: int) -> None:
    palette = colors.SERIES_LIGHT
    color, style = palette[index % len(palette)], "-" if index < len(palette) else "--"
    axes.plot(line["place"], line["value"], style, color=color, linewidth=1.5, marker="o", markersize=3, label=name)
    axes.vlines(line["place"], line["low"], line["high"], color=color, linewidth=1, alpha=0.6)


def _matrices(images: list[replace_pictures.Picture]) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    figure, all_axes = _grid(len(images), 4, 2.1, 2.3)
    ramp = LinearSegmentedColormap.from_list("regard", colors.RAMP_LIGHT)
    for axes, image in zip(all_axes, images, strict=True):
        axes.imshow(image.weights, cmap=ramp, norm=PowerNorm(0.5, vmin=0), interpolation="nearest")
        axes.set_title(f"{image.site} {image.layer}.{image.head}\n{image.pattern}".rstrip(), fontsize=8, loc="left")
        axes.set_xticks([])
        axes.set_yticks([])
    return figure
