"""One statistic as a Matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from regard.errors import UserError
from regard.report import colors, labels
from regard.report.arrays import Block, Labels, Measure, heads, layers, mean_over_heads, measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

Kind = Literal["map", "profile", "layers"]
KINDS: tuple[Kind, ...] = ("map", "layers", "profile")


def figure(
    table: pd.DataFrame,
    statistic: str,
    *,
    site: str | None = None,
    epsilon: float | None = None,
    position: int | None = None,
    kind: Kind | None = None,
) -> Figure:
    """One statistic drawn as a map (layers × heads), as curves over layers, or as a profile over positions.

    `site` and `epsilon` choose where the table has several (None: the first). `position` takes map and curves at that
    position (None: of the whole sequence where measured, else at the first). `kind` None takes the first of map,
    layers, profile that the statistic has. The figure belongs to the caller: no global state of pyplot is touched.
    Raises UserError, naming what the table has, for an unknown statistic, site, epsilon, position or kind.
    """
    measure = _choose(measures(table), statistic, site, epsilon)
    possible = _possible(measure)
    chosen = possible[0] if kind is None else kind
    if chosen not in possible:
        raise UserError(f"{statistic} cannot be drawn as {kind!r}: expected one of {', '.join(possible)}")
    draw = {"map": _map, "layers": _layers, "profile": _profile}[chosen]
    return draw(measure, position)


def _choose(found: Sequence[Measure], statistic: str, site: str | None, epsilon: float | None) -> Measure:
    left = _those([(measure, measure.statistic) for measure in found], statistic, "statistic")
    if site is not None:
        left = _those([(measure, measure.site) for measure in left], site, "site")
    if epsilon is not None:
        left = _those([(measure, measure.epsilon) for measure in left], epsilon, "epsilon")
    return left[0]


def _those(pairs: Sequence[tuple[Measure, object]], wanted: object, what: str) -> list[Measure]:
    left = [measure for measure, has in pairs if has == wanted]
    if not left:
        there = ", ".join(dict.fromkeys(str(has) for _, has in pairs))
        raise UserError(f"{what} {wanted!r} is not in the table: expected one of {there}")
    return left


def _possible(measure: Measure) -> list[Kind]:
    keys = set(measure.blocks)
    has: dict[Kind, bool] = {
        "map": bool(keys & {("layer", "head"), ("layer", "head", "position")}),
        "layers": any("layer" in key for key in keys),
        "profile": any("position" in key for key in keys),
    }
    found = [kind for kind in KINDS if has[kind]]
    if not found:
        raise UserError(f"{measure.statistic} has one value for the whole model: there is nothing to draw")
    return found


def _canvas(measure: Measure, width: float, height: float, where: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.add_subplot()
    axes.set_title(labels.name(measure, {}, with_site=True) + where, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


def _ramp() -> LinearSegmentedColormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", colors.RAMP_LIGHT)


def _map(measure: Measure, position: int | None) -> Figure:
    taken = heads(measure, position)
    if taken is None:
        raise UserError(f"{measure.statistic} has no values by position: leave position out")
    layer, head = taken.block.coordinates["layer"], taken.block.coordinates["head"]
    where = "" if taken.position is None else f", position {taken.position}"
    size = min(0.32, 12 / max(len(layer), len(head)))
    made, axes = _canvas(measure, max(3.2, 1.6 + size * len(head)), max(2.2, 0.9 + size * len(layer)), where)
    image = axes.imshow(taken.block.values, cmap=_ramp(), aspect="equal", interpolation="nearest")
    axes.set(xlabel="Head", ylabel="Layer")
    axes.set_xticks(*_ticks(head))
    axes.set_yticks(*_ticks(layer))
    axes.spines[:].set_visible(False)
    made.colorbar(image, ax=axes, shrink=0.8)
    return made


def _ticks(places: Labels) -> tuple[list[int], list[str]]:
    step = max(1, len(places) // 12)
    at = list(range(0, len(places), step))
    return at, [str(places[i]) for i in at]


def _layers(measure: Measure, position: int | None) -> Figure:
    from matplotlib.ticker import MaxNLocator

    taken = layers(measure, position)
    if taken is None:
        raise UserError(f"{measure.statistic} has no values by position: leave position out")
    where = "" if taken.position is None else f", position {taken.position}"
    made, axes = _canvas(measure, 5.2, 3.0, where)
    _line(axes, taken.block, "layer", colors.SERIES_LIGHT[0])
    axes.set(xlabel="Layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return made


def _profile(measure: Measure, position: int | None) -> Figure:
    if position is not None:
        raise UserError("a profile is over all positions: leave position out")
    made, axes = _canvas(measure, 5.2, 3.0, "")
    axes.set(xlabel="Position")
    whole = measure.block("position")
    if whole is not None:
        _line(axes, whole, "position", colors.SERIES_LIGHT[0])
        return made
    by_head = measure.block("layer", "head", "position")
    block = mean_over_heads(by_head) if by_head is not None else measure.blocks["layer", "position"]
    shades = _ramp()(np.linspace(0.25, 1.0, len(block.coordinates["layer"])))
    for layer, shade in zip(block.coordinates["layer"], shades, strict=True):
        _line(axes, block.at("layer", int(layer)), "position", shade, f"layer {layer}")
    if len(block.coordinates["layer"]) <= 12:
        axes.legend(fontsize=7, frameon=False, ncols=2)
    return made


def _line(axes: Axes, block: Block, axis: str, colour: object, label: str | None = None) -> None:
    across = block.coordinates[axis]
    axes.plot(across, block.values, color=colour, linewidth=1.5, marker="o", markersize=2.5, label=label)
    if not np.isnan(block.errors).all():
        low, high = block.values - block.errors, block.values + block.errors
        axes.fill_between(across, low, high, color=colour, alpha=0.16, linewidth=0)
