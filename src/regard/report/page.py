"""One measurement as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.report import charts, colors, labels
from regard.report import html as markup
from regard.report.arrays import Measure
from regard.report.payload import script_safe, thinned_length


def charted(every: Sequence[Measure], *, several: bool, note: str = "") -> list[str]:
    """The sections that the page's script fills, those only for which there are values."""
    axes = {key for measure in every for key in measure.blocks}
    has_map = any("layer" in key and len(key) > 1 for key in axes)
    has_lines = any("layer" in key for key in axes)
    empty = '<div class="lines" id="{}"></div>'
    click = "Click a cell, or type its layer and head, to see that head over positions."
    embeddings = "Layer \u22121 is the input of the first layer." if _embeds(every) else ""
    return [
        markup.section("heads", "Layers and heads", markup.maps(several) if has_map else "", f"{click} {note}".strip()),
        markup.section("layers", "By layer", empty.format("curves") if has_lines else "", embeddings),
        markup.section("model", "Whole model, by position", empty.format("models") if ("position",) in axes else ""),
    ]


def assemble(
    title: str,
    body: str,
    data: dict[str, Any],
    *,
    specifications: dict[str, Any] | None = None,
    script: str | None = None,
) -> str:
    """The HTML file of a body and the data of its charts, which `script` draws (None: those of measurements)."""
    made = charts.specifications() if specifications is None else specifications
    data = {**data, "charts": made, "colours": {"ramp": colors.RAMPS, "series": colors.SERIES}}
    scripts = [charts.libraries(), markup.asset("drawing.js") + (script or markup.asset("page.js"))]
    return markup.document(title, body, script_safe(data), scripts)


def thinning(every: Sequence[Measure]) -> str:
    """A sentence on positions left away, "" where the page holds all."""
    kept = thinned_length(every)
    if kept is None:
        return ""
    return (
        f"To keep the page small it holds {len(kept)} positions, the first ones and then ever fewer; the table has all."
    )


def model_name(record: Mapping[str, Any]) -> str:
    """The model's name in the record, or "A model"."""
    return str(labels.section(record, "model").get("name") or "A model")


def lede(record: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    model, cost = labels.section(record, "model"), labels.section(record, "cost")
    parts = []
    if model.get("layers") is not None and model.get("heads") is not None:
        parts.append(f"{model['layers']} layers × {model['heads']} heads")
    parts.append(labels.samples(record))
    if isinstance(cost.get("seconds"), (int, float)):
        parts.append(f"measured in {labels.number(float(cost['seconds']), 3)} s")
    return " · ".join(part for part in parts if part)


def _embeds(every: Sequence[Measure]) -> bool:
    blocks = [block for measure in every for block in measure.blocks.values() if "layer" in block.axes]
    return any(-1 in block.coordinates["layer"] for block in blocks)
