"""What a pre-training run watched, as columns without gaps, and as panels of lines that the page's script draws."""

from __future__ import annotations

import pandas as pd

from regard.errors import UserError

GREY = 4
"""The ink of lines that are there to compare with."""


def check_history(history: pd.DataFrame) -> None:
    """Nothing, or a UserError: the history is empty or lacks a column."""
    missing = [column for column in ("step", "loss") if column not in history]
    if missing:
        raise UserError(f"history: expected the columns step, loss, …; missing: {', '.join(missing)}")
    if history.empty:
        raise UserError("history: expected at least one row, the table is empty")


def at_step(sinks: pd.DataFrame, statistic: str) -> dict[int, pd.DataFrame]:
    """The rows of a statistic by the step they were watched at, in the steps' order; empty where there are none."""
    if sinks.empty:
        return {}
    rows = sinks[sinks["statistic"] == statistic]
    return {int(step): group for step, group in rows.groupby("step", sort=True)}
