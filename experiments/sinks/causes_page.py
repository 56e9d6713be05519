"""Table and text of docs/causes.md, from docs/results/causes.csv."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.claims import DASH, MIN_RUNS, format_difference, format_interval
from experiments.common.comparison import mean_of, paired, where
from experiments.common.papers import Paper
from experiments.common.parts import RESULTS, Page, Table
from experiments.sinks.causes import ANOTHER, COLUMNS, FIRST, KEPT, OTHER, PRUNED, RANDOM, RECORD, TABLE, WHOLE, WINDOW
from regard.errors import UserError
from regard.report.labels import pluralize
from regard.runs.intervals import Interval

COSTS = (WINDOW, KEPT, FIRST, ANOTHER, PRUNED, RANDOM)
PAIRS = {
    "the window without the first token, minus that with it": (WINDOW, KEPT),
    f"the first token hidden, minus token {OTHER}": (FIRST, ANOTHER),
    "random heads pruned, minus dormant ones": (RANDOM, PRUNED),
}
"""What is compared, each two interventions that take as much away."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The loss of each model under each intervention, and how it was measured."""

    scores: pd.DataFrame
    record: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path = RESULTS) -> Tables:
        """Read the table of a folder. Raises UserError if it is missing or lacks a column."""
        try:
            scores = pd.read_csv(folder / TABLE)
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"no runs of experiments.sinks.causes in {folder}: {error}") from error
        if list(scores.columns) != list(COLUMNS):
            raise UserError(f"{TABLE}: expected the columns {', '.join(COLUMNS)}")
        return cls(scores, record)

    @property
    def rows(self) -> list[str]:
        """The rows with models."""
        return list(dict.fromkeys(self.scores["row"]))

    def losses(self, row: str, intervention: str) -> dict[int, float]:
        """Return the loss by seed."""
        found = where(self.scores, row=row, intervention=intervention)
        return {int(seed): float(loss) for seed, loss in zip(found["seed"], found["loss"], strict=True)}

    def cost(self, row: str, intervention: str) -> Interval | None:
        """Return the loss above that of the untouched model, paired by seed."""
        return paired(self.losses(row, intervention), self.losses(row, WHOLE))

    def sinks(self, row: str) -> str:
        """Return the sink rate of each seed, in per cent."""
        return ", ".join(f"{rate:.1f}" for rate in where(self.scores, row=row, intervention=WHOLE)["sink_rate"])

    def heads(self, row: str) -> str:
        """Return the number of dormant heads of each seed."""
        return ", ".join(f"{count:.0f}" for count in where(self.scores, row=row, intervention=PRUNED)["heads"])


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    record, table = tables.record, cost_table(tables)
    return Page(
        "causes",
        "What a sink is for",
        [
            "What do small decoders lose without the first token, and without dormant heads, with and without a sink? "
            "Command, from the runs of the sink experiment: `python -m experiments.sinks.causes --work DIR`.",
            table,
            f"Loss in nats a token above that of the untouched model, mean over seeds ± half the 95 % interval (paired "
            f"by seed, Student's t), on {record['sequences'] // 2:,} held-out sequences of 32 tokens, from the "
            f"{record['keys'] + 1}th on. The models are those of [sinks.md](sinks.md), all with softmax. Windows leave "
            "as many keys with the first token as without. A head is dormant if the norm of its output is below "
            f"{record['dormant']:g} times the mean of its layer, on as many other sequences; random heads: the mean of "
            f"{record['draws']} draws. Nothing is trained.",
            "## Differences",
            difference_table(tables),
            "Each takes as much away on both sides. Rule, fixed before the runs: a difference counts (\\*) if its "
            f"interval over at least {MIN_RUNS} seeds excludes 0. Seeds without dormant heads are left out of the last "
            "column. "
            "These are models of 0.3M parameters and 32 tokens; StreamingLLM (Xiao et al. 2024, arXiv 2309.17453) and "
            "studies of dormant heads (Guo et al. 2024, arXiv 2410.13835; Sandoval-Segura et al. 2025, arXiv "
            "2504.03889: 4 to 14 % of heads can be zeroed) used large ones.",
            "## In your own model",
            '`regard.replacing(model, "softmax+window=512+prefix=4")`, a function of your own that hides keys, and '
            '`regard.replacing(model, "zeros", heads=run.heads("head_output_norm", below=0.5, relative=True))`: '
            "[replace.md](replace.md#replacing).",
        ],
        (),
        (),
        [(TABLE, "loss of every model"), (RECORD, "settings and versions")],
    )


def cost_table(tables: Tables) -> Table:
    """The cost of each intervention, a row of models each."""
    lines = []
    for row in tables.rows:
        costs = [format_interval(tables.cost(row, name), 3, signed=True) for name in COSTS]
        whole = format_interval(mean_of(tables.losses(row, WHOLE)), 3)
        lines.append([row, tables.sinks(row), whole, *costs, tables.heads(row) or DASH])
    head = ("model", "Sink₁ % by seed", "loss", *COSTS, "dormant of 16 heads, by seed")
    return Table("causes", "costs", head, lines)


def difference_table(tables: Tables) -> Table:
    """What more one of two interventions costs than the other."""
    lines = []
    for row in tables.rows:
        pairs = [paired(tables.losses(row, first), tables.losses(row, second)) for first, second in PAIRS.values()]
        lines.append([row, *(_format_cell(pair) for pair in pairs)])
    return Table("causes-differences", "differences", ("model", *PAIRS), lines)


def _format_cell(pair: Interval | None) -> str:
    if pair is None or pair.n < MIN_RUNS:
        return f"{format_interval(pair, 3, signed=True)} ({pluralize(0 if pair is None else pair.n, 'seed')})"
    return format_difference(pair, 3)


PAPER = Paper(
    "causes",
    "What a sink is for",
    "python -m experiments.sinks.causes --work DIR",
    (),
    Tables.load,
    make_page,
)
