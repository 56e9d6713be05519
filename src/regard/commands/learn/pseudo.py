"""Quality of pseudo samples: similarity to real rows, privacy, and forgetting over them."""

import math

import pandas as pd

from regard.commands.learn.metrics import format_fixed
from regard.commands.learn.tables import compute_forgetting, task_names
from regard.report.page import Heading, Part, Table

COLUMNS: dict[str, tuple[str, float, int]] = {
    "kept": ("Samples", 1, 0),
    "two_sample_accuracy": ("Classifier accuracy, %", 100, 1),
    "two_sample_p": ("p, largest", 1, 3),
    "near_duplicates": ("Near duplicates, %", 100, 1),
    "copied_whole": ("Copied whole, %", 100, 1),
    "copied_8grams": ("Copied 8-grams, %", 100, 1),
    "frechet": ("Fréchet", 1, 3),
    "real_frechet": ("Fréchet, real", 1, 3),
    "generated membership": ("Membership", 1, 2),
    "real membership": ("Membership, real", 1, 2),
    "density membership": ("Membership, density", 1, 2),
}
"""Statistics of the table: title, factor, decimals."""

PLOTTED = {
    "two_sample_accuracy": ("Classifier accuracy against real texts", "share of rows"),
    "frechet": ("Fréchet distance of query vectors", "distance"),
    "copied_8grams": ("Copied 8-grams", "share of 8-grams"),
}
"""Statistics that forgetting is plotted over: title and axis title."""

ABOUT = (
    "Pseudo samples that stand for each task while later tasks are trained, means over runs. Classifier accuracy: how "
    "well a classifier separates them from dev rows; 50 means it cannot. p: largest p-value of any run that this is "
    "chance. Near duplicates: of one another. Copied: training rows copied whole, or as 8-grams. Fréchet: distance of "
    "their query vectors from those of training rows; real: of as many real vectors from the rest. Membership: how "
    "often a training row is nearer to them than a dev row; 0.5 reveals nothing. Also for real query vectors and for "
    "draws from a density over them. Forgotten: points lost by the end, TIL if available. Correlation is not causation."
)


def make_quality_tables(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    """Make a table of `COLUMNS` and forgetting by task, for each method with pseudo samples."""
    names = task_names(matrix)
    forgetting = compute_forgetting(matrix).groupby(["method", "task_index"])["forgetting"].mean().to_dict()
    parts: list[Part] = []
    head = ["Task", *(title for title, _, _ in COLUMNS.values()), "Forgotten"]
    for method, method_rows in table.groupby("method", sort=False):
        groups = method_rows.groupby(["task_index", "statistic"])["value"]
        means = {key: values.max() if key[1] == "two_sample_p" else values.mean() for key, values in groups}
        rows = []
        for task in sorted({position for position, _ in means}):
            cells = [
                format_fixed(scale * means.get((task, name), math.nan), digits)
                for name, (_, scale, digits) in COLUMNS.items()
            ]
            cells.append(format_fixed(forgetting.get((method, task), math.nan), 1))
            rows.append((names[task - 1], "", cells))
        parts += [Heading(method), Table(rows, head, f"{method}, pseudo samples")]
    return parts
