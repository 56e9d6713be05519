"""The summary of a run of pre-training for a terminal of 80 columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group

from regard.commands.pretrain.charts import at_step
from regard.commands.pretrain.words import key_figures, ledes, name
from regard.report import labels
from regard.report.panels import numeric_column
from regard.report.terminal import plain, sparkline, summary

NAME = 26


def pretrain_summary(history: pd.DataFrame, sinks: pd.DataFrame, metadata: Mapping[str, Any]) -> Group:
    """Summarize a run for a terminal of 80 columns."""
    figures = [_line(figure.label, figure.value, figure.note) for figure in key_figures(history, metadata)]
    blocks = [[*figures, *_strongest(sinks)], _curves(history)]
    return summary(name(metadata), ledes(history, metadata), blocks)


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
    return [_line("Strongest head, α₀", labels.number(float(best["value"]), 3), location)]


def _curves(history: pd.DataFrame) -> list[str]:
    lines = []
    for key, title in (("loss", "loss"), ("valid_loss", "validation loss"), ("alpha_first", "mean α₀")):
        values = numeric_column(history, key)
        values = values[np.isfinite(values)]
        if len(values) > 1:
            first, last = (labels.number(float(values[i]), 3) for i in (0, -1))
            lines.append(f"{title:<16}{first:>6} {sparkline(values)} {last}")
    return lines
