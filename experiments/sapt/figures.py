"""Figures of docs/sapt.md."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.common.comparison import where
from experiments.common.figures import GREY, color_ramp, label_axes, legend_beside, new_figure
from experiments.common.parts import Figure
from experiments.sapt.analysis_tables import CURVES as FIFTY
from experiments.sapt.tables import DRAWN, SAPT, UNREFLECTED, WHEN, Tables
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

COLORS = colors.SERIES_LIGHT
TITLES = {"learning": "when learnt", "end": "at the end"}
COMPARED = (SAPT, UNREFLECTED, "sequential-lora", "replay-lora", "o-lora", "slao")
"""The rows whose curves are drawn."""


def draw_weights(tables: Tables) -> Drawing:
    """Draw maps of task by adapter: a line a row, when each task was learnt and at the end."""
    order = tables.orders[0]
    rows = [row for row in DRAWN if row in set(where(tables.weights, order=order)["row"])]
    tasks = tables.record["orders"][order]["tasks"]
    drawing = new_figure(7.2, 3.2 * len(rows))
    for row, line in zip(rows, drawing.subplots(len(rows), len(WHEN), squeeze=False), strict=True):
        drift = where(tables.gate, order=order, row=row)["drift"].mean()
        for when, axes in zip(WHEN, line, strict=True):
            weights = weight_map(tables, order, row, when)
            image = axes.imshow(weights, cmap=color_ramp(), vmin=0, vmax=1, interpolation="none")
            axes.set_xticks(range(len(tasks)), tasks, rotation=60, ha="right", fontsize=6)
            axes.set_yticks(range(len(tasks)), tasks, fontsize=6)
            axes.tick_params(length=0)
            axes.set_title(f"{row}, {TITLES[when]}" + (f": KL {drift:.2f}" if when == "end" else ""), fontsize=8)
        drawing.colorbar(image, ax=list(line), pad=0.01)
    return drawing


def weight_map(tables: Tables, order: str, row: str, when: str) -> Any:
    """Return the mean weights (task, adapter); NaN where an adapter did not exist yet."""
    tasks = len(tables.record["orders"][order]["tasks"])
    weights = np.full((tasks, tasks), np.nan)
    cells = where(tables.weights, order=order, row=row, when=when)
    weights[cells["task_index"] - 1, cells["adapter"] - 1] = cells["weight"]
    return weights


def draw_own(tables: Tables) -> Drawing:
    """Draw the weight of each task's own adapter, a line a row and a time."""
    order = tables.orders[0]
    drawing = new_figure(7.2, 2.6)
    axes = drawing.subplots()
    for row, color in zip(DRAWN, COLORS, strict=False):
        gate = where(tables.gate, order=order, row=row)
        for when, style in zip(WHEN, ("--", "-"), strict=True):
            means = gate.groupby("task_index")[f"own_adapter_weight_{when}"].mean()
            if len(means):
                axes.plot(means.index, means, style, color=color, linewidth=1.3, label=f"{row}, {TITLES[when]}")
    tasks = tables.record["orders"][order]["tasks"]
    axes.set_xticks(range(1, len(tasks) + 1), tasks, rotation=45, ha="right")
    axes.set_ylim(0, 1.02)
    axes.set_title("Weight of the own adapter", fontsize=8)
    legend_beside(drawing, axes)
    return drawing


def draw_curves(tables: Tables) -> Drawing:
    """Draw average performance on the tasks learnt so far, a line a row; `joint` as a level."""
    order = tables.orders[0]
    drawing = new_figure(7.2, 2.8)
    axes = drawing.subplots()
    cells = where(tables.matrix, order=order)
    cells = cells[cells["after_task"] >= cells["task_index"]].dropna(subset="cil")
    for row, color in zip(COMPARED, COLORS, strict=False):
        means = mean_curve(cells[cells["row"] == row])
        if len(means):
            axes.plot(means.index, means, color=color, linewidth=1.3, label=row)
    joint = mean_curve(cells[cells["row"] == "joint"])
    if len(joint):
        axes.axhline(float(joint.iloc[-1]), color=GREY, linestyle=":", linewidth=1.2, label="joint, at the end")
    axes.set_xlabel("Tasks learnt")
    axes.set_title(f"Average performance, order {order}, %", fontsize=8)
    axes.set_ylim(bottom=0)
    legend_beside(drawing, axes)
    return drawing


def mean_curve(cells: Any) -> Any:
    """Return the mean score over the tasks learnt, then over seeds, by their number."""
    by_seed = cells.groupby(["seed", "after_task"])["cil"].mean()
    return by_seed.groupby("after_task").mean()


def draw_cost(tables: Tables) -> Drawing:
    """Draw average performance against seconds of training."""
    drawing = new_figure(7.2, 3.4)
    axes = drawing.subplots()
    for row in tables.rows(tables.whole):
        mean = tables.mean(tables.whole, row)
        if mean is not None:
            seconds = tables.seconds(row)
            color = COLORS[0] if row == SAPT else GREY
            axes.scatter([seconds], [mean.mean], s=14, color=color, linewidths=0)
            axes.annotate(row, (seconds, mean.mean), xytext=(3, 2), textcoords="offset points", fontsize=5.5)
    axes.set_xlabel("Seconds of training")
    axes.set_title("Average performance at the end, %", fontsize=8)
    return drawing


def draw_fifty(tables: Tables) -> Drawing:
    """Draw weights, entropy, performance and cost by the number of tasks."""
    rows = where(tables.analyses, analysis="fifty")
    drawing = new_figure(7.2, 4.0)
    axes: list[Axes] = list(drawing.subplots(2, 2).flat)
    for (measure, (title, _)), panel in zip(FIFTY.items(), axes, strict=True):
        for case, color in zip(dict.fromkeys(rows["case"]), COLORS, strict=False):
            line = where(rows, case=case, measure=measure).groupby("x")["value"].mean()
            if len(line):
                panel.plot(line.index, line, color=color, linewidth=1.1, label=case)
        label_axes(panel, title.capitalize() if title.islower() else title, "Tasks learnt")
    return drawing


def make_figures(tables: Tables) -> list[Figure]:
    """Return the figures for which there are numbers."""
    has_scores = tables.matrix["cil"].notna().any()
    figures = (
        ("curves", draw_curves, has_scores, "Average performance on the tasks learnt so far, first order."),
        ("weights", draw_weights, not tables.weights.empty, "Weights that the rows of each task give to each adapter."),
        ("own", draw_own, tables.gate["row"].isin(DRAWN).any(), "Weight of each task's own adapter, first order."),
        ("cost", draw_cost, has_scores, "Average performance against seconds of training."),
        (
            "fifty",
            draw_fifty,
            (tables.analyses["analysis"] == "fifty").any(),
            "Fifty tasks: own weight, entropy, performance and seconds a step.",
        ),
    )
    return [
        Figure(f"sapt-{name}", caption, partial(draw, tables))
        for name, draw, has_numbers, caption in figures
        if has_numbers
    ]
