"""The pictures of docs/sapt.md, from the tables in docs/results; those that there are no numbers for are not drawn.

python -m experiments.sapt.figures [--data docs/results]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments.common import drawing
from experiments.common.comparison import where
from experiments.common.drawing import figure, ramp
from experiments.common.runs import FOLDER, PICTURES
from experiments.sapt.analyses_page import FIFTY
from experiments.sapt.tables import DRAWN, SAPT, UNREFLECTED, WHEN, Tables
from regard.errors import UserError
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INKS = colors.SERIES_LIGHT
TITLES = {"learning": "when learnt", "end": "at the end"}
CURVES = (SAPT, UNREFLECTED, "sequential-lora", "replay-lora", "o-lora", "slao")
"""The rows whose curves are drawn."""
GREY = "#8a8a8a"


def weights(tables: Tables) -> Figure:
    """Maps of task by block: a line a row, when each task was learnt and at the end."""
    order = tables.orders[0]
    rows = [row for row in DRAWN if row in set(where(tables.weights, order=order)["row"])]
    tasks = tables.record["orders"][order]["tasks"]
    made = figure(7.2, 3.2 * len(rows))
    for row, line in zip(rows, made.subplots(len(rows), len(WHEN), squeeze=False), strict=True):
        drift = where(tables.gate, order=order, row=row)["drift"].mean()
        for when, axes in zip(WHEN, line, strict=True):
            given = weight_map(tables, order, row, when)
            shown = axes.imshow(given, cmap=ramp(), vmin=0, vmax=1, interpolation="none")
            axes.set_xticks(range(len(tasks)), tasks, rotation=60, ha="right", fontsize=6)
            axes.set_yticks(range(len(tasks)), tasks, fontsize=6)
            axes.tick_params(length=0)
            axes.set_title(f"{row}, {TITLES[when]}" + (f": KL {drift:.2f}" if when == "end" else ""), fontsize=8)
        made.colorbar(shown, ax=list(line), pad=0.01)
    return made


def weight_map(tables: Tables, order: str, row: str, when: str) -> Any:
    """The mean weights (task, block); NaN where there was no block yet."""
    tasks = len(tables.record["orders"][order]["tasks"])
    found = np.full((tasks, tasks), np.nan)
    asked = where(tables.weights, order=order, row=row, when=when)
    found[asked["task_index"] - 1, asked["block"] - 1] = asked["weight"]
    return found


def own(tables: Tables) -> Figure:
    """The weight of each task's own block, a line a row and a time."""
    order = tables.orders[0]
    made = figure(7.2, 2.6)
    axes = made.subplots()
    for row, ink in zip(DRAWN, INKS, strict=False):
        found = where(tables.gate, order=order, row=row)
        for when, style in zip(WHEN, ("--", "-"), strict=True):
            means = found.groupby("task_index")[f"own_adapter_weight_{when}"].mean()
            if len(means):
                axes.plot(means.index, means, style, color=ink, linewidth=1.3, label=f"{row}, {TITLES[when]}")
    tasks = tables.record["orders"][order]["tasks"]
    axes.set_xticks(range(1, len(tasks) + 1), tasks, rotation=45, ha="right")
    axes.set_ylim(0, 1.02)
    axes.set_title("Weight of the own block", fontsize=8)
    axes.legend(fontsize=6, handlelength=3)
    return made


def curves(tables: Tables) -> Figure:
    """Average performance on what was learnt so far, a line a row; all tasks at once as a level."""
    order = tables.orders[0]
    made = figure(7.2, 2.8)
    axes = made.subplots()
    every = where(tables.matrix, order=order)
    every = every[every["after_task"] >= every["task_index"]].dropna(subset="cil")
    for row, ink in zip(CURVES, INKS, strict=False):
        means = curve(every[every["row"] == row])
        if len(means):
            axes.plot(means.index, means, color=ink, linewidth=1.3, label=row)
    joint = curve(every[every["row"] == "joint"])
    if len(joint):
        axes.axhline(float(joint.iloc[-1]), color=GREY, linestyle=":", linewidth=1.2, label="joint, at the end")
    axes.set_xlabel("Tasks learnt")
    axes.set_title(f"Average performance, order {order}, %", fontsize=8)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=6, handlelength=3, ncols=2)
    return made


def curve(cells: Any) -> Any:
    """The mean score over the tasks that were learnt, then over seeds, by their number."""
    each = cells.groupby(["seed", "after_task"])["cil"].mean()
    return each.groupby("after_task").mean()


def cost(tables: Tables) -> Figure:
    """Average performance against seconds of training."""
    made = figure(7.2, 3.4)
    axes = made.subplots()
    for row in tables.rows(tables.whole):
        found = tables.mean(tables.whole, row)
        if found is not None:
            seconds = tables.seconds(row)
            ink = INKS[0] if row == SAPT else GREY
            axes.scatter([seconds], [found.mean], s=14, color=ink, linewidths=0)
            axes.annotate(row, (seconds, found.mean), xytext=(3, 2), textcoords="offset points", fontsize=5.5)
    axes.set_xlabel("Seconds of training")
    axes.set_title("Average performance at the end, %", fontsize=8)
    return made


def fifty(tables: Tables) -> Figure:
    """What became of many tasks, by their number."""
    found = where(tables.analyses, analysis="fifty")
    made = figure(7.2, 4.0)
    axes: list[Axes] = list(made.subplots(2, 2).flat)
    for (measure, (title, _)), one in zip(FIFTY.items(), axes, strict=True):
        for case, ink in zip(dict.fromkeys(found["case"]), INKS, strict=False):
            line = where(found, case=case, measure=measure).groupby("x")["value"].mean()
            if len(line):
                one.plot(line.index, line, color=ink, linewidth=1.1, label=case)
        one.set_title(title.capitalize() if title.islower() else title, fontsize=8)
        one.set_ylim(bottom=0)
        one.set_xlabel("Tasks learnt")
        if one.get_legend_handles_labels()[1]:
            one.legend(fontsize=6)
    return made


def draw(tables: Tables, folder: Path = PICTURES) -> list[Path]:
    """All pictures that there are numbers for, written into a folder; the same tables give the same bytes."""
    there = {
        "weights": (weights, not tables.weights.empty),
        "own": (own, tables.gate["row"].isin(DRAWN).any()),
        "curves": (curves, tables.matrix["cil"].notna().any()),
        "cost": (cost, tables.matrix["cil"].notna().any()),
        "fifty": (fifty, (tables.analyses["analysis"] == "fifty").any()),
    }
    made: dict[str, Callable[[], Figure]] = {
        f"sapt-{name}": partial(one, tables) for name, (one, known) in there.items() if known
    }
    return drawing.save(made, folder)


def main(arguments: list[str] | None = None) -> int:
    """Draw what there are tables of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the tables")
    given = parser.parse_args(arguments)
    try:
        draw(Tables.load(given.data))
    except UserError as error:
        Console(stderr=True).print(str(error), style="bold")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
