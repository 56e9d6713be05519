"""A pre-training run as a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.pretrain import words
from regard.commands.pretrain.curves import at_step, check_history
from regard.report import labels
from regard.report.panels import numeric_column
from regard.report.terminal import plain, sparkline, summary

NAME = 26


def pretrain_summary(history: pd.DataFrame, sinks: pd.DataFrame, record: Mapping[str, Any]) -> Group:
    """What matters most, for a terminal of 80 columns: losses, sinks, curves of both, the strongest head, cost.

    Raises UserError on a history that is empty or lacks a column.
    """
    check_history(history)
    figures = [_line(one.label, one.value, one.note) for one in words.key_figures(history, record)]
    blocks = [[*figures, *_strongest(sinks)], _curves(history)]
    return summary(words.name(record), words.ledes(history, record), blocks)


def _line(label: str, value: str, note: str) -> str:
    label, value, note = plain(label), plain(value), plain(note)
    return f"{label[: NAME - 1]:<{NAME}}{value:>14}" + (f"  {note}" if note else "")


def _strongest(sinks: pd.DataFrame) -> list[str]:
    """The head with the most attention on the first token at the last watched step."""
    found = at_step(sinks, "alpha")
    if not found:
        return []
    rows = found[max(found)].dropna(subset=["layer", "head", "value"])
    if rows.empty:
        return []
    best = rows.loc[rows["value"].astype("float64").idxmax()]
    where = f"layer {int(best['layer'])}, head {int(best['head'])}"
    return [_line("Strongest head, α₁", labels.number(float(best["value"]), 3), where)]


def _curves(history: pd.DataFrame) -> list[str]:
    """Loss and mean α_1 as lines of blocks, each from its first value to its last."""
    lines = []
    for key, name in (("loss", "loss"), ("valid_loss", "validation loss"), ("alpha_first", "mean α₁")):
        values = numeric_column(history, key)
        known = [float(value) for value in values if value == value and abs(value) != float("inf")]
        if len(known) > 1:
            lines.append(f"{name:<16}{labels.number(known[0], 3):>6} {sparkline(known)} {labels.number(known[-1], 3)}")
    return lines
