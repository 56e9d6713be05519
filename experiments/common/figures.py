"""Figures of results as SVG: one style, the report's colors, and the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.parts import FIGURES, Figure
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

STYLE: dict[Any, Any] = {"svg.hashsalt": "regard", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False}
STYLE |= {"axes.spines.right": False, "legend.frameon": False, "axes.titlelocation": "left"}
GREY = "#8a8a8a"


def new_figure(width: float, height: float) -> Drawing:
    """Return an empty figure of a size in inches."""
    from matplotlib.figure import Figure as Drawing

    return Drawing(figsize=(width, height), layout="constrained")


def color_ramp() -> Any:
    """Return the report's color ramp as a color map."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("house", colors.RAMP_LIGHT, N=64)


def label_axes(axes: Axes, title: str, x: str, **legend: Any) -> None:
    """Set the title and the x label of axes whose y starts at 0, with a legend if they have labeled lines."""
    axes.set_title(title, fontsize=8)
    axes.set_xlabel(x)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(**{"fontsize": 6, "handlelength": 3, **legend})


def legend_beside(drawing: Drawing, axes: Axes) -> None:
    """Put the legend of axes to the right of them, where it hides no line."""
    lines, names = axes.get_legend_handles_labels()
    if names:
        drawing.legend(lines, names, loc="outside right upper", fontsize=6, handlelength=3)


def save_figures(figures: Sequence[Figure], folder: Path = FIGURES) -> list[Path]:
    """Draw figures into a folder, as NAME.svg."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for figure in figures:
            paths.append(folder / f"{figure.name}.svg")
            figure.draw().savefig(paths[-1], format="svg", metadata={"Date": None, "Creator": None})
    return paths
