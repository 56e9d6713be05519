"""Terminal summary of a pre-training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.pretrain import words
from regard.commands.pretrain.charts import REQUIRED, at_step
from regard.report import labels
from regard.report.arrays import check_table
from regard.report.panels import numeric_column
from regard.report.terminal import plain, sparkline, summary

NAME = 26


def pretrain_summary(history: pd.DataFrame, sinks: pd.DataFrame, metadata: Mapping[str, Any]) -> Group:
    """Summarize a run for a terminal of 80 columns: losses, sinks, curves of both, strongest head, cost.

    Raises UserError if the history is empty or lacks a column.
    """
    check_table("history", history, REQUIRED)
    figures = [_line(figure.label, figure.value, figure.note) for figure in words.key_figures(history, metadata)]
    blocks = [[*figures, *_strongest(sinks)], _curves(history)]
    return summary(words.name(metadata), words.ledes(history, metadata), blocks)


def _line(label: str, value: str, note: str) -> str:
    label, value, note = plain(label), plain(value), plain(note)
    return f"{label[: NAME - 1]:<{NAME}}{value:>14}" + (f"  {note}" if note else "")


def _strongest(sinks: pd.DataFrame) -> list[str]:
    """Find the head with the most attention on the first token at the last monitored step."""
    by_step = at_step(sinks, "alpha")
    if not by_step:
        return []
    rows = by_step[max(by_step)].dropna(subset=["layer", "head", "value"])
    if rows.empty:
        return []
    best = rows.loc[rows["value"].astype("float64").idxmax()]
    location = f"layer {int(best['layer'])}, head {int(best['head'])}"
    return [_line("Strongest head, α₁", labels.number(float(best["value"]), 3), location)]


def _curves(history: pd.DataFrame) -> list[str]:
    """Format loss and mean α_1 as sparklines between their first and last values."""
    lines = []
    for key, name in (("loss", "loss"), ("valid_loss", "validation loss"), ("alpha_first", "mean α₁")):
        values = numeric_column(history, key)
        finite = [float(value) for value in values if value == value and abs(value) != float("inf")]
        if len(finite) > 1:
            lines.append(
                f"{name:<16}{labels.number(finite[0], 3):>6} {sparkline(finite)} {labels.number(finite[-1], 3)}"
            )
    return lines
