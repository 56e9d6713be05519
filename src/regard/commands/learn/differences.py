"""The differences between methods as tables: AP and forgetting open, the other metrics folded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.metrics import Difference, format_fixed
from regard.commands.learn.tables import SETTINGS
from regard.report.page import Table, Tables
from regard.report.words import format_signed, verdict

OPEN = ("average_performance", "forgetting")
"""The metrics whose differences stand open on the page."""


def differences(tables: Mapping[str, pd.DataFrame]) -> tuple[list[Tables], str]:
    """A table for each setting and metric, and what they are; "" where there are no differences."""
    table = learn_tables.table(tables, "differences")
    baseline = against(table, learn_tables.methods(tables["matrix"]))
    shown: list[Table] = []
    folded: list[Table] = []
    told: list[Difference] = []
    for setting, name in SETTINGS.items():
        for metric, found in learn_metrics.differences(table, setting).items():
            known = [one for one in found if one.against == baseline != one.method and math.isfinite(one.value)]
            caption = f"{learn_metrics.metric(metric).title}, {name}"
            entries = shown if metric in OPEN else folded
            entries += [_table(known, caption, _test(table))] if known else []
            told += known
    names = ", ".join(dict.fromkeys(one.caption.rsplit(", ", 1)[0] for one in folded))
    return [Tables(shown), Tables(folded, names)], _about(told, baseline)


def against(table: pd.DataFrame, methods: Sequence[str]) -> str:
    """The method that the page holds the others against: the first one that the table has differences to."""
    there = {str(name) for name in table["against"]}
    return next((name for name in methods if name in there), "")


def _test(table: pd.DataFrame) -> str:
    return learn_metrics.TESTS[learn_metrics.tested(table)]


def _table(found: Sequence[Difference], caption: str, test: str) -> Table:
    rows = []
    for one in found:
        told = verdict(one.value, one.overlaps if one.sure else None)
        span = f"{format_signed(one.low, 2)} to {format_signed(one.high, 2)}" if one.sure else "–"
        rows.append((one.method, "", [format_signed(one.value, 2), span, probability(one.p), told]))
    head = ["Method", "Difference", "95 % interval", test, ""]
    return Table(rows, head, f"{caption}: differences", caption)


def probability(p: float) -> str:
    """A p-value to three decimals; "–" for NaN."""
    return "< 0.001" if p < 0.0005 else format_fixed(p, 3)


def _about(found: Sequence[Difference], baseline: str) -> str:
    """How the differences are to be read."""
    if not found:
        return ""
    first = f"To {baseline}, in points, run by run (same seed, same order)."
    pairs = sorted({one.n for one in found if one.sure})
    if not pairs:
        return f"{first} One run of each method says nothing about chance."
    counted = f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else str(pairs[0])
    return (
        f"{first} 95 % intervals from {counted} pairs; where one overlaps 0, these runs do not tell the two "
        "methods apart."
    )
