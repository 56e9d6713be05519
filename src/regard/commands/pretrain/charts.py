"""Panels and maps of a report on pre-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.pretrain import words
from regard.commands.pretrain.curves import GREY, at_step
from regard.report.panels import DOMAIN, Panel, domains, line, numeric_column, panel, thin_indices

SHOWN_LAYERS = 5
"""Layers with a curve, at most."""

SHOWN_STEPS = 4
"""Steps with a profile over layers, at most."""

MAP_STEPS = 60
"""Steps of a map, at most."""


def loss_panels(history: pd.DataFrame) -> list[Panel]:
    """Plot training and validation loss by step; with several domains, also a line for each."""
    step = numeric_column(history, "step")
    training = line("step", "training", step, numeric_column(history, "loss"))
    valid = line("step", "validation", step, numeric_column(history, "valid_loss"))
    names = domains(history)
    domain_points = [
        point for name in names for point in line("step", name, step, numeric_column(history, f"{DOMAIN}{name}"))
    ]
    domain_panels = panel("Validation by domain", _NATS, "step", domain_points) if len(names) > 1 else []
    lines = [("training", GREY, 0), ("validation", 0, 0)] if training and valid else None
    caption = "Training and validation" if training and valid else "Validation" if valid else "Training"
    return panel(caption, _NATS, "step", training + valid, lines) + domain_panels


_NATS = "nats per token"


def sink_panels(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[Panel]:
    """Plot sink rate and mean α_1 by step, and the rate of a virtual sink."""
    step = numeric_column(history, "step")
    first_rate, largest_rate = numeric_column(history, "sink_rate"), numeric_column(history, "sink_rate_max")
    rates = line("step", words.symbol(metadata), step, first_rate, "%")
    if np.nanmax(np.abs(largest_rate - first_rate), initial=0) > 0:
        rates += line("step", "strongest position", step, largest_rate, "%")
    rates += line("step", "virtual sink", step, numeric_column(history, "virtual_sink_rate"), "%")
    masses = line("step", "mean α₁", step, numeric_column(history, "alpha_first"))
    uniform = line("step", UNIFORM, step, numeric_column(history, "alpha_uniform")) if masses else []
    lines = [("mean α₁", 0, 0), (UNIFORM, GREY, 1)] if uniform else None
    return [
        *panel("Sink rate", "% of heads × samples", "step", rates),
        *panel("Attention on the first token", "mean of α₁ over heads and samples", "step", masses + uniform, lines),
    ]


UNIFORM = "uniform attention"


def norm_panels(history: pd.DataFrame, sinks: pd.DataFrame) -> list[Panel]:
    """Plot |h_1| relative to the mean of the others: by layer at a few steps, and by step for a few layers."""
    by_step = at_step(sinks, "norm_ratio")
    steps = [list(by_step)[i] for i in thin_indices(len(by_step), SHOWN_STEPS)]
    profiles, curves = [], []
    for step in steps:
        rows = by_step[step].sort_values("layer")
        profiles += line("layer", f"step {step:,}", numeric_column(rows, "layer"), numeric_column(rows, "value"))
    all_rows = pd.concat(by_step.values()) if by_step else sinks.iloc[:0]
    layers = sorted(int(layer) for layer in all_rows["layer"].dropna().unique()) if by_step else []
    for layer in [layers[i] for i in thin_indices(len(layers), SHOWN_LAYERS)]:
        rows = all_rows[all_rows["layer"] == layer]
        name = "embeddings" if layer == -1 else f"layer {layer}"
        curves += line("step", name, numeric_column(rows, "step"), numeric_column(rows, "value"))
    largest = line(
        "step", "largest of all layers", numeric_column(history, "step"), numeric_column(history, "norm_ratio")
    )
    lines = [(f"step {step:,}", ink, 0) for step, ink in zip(steps, _inks(len(steps)), strict=True)]
    names = list(dict.fromkeys(point["series"] for point in curves))
    styles = [
        *([("largest of all layers", GREY, 1)] if largest else []),
        *((n, i, 0) for n, i in zip(names, _INKS, strict=False)),
    ]
    return [
        *panel("By layer", "layer −1: input of the first layer", "layer", profiles, lines),
        *panel("By step", "", "step", largest + curves, styles),
    ]


_INKS = (0, 1, 2, 3, 5)


def _inks(count: int) -> Sequence[int]:
    """Choose gray for the first of several, and the first ink for the last one."""
    return [GREY, *_INKS[1 : count - 1], _INKS[0]] if count > 1 else [_INKS[0]][:count]


def position_panels(sinks: pd.DataFrame) -> list[Panel]:
    """Plot the model's sink rate by position at the last monitored step, a line per threshold."""
    by_step = at_step(sinks, "sink_rate")
    if not by_step:
        return []
    step = max(by_step)
    rows = by_step[step][by_step[step]["layer"].isna() & by_step[step]["head"].isna()]
    points = []
    for epsilon, group in rows.groupby("epsilon", dropna=False):
        by_position = group.sort_values("position")
        name = "sink rate" if pd.isna(epsilon) else f"ε = {epsilon:g}"
        points += line(
            "position", name, numeric_column(by_position, "position"), numeric_column(by_position, "value"), "%"
        )
    names = list(dict.fromkeys(point["series"] for point in points))
    caption = "Sink rate by position" + (f", {names[0]}" if len(names) == 1 and names[0] != "sink rate" else "")
    return panel(caption, f"% of heads × samples, step {step:,}", "position", points)


def maps(sinks: pd.DataFrame) -> list[dict[str, Any]]:
    """Map layers × heads by step: α_1, and the mass of a virtual sink."""
    return [*_map(sinks, "alpha", "Mean α₁"), *_map(sinks, "virtual_alpha", "Mass on the virtual sink")]


def _map(sinks: pd.DataFrame, statistic: str, caption: str) -> list[dict[str, Any]]:
    found = {step: rows.dropna(subset=["layer", "head", "value"]) for step, rows in at_step(sinks, statistic).items()}
    found = {step: rows for step, rows in found.items() if len(rows)}
    if not found:
        return []
    kept = [list(found)[i] for i in thin_indices(len(found), MAP_STEPS)]
    every = pd.concat(found.values())
    layers, heads = (sorted(int(label) for label in every[axis].unique()) for axis in ("layer", "head"))
    values = [_cells(found[step], layers, heads) for step in kept]
    top = float(every["value"].max()) or 1.0
    return [
        {
            "caption": caption,
            "layers": layers,
            "heads": heads,
            "steps": kept,
            "top": float(f"{top:.5g}"),
            "values": values,
        }
    ]


def _cells(rows: pd.DataFrame, layers: Sequence[int], heads: Sequence[int]) -> list[list[float | None]]:
    by = {(int(row.layer), int(row.head)): float(f"{row.value:.5g}") for row in rows.itertuples(index=False)}
    return [[by.get((layer, head)) for head in heads] for layer in layers]
