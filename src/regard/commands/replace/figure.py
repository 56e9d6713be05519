"""A run with replaced heads as a Matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import pandas as pd
from torch import Tensor

from regard.commands.replace import charts as replace_charts
from regard.commands.replace import pictures as replace_pictures
from regard.commands.replace.scores import check_scores
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
    record: Mapping[str, Any],
    matrices: Mapping[str, Tensor],
) -> Figure:
    """Scores by fraction of dynamic heads, a line for each source of constants ("fractions") or each order of the heads
    ("orders", PAPA's figure 5), with 95 % intervals; or the matrices of some heads ("constants").

    The figure belongs to the caller: no global state of pyplot is touched. Raises UserError for another kind, and where
    there is nothing to draw.
    """
    if kind == "constants":
        found = replace_pictures.pictures(heads, matrices)
        if not found:
            raise UserError("there are no constant matrices to draw: expected those of at least one layer")
        return _matrices(found)
    if kind not in get_args(ReplaceKind):
        raise UserError(f"cannot draw {kind!r}: expected one of {', '.join(get_args(ReplaceKind))}")
    check_scores(scores)
    draw = replace_charts.score_panels if kind == "fractions" else replace_charts.order_panels
    panels = draw(scores, record)
    if not panels:
        needed = "scores with constant heads" if kind == "fractions" else "scores in at least two orders of the heads"
        raise UserError(f"there are no {kind} to draw: expected {needed}")
    return _lines(panels)


def _grid(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    across = min(count, columns)
    down = math.ceil(count / across)
    made = Figure(figsize=(width * across, height * down), layout="constrained")
    every = made.subplots(down, across, squeeze=False).flatten().tolist()
    for spare in every[count:]:
        spare.remove()
    return made, every[:count]


def _lines(panels: list[dict[str, Any]]) -> Figure:
    made, every = _grid(len(panels), 3, 3.6, 2.9)
    for axes, panel in zip(every, panels, strict=True):
        points = pd.DataFrame(panel["points"])
        for number, (name, line) in enumerate(points.groupby("series", sort=False)):
            _line(axes, line.astype({"value": float, "low": float, "high": float}), str(name), number)
        axes.set_title(f"{panel['caption']}, {panel['note']}", fontsize=9, loc="left")
        axes.set_xticks(panel["ticks"]["places"], panel["ticks"]["names"])
        axes.set_xlabel("Dynamic heads")
        axes.spines[["top", "right"]].set_visible(False)
    lines, names = every[0].get_legend_handles_labels()
    if len(names) > 1:
        every[0].legend(lines, names, fontsize=7, frameon=False)
    return made


def _line(axes: Axes, line: pd.DataFrame, name: str, number: int) -> None:
    inks = colors.SERIES_LIGHT
    colour, style = inks[number % len(inks)], "-" if number < len(inks) else "--"
    axes.plot(line["place"], line["value"], style, color=colour, linewidth=1.5, marker="o", markersize=3, label=name)
    axes.vlines(line["place"], line["low"], line["high"], color=colour, linewidth=1, alpha=0.6)


def _matrices(found: list[replace_pictures.Picture]) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    made, every = _grid(len(found), 4, 2.1, 2.3)
    ramp = LinearSegmentedColormap.from_list("regard", colors.RAMP_LIGHT)
    for axes, one in zip(every, found, strict=True):
        axes.imshow(one.weights, cmap=ramp, norm=PowerNorm(0.5, vmin=0), interpolation="nearest")
        axes.set_title(f"{one.site} {one.layer}.{one.head}\n{one.pattern}".rstrip(), fontsize=8, loc="left")
        axes.set_xticks([])
        axes.set_yticks([])
    return made
