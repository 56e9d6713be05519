"""Figures of a continual-learning run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regard.commands.learn.charts import MEANS, make_curve_panels
from regard.commands.learn.matrix import average_scores, find_afters
from regard.commands.learn.tables import SCENARIOS, count_tasks, find_scenarios, method_names, task_names
from regard.report.drawing import Map, draw_maps, draw_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(matrix: pd.DataFrame) -> Figure | None:
    """Draw mean score and forgetting over the tasks trained, in the first scenario; None without scores."""
    panels = next(iter(make_curve_panels(matrix).values()), [])
    means = [panel for panel in panels if panel["caption"] in MEANS]
    return draw_panels(means) if means else None


def draw_matrices(matrix: pd.DataFrame) -> Figure | None:
    """Draw the accuracy matrix of each method, mean over runs, in the first scenario; None without scores."""
    scenario = next(iter(find_scenarios(matrix)), None)
    if scenario is None:
        return None
    rows = matrix[matrix["scenario"] == scenario]
    maps, afters = [], find_afters(rows)
    for method in method_names(rows):
        values = np.array(average_scores(rows[rows["method"] == method], afters, count_tasks(matrix)), dtype=np.float64)
        title = f"{method}, {SCENARIOS[scenario]} score, %"
        maps.append(Map(title, values, afters, task_names(matrix), "Tasks trained", "Task"))
    return draw_maps(maps)
