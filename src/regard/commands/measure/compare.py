"""Runs of `regard measure` side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from regard.commands.measure.result import MeasureResult


def compare(runs: Mapping[str, MeasureResult]) -> tuple[pd.DataFrame, str]:
    """Return a table of measurements by name, a column per run and its notes in `.attrs["notes"]`, and a page."""
    from regard.commands.measure.page import comparison, comparison_page

    tables = {name: (run.table, run.metadata) for name, run in runs.items()}
    return comparison(tables), comparison_page(tables)
