"""A pre-training run as a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from regard.commands.pretrain import words
from regard.commands.pretrain.curves import at_step, check_history
from regard.report import labels
from regard.report.panels import numeric_column

WIDTH = 80
NAME = 26
BARS = "▁▂▃▄▅▆▇█"
POINTS = 48


def pretrain_summary(history: pd.DataFrame, sinks: pd.DataFrame, record: Mapping[str, Any]) -> Group:
    """What matters most, for a terminal of 80 columns: losses, sinks, curves of both, the strongest head, cost.

    Raises UserError on a history that is empty or lacks a column.
    """
    check_history(history)
    first, found = words.ledes(history, record)
    parts: list[RenderableType] = [Text(_plain(words.name(record)), style="bold")]
    parts += [Text(_plain(line)) for line in (first, found) if line]
    figures = [(one.label, one.value, one.note) for one in words.key_figures(history, record)]
    for lines in ([*map(_line, figures), *_strongest(sinks)], _curves(history)):
        if lines:
            parts += [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)]
    return Group(*parts)


def _plain(text: str) -> str:
    return labels.visible(text).replace("␣", " ")


def _line(figure: tuple[str, str, str]) -> str:
    label, value, note = (_plain(text) if text else "" for text in figure)
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
    return [_line(("Strongest head, α₁", labels.number(float(best["value"]), 3), where))]


def _curves(history: pd.DataFrame) -> list[str]:
    """Loss and mean α_1 as lines of blocks, each from its first value to its last."""
    lines = []
    for key, name in (("loss", "loss"), ("valid_loss", "validation loss"), ("alpha_first", "mean α₁")):
        values = numeric_column(history, key)
        known = [float(value) for value in values if value == value and abs(value) != float("inf")]
        if len(known) > 1:
            lines.append(f"{name:<16}{labels.number(known[0], 3):>6} {_spark(known)} {labels.number(known[-1], 3)}")
    return lines


def _spark(values: list[float]) -> str:
    """The values as blocks between their smallest and their largest."""
    count = min(POINTS, len(values))
    kept = [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
    low, high = min(kept), max(kept)
    span = high - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in kept)
