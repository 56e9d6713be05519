"""Pseudo samples of a run: how like real rows they are, what they give away, and forgetting beside it."""

from __future__ import annotations

import math

import pandas as pd

from regard.commands.learn import diagnostics as learn_diagnostics
from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.report.page import Heading, Part, Table
from regard.report.panels import Panel

COLUMNS: dict[str, tuple[str, float, int]] = {
    "kept": ("Kept", 1, 0),
    "two_sample_accuracy": ("Told apart, %", 100, 1),
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
"""The statistics that the table shows: their titles, what they are multiplied with, and their digits."""

BESIDE = {
    "two_sample_accuracy": ("Told apart from real texts", "share of rows told apart"),
    "frechet": ("Fréchet distance of query vectors", "distance"),
    "copied_8grams": ("Copied runs of 8 words", "share of runs"),
}
"""The statistics that forgetting is drawn over: their titles, and what their values are."""

ABOUT = (
    "What stands for each task while later ones are learnt, means over runs. Told apart: how often a classifier tells "
    "pseudo samples from dev rows, 50 where it cannot, with the p of that being chance, the largest of any run. Near "
    "duplicates: of one another; copied: of training rows, as a whole, or of all their runs of 8 words. Fréchet: the "
    "distance of their query vectors from those of training rows; real: of as many of these from the others. "
    "Membership: how likely a training row is nearer to them than a dev row is, 0.5 where they give nothing away; the "
    "same of as many real query vectors and of draws from a density over them. Forgotten: points until the end, TIL "
    "where there is one. The dots put forgetting beside three of these; a correlation is no cause."
)


def beside_forgetting(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Panel]:
    """For each statistic of `BESIDE` a panel: a task's forgetting over its value, a dot for each task of each run."""
    rows = table.dropna(subset=["value"]).astype({"value": "float64"})
    return learn_diagnostics.forgetting_over(rows, matrix, BESIDE)


def qualities(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    """A table for each method that has kept pseudo samples: `COLUMNS` by task, and what was forgotten of it."""
    rows = table.dropna(subset=["value"]).astype({"value": "float64"})
    names, lost = learn_tables.task_names(matrix), _forgotten(matrix)
    parts: list[Part] = []
    head = ["Task", *(title for title, _, _ in COLUMNS.values()), "Forgotten"]
    for method in map(str, rows["method"].unique()):
        each = rows[rows["method"] == method].groupby(["task_index", "statistic"])["value"]
        means = {key: values.max() if key[1] == "two_sample_p" else values.mean() for key, values in each}
        lines = []
        for place in sorted({position for position, _ in means}):
            cells = [
                learn_metrics.format_fixed(scale * means.get((place, name), math.nan), digits)
                for name, (_, scale, digits) in COLUMNS.items()
            ]
            cells.append(learn_metrics.format_fixed(lost.get((method, place), math.nan), 1))
            lines.append((names[int(place) - 1], "", cells))
        parts += [Heading(method), Table(lines, head, f"{method}, pseudo samples")]
    return parts


def _forgotten(matrix: pd.DataFrame) -> dict[tuple[str, int], float]:
    """The mean over runs of what was forgotten, by method and place."""
    settings = learn_tables.settings(matrix)
    if not settings:
        return {}
    lost = learn_tables.forgotten(matrix, settings[0])
    return {
        (str(method), int(place)): float(one)
        for (method, place), one in lost.groupby(["method", "task_index"])["forgetting"].mean().items()
    }
