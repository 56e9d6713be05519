"""Panels and maps of a report on pre-training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.report import labels
from regard.report.drawing import Map
from regard.report.panels import DOMAIN, Panel, curve, domains, numeric_column, panel, round_value, thin_indices

GREY = 4
"""Ink of reference lines."""
SHOWN_LAYERS, SHOWN_STEPS, MAP_STEPS = 5, 4, 60
"""The most layers with a curve, steps with a profile over layers, and steps of a map."""
_NATS = "nats per token"
UNIFORM = "uniform attention"
_INKS = (0, 1, 2, 3, 5)


def at_step(sinks: pd.DataFrame, statistic: str) -> dict[int, pd.DataFrame]:
    """Group the rows of a statistic by step, in order."""
    if sinks.empty:
        return {}
    rows = sinks[sinks["statistic"] == statistic]
    return {int(step): group for step, group in rows.groupby("step", sort=True)}


def _names(points: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(point["series"] for point in points))


def loss_panels(history: pd.DataFrame) -> list[Panel]:
    """Plot training and validation loss by step; with several domains, also a line for each."""
    training, valid = curve("training", history, "loss"), curve("validation", history, "valid_loss")
    by_domain = [point for name in domains(history) for point in curve(name, history, f"{DOMAIN}{name}")]
    lines = [("training", GREY, 0), ("validation", 0, 0)] if training and valid else None
    caption = "Training and validation" if training and valid else "Validation" if valid else "Training"
    return [
        *panel(caption, _NATS, "step", training + valid, lines),
        *panel("Validation by domain", _NATS, "step", by_domain),
    ]


def symbol(metadata: Mapping[str, Any]) -> str:
    """Return the sink rate's symbol with its threshold, the first if there are several, as in "Sink₀ (ε = 0.3)"."""
    epsilon = labels.section(metadata, "watch").get("epsilon")
    thresholds = [epsilon] if isinstance(epsilon, (int, float)) else list(epsilon or [])
    return f"Sink₀ (ε = {float(thresholds[0]):g})" if thresholds else "Sink₀"


def sink_panels(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[Panel]:
    """Plot sink rate and mean α_0 by step, and the rate of a virtual sink."""
    rates = curve(symbol(metadata), history, "sink_rate", "%")
    first_rate, largest_rate = numeric_column(history, "sink_rate"), numeric_column(history, "sink_rate_max")
    if np.nanmax(np.abs(largest_rate - first_rate), initial=0) > 0:
        rates += curve("strongest position", history, "sink_rate_max", "%")
    rates += curve("virtual sink", history, "virtual_sink_rate", "%")
    masses = curve("mean α₀", history, "alpha_first")
    uniform = curve(UNIFORM, history, "alpha_uniform") if masses else []
    lines = [("mean α₀", 0, 0), (UNIFORM, GREY, 1)] if uniform else None
    return [
        *panel("Sink rate", "% of heads × samples", "step", rates),
        *panel("Attention on the first token", "mean of α₀ over heads and samples", "step", masses + uniform, lines),
    ]


def norm_panels(history: pd.DataFrame, sinks: pd.DataFrame) -> list[Panel]:
    """Plot |h_0| relative to the mean of the others: by layer at a few steps, and by step for a few layers."""
    by_step = at_step(sinks, "norm_ratio")
    steps = [list(by_step)[i] for i in thin_indices(len(by_step), SHOWN_STEPS)]
    profiles = [
        point for step in steps for point in curve(f"step {step:,}", by_step[step].sort_values("layer"), axis="layer")
    ]
    rows = pd.concat(by_step.values()) if by_step else pd.DataFrame({"layer": []})
    layers = sorted(int(layer) for layer in rows["layer"].dropna().unique())
    curves = []
    for layer in [layers[i] for i in thin_indices(len(layers), SHOWN_LAYERS)]:
        curves += curve("layer −1" if layer == -1 else f"layer {layer}", rows[rows["layer"] == layer])
    largest = curve("largest of all layers", history, "norm_ratio")
    inks = [GREY, *_INKS[1 : len(steps) - 1], _INKS[0]] if len(steps) > 1 else _INKS[: len(steps)]
    lines = [(f"step {step:,}", ink, 0) for step, ink in zip(steps, inks, strict=True)]
    styles = [("largest of all layers", GREY, 1)] if largest else []
    styles += [(name, ink, 0) for name, ink in zip(_names(curves), _INKS, strict=False)]
    return [
        *panel("By layer", "ratio; layer −1 is the input of layer 0", "layer", profiles, lines),
        *panel("By step", "ratio", "step", largest + curves, styles),
    ]


def position_panels(sinks: pd.DataFrame) -> list[Panel]:
    """Plot the model's sink rate by position at the last monitored step, a line per threshold."""
    by_step = at_step(sinks, "sink_rate")
    if not by_step:
        return []
    step = max(by_step)
    rows = by_step[step][by_step[step]["layer"].isna() & by_step[step]["head"].isna()]
    points = []
    for epsilon, group in rows.groupby("epsilon", dropna=False):
        name = "sink rate" if pd.isna(epsilon) else f"ε = {epsilon:g}"
        points += curve(name, group.sort_values("position"), unit="%", axis="position")
    names = _names(points)
    caption = "Sink rate by position" + (f", {names[0]}" if len(names) == 1 and names[0] != "sink rate" else "")
    return panel(caption, f"% of heads × samples, step {step:,}", "position", points)


def maps(sinks: pd.DataFrame) -> list[dict[str, Any]]:
    """Map layers × heads by step: α_0, and the mass of a virtual sink."""
    return [*_map(sinks, "alpha", "Mean α₀"), *_map(sinks, "virtual_alpha", "Mass on the virtual sink")]


def last_maps(sinks: pd.DataFrame) -> list[Map]:
    """Return the maps at the last monitored step."""
    return [
        Map(
            f"{item['caption']}, step {item['steps'][-1]:,}",
            np.array(item["values"][-1], dtype=np.float64),
            item["layers"],
            item["heads"],
        )
        for item in maps(sinks)
    ]


def _map(sinks: pd.DataFrame, statistic: str, caption: str) -> list[dict[str, Any]]:
    known = {step: rows.dropna(subset=["layer", "head", "value"]) for step, rows in at_step(sinks, statistic).items()}
    known = {step: rows for step, rows in known.items() if len(rows)}
    if not known:
        return []
    steps = [list(known)[i] for i in thin_indices(len(known), MAP_STEPS)]
    rows = pd.concat(known.values())
    layers, heads = (sorted(int(label) for label in rows[axis].unique()) for axis in ("layer", "head"))
    values = [_cells(known[step], layers, heads) for step in steps]
    top = round_value(float(rows["value"].max()) or 1.0)
    return [{"caption": caption, "layers": layers, "heads": heads, "steps": steps, "top": top, "values": values}]


def _cells(rows: pd.DataFrame, layers: Sequence[int], heads: Sequence[int]) -> list[list[float | None]]:
    by = {(int(row.layer), int(row.head)): round_value(row.value) for row in rows.itertuples(index=False)}
    return [[by.get((layer, head)) for head in heads] for layer in layers]
