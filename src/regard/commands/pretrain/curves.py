"""Rows of a pre-training run's history and sinks."""

from __future__ import annotations

import pandas as pd

from regard.errors import UserError

GREY = 4
"""Ink of reference lines."""


def check_history(history: pd.DataFrame) -> None:
    """Check that the history has rows and columns. Raises UserError."""
    missing = [column for column in ("step", "loss") if column not in history]
    if missing:
        raise UserError(f"history: expected the columns step, loss, …; missing: {', '.join(missing)}")
    if history.empty:
        raise UserError("history: expected at least one row, the table is empty")


def at_step(sinks: pd.DataFrame, statistic: str) -> dict[int, pd.DataFrame]:
    """Group the rows of a statistic by step, in order."""
    if sinks.empty:
        return {}
    rows = sinks[sinks["statistic"] == statistic]
    return {int(step): group for step, group in rows.groupby("step", sort=True)}
