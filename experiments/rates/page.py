"""Table and text of docs/rates.md, from docs/results/rates-runs.csv."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.papers import Paper
from experiments.common.parts import Page, Table
from experiments.common.run_table import RunTable
from experiments.rates.run import HEADS, LABELS, LENGTH, LINEAR, RATES, SEED, STREAMS, TASKS
from regard.continual.training_phase import ADAPTER_RATE

RECORD = "rates.json"
COLUMNS = {"runs": ("stream", "method", "head", "rate", "AP til", "AP cil")}
FLOATS = ("rate", "AP til", "AP cil")
CHOSEN = ("sapt", "replay-lora")
"""The methods that decide."""


class Tables(RunTable):
    """The runs, a line each, and the record of versions."""

    name, module, columns, floats = "rates", "experiments.rates.run", COLUMNS["runs"], FLOATS

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        return STREAMS.index(run["stream"]), list(RATES).index(run["method"]), HEADS.index(run["head"]), run["rate"]

    def mean(self, head: str, rate: float, column: str) -> float | None:
        """Return the mean over streams and the methods that decide; None unless all were run."""
        rows = self.runs[(self.runs["head"] == head) & self.runs["method"].isin(CHOSEN) & (self.runs["rate"] == rate)]
        return float(rows[column].mean()) if len(rows) == len(CHOSEN) * len(STREAMS) else None


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    runs, means = run_table(tables), mean_table(tables)
    return Page(
        "rates",
        "Learning rate and head of adapters",
        [
            f"`regard learn` without `--learning-rate` trains adapters at {ADAPTER_RATE:g}, and encoders with adapters "
            "have the label-text head by default.",
            describe_choice(tables),
            "## Rules, fixed before the runs",
            "* **Rate**: of 3e-4, 1e-3, 2e-3 and 5e-3 with the linear head the one with the highest mean AP, with the "
            "task known (TIL), of `sapt` and `replay-lora` over both streams; but 1e-3, ten times the rate of whole "
            "models, if it is within 1 point of that.\n"
            "* **Head**: the label-text head if at 1e-3 the mean AP among the classes of all tasks (CIL) is at least "
            "10 points above that of the linear head, and that with the task known at most 2 below.",
            "## Means of `sapt` and `replay-lora` over both streams",
            means,
            f"AP in per cent. `stdlib-split` and {TASKS} tasks of `mixed` ([routing.md](routing.md)), MiniLM, seed "
            f"{SEED}, defaults of the scale `laptop` but {LENGTH} tokens a text, adapters of queries and values, "
            "and `known_task=router`. "
            "One seed and one small encoder: larger models and longer training may want lower rates; "
            "`--search-learning-rates` finds them.",
        ],
        (runs, means),
        (),
        [("rates-runs.csv", "the same, unrounded"), (RECORD, "versions")],
    )


def describe_choice(tables: Tables) -> str:
    """Return what the rules say, and where the default departs from them."""
    means = {(head, rate): tables.mean(head, rate, "AP til") for head in HEADS for rate in RATES[CHOSEN[0]]}
    linear = {rate: value for (head, rate), value in means.items() if head == LINEAR and value is not None}
    labels = {rate: value for (head, rate), value in means.items() if head == LABELS and value is not None}
    gained = [tables.mean(head, ADAPTER_RATE, "AP cil") for head in (LABELS, LINEAR)]
    if not linear or not labels or None in gained:
        return "The runs are not complete."
    best, best_labels = max(linear, key=lambda rate: linear[rate]), max(labels, key=lambda rate: labels[rate])
    return (
        f"The rule of the head holds: {gained[0]:.1f} against {gained[1]:.1f} in CIL. The rule of the rate, written "
        f"for the linear head, picks {best:g}. The default departs from it: with the head that encoders now have, "
        f"{best_labels:g} is the best of those measured, and {best:g} on one model of width 384 says little of larger "
        "ones, for which rates above 1e-3 are unusual. Where the head stays linear (causal models, comparisons with "
        "`prescale`), a higher rate may learn more in so few steps: `--search-learning-rates 1e-3,5e-3`."
    )


def mean_table(tables: Tables) -> Table:
    """Means over streams and the methods that decide, by head and rate."""
    lines = []
    for head in HEADS:
        for rate in RATES[CHOSEN[0]]:
            til, cil = (tables.mean(head, rate, column) for column in ("AP til", "AP cil"))
            if til is not None and cil is not None:
                lines.append([head, f"{rate:g}", f"{til:.1f}", f"{cil:.1f}"])
    return Table("rates-means", "means by head and rate", ("head", "rate", "AP TIL", "AP CIL"), lines)


def run_table(tables: Tables) -> Table:
    """All runs: a line for each stream, method and head."""
    lines = [
        [run["stream"], run["method"], run["head"], f"{run['rate']:g}", f"{run['AP til']:.1f}", f"{run['AP cil']:.1f}"]
        for run in tables.runs.to_dict("records")
    ]
    return Table("rates-all", "all runs", ("stream", "method", "head", "rate", "AP TIL", "AP CIL"), lines)


PAPER = Paper(
    "rates",
    "Learning rate and head of adapters",
    "python -m experiments.rates.run --data DIR",
    (),
    Tables.load,
    make_page,
    Tables.store,
)
