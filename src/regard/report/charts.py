"""Vega-Lite specifications without data, and the libraries that draw them, as text for the page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal


@cache
def libraries() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script of 0.9 MB that sets `vegaEmbed`; it loads nothing from a network."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def specifications() -> dict[str, Any]:
    """The charts by name: `map` (cells), `profile` and `curve` (lines). The page's script adds data, scale, size."""
    return {"map": _map(), "profile": _lines("position", "Position"), "curve": _lines("layer", "Layer")}


_TIPS = {"layer": "layer", "x": "head", "shown": "value"}


def _map() -> dict[str, Any]:
    import altair as alt

    x = alt.X("x:O", title="Head").axis(labelAngle=0, labelOverlap=True, labelSeparation=6, ticks=False)
    y = alt.Y("layer:O", title="Layer").axis(labelOverlap=True, ticks=False)
    tips = [alt.Tooltip(f"{field}:N", title=title) for field, title in _TIPS.items()]
    colour = alt.Color("value:Q", title=None).legend(orient="top", gradientLength=160, gradientThickness=8, tickCount=3)
    cells = alt.Chart(alt.NamedData("cells")).mark_rect(cursor="pointer", aria=False)
    picked = alt.Chart(alt.NamedData("picked")).mark_rect(fillOpacity=0, strokeWidth=2.5, aria=False)
    layers = alt.layer(cells.encode(x=x, y=y, color=colour, tooltip=tips), picked.encode(x=x, y=y))
    return plain(layers)


def _lines(x: str, title: str) -> dict[str, Any]:
    import altair as alt

    across = alt.X(f"{x}:Q", title=title).axis(tickMinStep=1, grid=False, labelFlush=False).scale(nice=False)
    tips = {x: x, "series": "series", "part": "part", "shown": "value"}
    return lines(across, tips, dash="part", interval="area", size=14)


def lines(
    across: Any, tips: Mapping[str, str], *, dash: str, interval: Literal["area", "rule"], size: int
) -> dict[str, Any]:
    """A line for each series over `across`, with its interval from low to high, and dots that tell `tips` by field."""
    import altair as alt

    up = alt.Y("value:Q", title=None).axis(tickCount=4).scale(zero=False)
    colour = alt.Color("series:N", sort=None).legend(None)
    stroke = alt.StrokeDash(f"{dash}:N", sort=None).legend(None)
    told = [alt.Tooltip(f"{field}:{'Q' if field == 'step' else 'N'}", title=title) for field, title in tips.items()]
    base = alt.Chart(alt.NamedData("points")).encode(x=across, color=colour)
    sure = base.mark_area(opacity=0.16, aria=False) if interval == "area" else base.mark_rule(**_WHISKER)
    low = sure.encode(y=alt.Y("low:Q", title=None), y2="high:Q", detail="part:N")
    line = base.mark_line(strokeWidth=1.75, aria=False).encode(y=up, strokeDash=stroke)
    dots = base.mark_point(filled=True, opacity=1, size=size, aria=False).encode(y=up, tooltip=told, detail="part:N")
    return plain(alt.layer(low, line, dots))


_WHISKER: dict[str, Any] = {"strokeWidth": 1.25, "opacity": 0.55, "aria": False}


def plain(chart: Any) -> dict[str, Any]:
    """The checked specification without what the page sets itself."""
    written = chart.to_dict(validate=True)
    return {key: part for key, part in written.items() if key not in ("config", "$schema")}
