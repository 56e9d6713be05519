"""Tables and text of docs/margins.md, from docs/results/margins-runs.csv."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from experiments.common.papers import Paper
from experiments.common.parts import Page, Table, join_words
from experiments.common.run_table import RunTable
from experiments.margins.run import SAME, SEED, SIDES
from experiments.margins.thresholds import THRESHOLDS, Threshold, tried, value_of

RECORD = "margins.json"
CASES = tuple(f"{threshold.title} {side}" for threshold in THRESHOLDS for side in SIDES)


class Tables(RunTable):
    """The models, a line each, and the record of versions."""

    name, module, columns, floats = (
        "margins",
        "experiments.margins.run",
        ("host", "read", "cpu_seconds", *CASES),
        ("cpu_seconds",),
    )

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        return (run["host"],)

    def count(self, threshold: Threshold) -> int:
        """Return how many models were read in the part that a threshold can change."""
        return int(self.runs["read"].str.split(", ").map(lambda parts: threshold.part in parts).sum())

    def changes(self, threshold: Threshold, side: str) -> pd.Series:
        """Return what changed, by model."""
        found = self.runs.set_index("host")[f"{threshold.title} {side}"]
        return found[found.notna() & (found != SAME)]


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    thresholds, changes = threshold_table(tables), change_table(tables)
    return Page(
        "margins",
        "Thresholds of recognition",
        [
            "Some numbers decide how Regard reads what a model computes, such as how far below the others a score is "
            "that counts as masked. Each was chosen on some models. Here other weights are read with the number "
            "smaller and larger: does any result change?",
            describe(tables),
            "## Rule, fixed before the runs",
            "A threshold *stands* if no model gives other numbers on either side, and none that was read is refused. "
            "Otherwise it is *near*, and the models are named below.",
            "## Thresholds",
            thresholds,
            f"Every sixth model type of [models.md](models.md) that is exact or refused there: tiny, with random "
            f"weights and inputs of seed {SEED}. They have few layers, short texts and one kind of image, so a number "
            "that matters for long inputs alone is not tried; and a model that does not ask for a number cannot tell: "
            "those of `products` and `two_operands` matter where a module multiplies its matrices itself. Read are the "
            "default statistics, plain, with images or sounds, masked and while generating; whether a model in "
            "bfloat16 is refused; whether averages keep the sums of rows; and where adapters find rows.",
            "## What changed",
            changes if changes.rows else "Nothing.",
        ],
        (thresholds, changes),
        (),
        [("margins-runs.csv", "all models"), (RECORD, "versions")],
    )


def describe(tables: Tables) -> str:
    """Return how many thresholds stand."""
    near = [threshold.title for threshold in THRESHOLDS if not stands(tables, threshold)]
    counts = [tables.count(threshold) for threshold in THRESHOLDS]
    stand = f"{len(THRESHOLDS) - len(near)} of {len(THRESHOLDS)} stand, each on {min(counts)} to {max(counts)} models"
    return f"{stand}; near: {join_words(near)}." if near else f"{stand}."


def stands(tables: Tables, threshold: Threshold) -> bool:
    """Return whether nothing changes with a threshold."""
    return not any(len(tables.changes(threshold, side)) for side in SIDES)


def threshold_table(tables: Tables) -> Table:
    """A line for each threshold: what it decides, its value and those tried, and how many models changed."""
    lines = []
    for threshold in THRESHOLDS:
        now = value_of(threshold)
        values = [_say(value) for value in (now, *tried(threshold, now))]
        changed = [str(len(tables.changes(threshold, side))) for side in SIDES]
        verdict = "stands" if stands(tables, threshold) else "near"
        lines.append([threshold.title, threshold.decides, *values, str(tables.count(threshold)), *changed, verdict])
    head = (
        "threshold",
        "decides",
        "is",
        "smaller",
        "larger",
        "models",
        "changed, smaller",
        "changed, larger",
        "verdict",
    )
    return Table("margins-thresholds", "thresholds", head, lines)


def change_table(tables: Tables) -> Table:
    """A line for each threshold, side and model that changes."""
    lines = [
        [threshold.title, side, host, what]
        for threshold in THRESHOLDS
        for side in SIDES
        for host, what in tables.changes(threshold, side).items()
    ]
    return Table("margins-changes", "what changed", ("threshold", "side", "model", "what"), lines)


def _say(value: Any) -> str:
    return " / ".join(f"{of:g}" for of in value.values()) if isinstance(value, Mapping) else f"{value:g}"


PAPER = Paper(
    "margins",
    "Thresholds of recognition",
    "python -m experiments.margins.run",
    (),
    Tables.load,
    make_page,
    Tables.store,
)
