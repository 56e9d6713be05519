"""Table and text of docs/steps.md, from docs/results/steps-runs.csv."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.papers import Paper
from experiments.common.parts import Page, Table
from experiments.common.run_table import RunTable
from experiments.steps.run import LENGTH, METHODS, ROWS, SEED, STEPS, TASKS
from regard.commands.learn.config import SCALES

RECORD = "steps.json"
COLUMNS = {"runs": ("rows", "method", "steps", "AP til", "AP cil", "seconds")}
FLOATS = ("AP til", "AP cil", "seconds")
MARGIN = 3.0
"""Points of AP that further steps must bring."""


class Tables(RunTable):
    """The runs, a line each, and the record of versions."""

    name, module, columns, floats = "steps", "experiments.steps.run", COLUMNS["runs"], FLOATS

    @classmethod
    def paths(cls, work: Path) -> Iterable[Path]:
        return work.glob("*.json")

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        return run["rows"], METHODS.index(run["method"]), run["steps"]

    def mean(self, steps: int, column: str, rows: int | None = None) -> float | None:
        """Return the mean over methods, and over numbers of rows unless one is given; None unless all were run."""
        runs = self.runs[(self.runs["steps"] == steps) & ((self.runs["rows"] == rows) | (rows is None))]
        return float(runs[column].mean()) if len(runs) == len(METHODS) * (len(ROWS) if rows is None else 1) else None


def choose_steps(tables: Tables) -> int | None:
    """Return what the rule picks: the fewest steps within `MARGIN` of the best; None unless all runs are there."""
    means = {steps: tables.mean(steps, "AP cil") for steps in STEPS}
    known = {steps: mean for steps, mean in means.items() if mean is not None}
    if len(known) < len(STEPS):
        return None
    return min(steps for steps, mean in known.items() if mean >= max(known.values()) - MARGIN)


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    runs, means = run_table(tables), mean_table(tables)
    return Page(
        "steps",
        "Steps of a small task",
        [
            f"`regard learn` at the scale `laptop` trains three epochs, but at least {SCALES['laptop']['min_steps']} "
            "steps a phase, unless `--num-epochs` or `--min-steps` say otherwise.",
            describe_choice(tables),
            "## Rule, fixed before the runs",
            f"The least number of steps is the smallest of {', '.join(map(str, STEPS))} whose mean AP among the "
            "classes of all tasks (CIL), over both methods and both numbers of rows, is within "
            f"{MARGIN:g} points of the best of them.",
            "## Means of `sapt` and `replay-lora`",
            means,
            f"AP in per cent. {TASKS} tasks of `mixed` ([routing.md](routing.md)) with {ROWS[0]} and with {ROWS[1]} "
            f"training rows each, of which three epochs are 9 and 24 steps; MiniLM, seed {SEED}, defaults of the scale "
            f"`laptop` but {LENGTH} tokens a text, adapters of queries and values, and `known_task=router`. One seed "
            "and one small encoder.",
        ],
        (runs, means),
        (),
        [("steps-runs.csv", "the same, unrounded"), (RECORD, "versions")],
    )


def describe_choice(tables: Tables) -> str:
    """Return what the rule says, and whether the default is that."""
    chosen, default = choose_steps(tables), SCALES["laptop"]["min_steps"]
    if chosen is None:
        return "The runs are not complete."
    few, least = tables.mean(STEPS[0], "AP cil"), tables.mean(chosen, "AP cil")
    follows = "which is the default" if chosen == default else f"and the default, {default}, departs from it"
    return (
        f"The rule picks {chosen}, {follows}: AP among the classes of all tasks {least:.1f}, and {few:.1f} with "
        f"{STEPS[0]} steps."
    )


def mean_table(tables: Tables) -> Table:
    """Means over the methods, by steps and rows."""
    lines = []
    for steps in STEPS:
        cells = [tables.mean(steps, column, rows) for column in ("AP til", "AP cil") for rows in (*ROWS, None)]
        lines.append([str(steps), *("–" if value is None else f"{value:.1f}" for value in cells)])
    head = [f"AP {name}, {rows}" for name in ("TIL", "CIL") for rows in (*(f"{rows} rows" for rows in ROWS), "both")]
    return Table("steps-means", "means by steps and rows", ("steps", *head), lines)


def run_table(tables: Tables) -> Table:
    """All runs: a line each."""
    numbers = {"rows": "d", "method": "s", "steps": "d", "AP til": ".1f", "AP cil": ".1f", "seconds": ".0f"}
    lines = [[format(run[name], how) for name, how in numbers.items()] for run in tables.runs.to_dict("records")]
    return Table("steps-all", "all runs", ("rows", "method", "steps", "AP TIL", "AP CIL", "s"), lines)


PAPER = Paper(
    "steps",
    "Steps of a small task",
    "python -m experiments.steps.run --data DIR",
    (),
    Tables.load,
    make_page,
    Tables.store,
)
