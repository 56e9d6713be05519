"""Pictures of results as SVG: one style, the house colours, and the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {"svg.hashsalt": "regard", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False}
STYLE |= {"axes.spines.right": False, "legend.frameon": False, "axes.titlelocation": "left"}


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ramp() -> Any:
    """The house colour in steps of lightness, as a colour map."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("house", colors.RAMP_LIGHT, N=64)


def save(pictures: Mapping[str, Callable[[], Figure]], folder: Path) -> list[Path]:
    """What the functions draw, written as NAME.svg into a folder; the same figures give the same bytes."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in pictures.items():
            written.append(folder / f"{name}.svg")
            draw().savefig(written[-1], format="svg", metadata={"Date": None, "Creator": None})
    return written
