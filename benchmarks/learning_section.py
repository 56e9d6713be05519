"""What docs/benchmarks.md says of learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.markdown import table, wrapped

ABOUT = """
## Learning a task

`python -m benchmarks.learning`: one task of fine-tuning with an encoder of MiniLM's shape, texts of 8 to 64 tokens. The
Trainer has the same encoder, optimiser, schedule and batch, with rows in random order and grouped by length. `scaled`
is Regard with the pre-scaling head. Examples a second of the second epoch, CPU time, medians; ratios are times over
Regard's.
"""


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the races that were run, and how they went."""
    names = ("trainer", "grouped", "scaled")
    lines, seconds = [], [{name: one["seconds"] for name, one in row["figures"].items()} for row in rows]
    for row, taken in zip(rows, seconds, strict=True):
        count = row["case"]["rows"]
        speeds = (f"{count / taken[name]:.1f}" for name in ("regard", *names))
        lines.append(
            (row["case"]["batch"], count, *speeds, *(f"{taken[name] / taken['regard']:.2f}" for name in names))
        )
    head = ("batch", "rows", "Regard", *names, *(f"{name} ÷ Regard" for name in names))
    as_fast = sum(min(taken[name] for name in names[:2]) >= taken["regard"] for taken in seconds)
    light = sum(taken["scaled"] <= 1.05 * taken["regard"] for taken in seconds)
    told = (
        f"At least as fast as the Trainer at its best in {as_fast} of {len(rows)} cases; the pre-scaling head adds at "
        f"most 5 % in {light} of {len(rows)}."
    )
    return f"{ABOUT}\n{table(head, lines)}\n\n{wrapped(told)}\n"
