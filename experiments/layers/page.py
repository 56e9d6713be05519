"""Table and text of docs/layers.md, from docs/results/layers-runs.csv."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from experiments.common.claims import DASH
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table
from experiments.common.run_table import RunTable
from experiments.layers.run import (
    ANSWERS,
    ENCODED,
    LAYERS,
    LENGTH,
    METHODS,
    MIXED,
    MIXED_TASKS,
    PRESENT,
    SCRIPTS,
    SEEDS,
    STREAMS,
)
from regard.continual.methods.sapt_config import SaptConfig

RECORD = "layers.json"
TITLE = "Layers with adapters"
COLUMNS = ("stream", "method", "layers", "seed", "AP til", "AP cil", "cpu_seconds")
FLOATS = ("AP til", "AP cil", "cpu_seconds")
CANDIDATES = tuple(name for name in LAYERS if name != PRESENT)
"""From the lowest rank on."""
LEAST_GAIN, MOST_LOST, MOST_TIME = 2.0, 1.0, 1.25
"""Points of AP CIL over all streams, points of AP on any of them, and CPU time as a multiple."""


class Tables(RunTable):
    """The runs, a line each, and the record of versions."""

    name, module, columns, floats = "layers", "experiments.layers.run", COLUMNS, FLOATS

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        return STREAMS.index(run["stream"]), METHODS.index(run["method"]), [*LAYERS].index(run["layers"]), run["seed"]

    def mean(self, stream: str, layers: str, column: str, method: str | None = None) -> float | None:
        """Return the mean over seeds, and over methods unless one is given; None unless all were run."""
        runs = self.runs[(self.runs["stream"] == stream) & (self.runs["layers"] == layers)]
        if method is not None:
            runs = runs[runs["method"] == method]
        return float(runs[column].mean()) if len(runs) == len(SEEDS) * (1 if method else len(METHODS)) else None

    def compare(self, layers: str, column: str, how: Callable[[float, float], float]) -> list[float]:
        """Return how a candidate stands to the present layers, by stream; nothing unless all were run."""
        streams = ENCODED if column == "AP cil" else STREAMS
        pairs = [tuple(self.mean(stream, name, column) for name in (layers, PRESENT)) for stream in streams]
        known = [(new, old) for new, old in pairs if new is not None and old is not None]
        return [how(new, old) for new, old in known] if len(known) == len(streams) else []

    def gains(self, layers: str, column: str) -> list[float]:
        """Return a candidate's points above the present layers, by stream."""
        return self.compare(layers, column, lambda new, old: new - old)

    def time_ratio(self, layers: str) -> float:
        """Return a candidate's CPU time over that of the present layers: the geometric mean over streams."""
        return math.exp(fmean(self.compare(layers, "cpu_seconds", lambda new, old: math.log(new / old))))


def follows_rule(tables: Tables, layers: str) -> bool | None:
    """Return whether a candidate passes; None unless all runs are there."""
    known, all_tasks = (tables.gains(layers, column) for column in ("AP til", "AP cil"))
    if not (known and all_tasks):
        return None
    keeps = min(*known, *all_tasks) >= -MOST_LOST
    return fmean(all_tasks) >= LEAST_GAIN and keeps and tables.time_ratio(layers) <= MOST_TIME


def choose_layers(tables: Tables) -> str | None:
    """Return what the rule picks; None unless all runs are there."""
    passed = {layers: follows_rule(tables, layers) for layers in CANDIDATES}
    if None in passed.values():
        return None
    low, full = CANDIDATES
    if passed[low] and passed[full]:
        more = fmean(tables.gains(full, "AP cil")) - fmean(tables.gains(low, "AP cil"))
        return full if more >= LEAST_GAIN else low
    return next((layers for layers in CANDIDATES if passed[layers]), PRESENT)


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    scores, gains, runs = mean_table(tables), gain_table(tables), run_table(tables)
    return Page(
        "layers",
        TITLE,
        [
            describe_choice(tables),
            "## Rule, fixed before the runs",
            "All linear layers take the place of queries and values, for `sapt` and `replay-lora`, with a rank whose "
            "means over both methods and all seeds are, against those of queries and values: AP among the classes of "
            f"all tasks (CIL) at least {LEAST_GAIN:g} points above, in the mean over streams of MiniLM; AP CIL and AP "
            f"with the task known (TIL) at most {MOST_LOST:g} point below on each stream, of which `{ANSWERS}` has TIL "
            f"alone; CPU time at most {MOST_TIME:g} times, in the geometric mean over streams. If both ranks pass, the "
            f"lower one unless the other has {LEAST_GAIN:g} points more of AP CIL.",
            "## All linear layers minus queries and values: means over streams, and the least of one",
            gains,
            "## By method",
            scores,
            "AP in per cent after the last task, and seconds of CPU time of the whole run on one core; "
            f"seed {SEEDS[0]}; `known_task=router`, as was the default. MiniLM, defaults of the scale `laptop` but "
            f"{LENGTH} tokens a text and no diagnostics. `{SCRIPTS}` asks for the script of a character from the "
            f"rest of its Unicode name, five tasks of six scripts with 12 rows each; `{MIXED}` is {MIXED_TASKS} tasks "
            "of that of [routing.md](routing.md); the others are those of [methods.md](methods.md). "
            f"`{ANSWERS}` is that of [routing.md](routing.md), with its decoder and its settings. Small models, one "
            "seed, and few rows a task.",
        ],
        (scores, gains, runs),
        (),
        [("layers-runs.csv", "the same, unrounded"), (RECORD, "versions")],
    )


def describe_choice(tables: Tables) -> str:
    """Return what the rule says, and whether the default is that."""
    chosen = choose_layers(tables)
    if chosen is None:
        return "The runs are not complete."
    default = {name: getattr(SaptConfig(), name) for name in LAYERS[chosen]}
    follows = "so is the default" if default == LAYERS[chosen] else "the default departs from it"
    return f"Which layers of a frozen model should have adapters? The rule picks *{chosen}*; {follows}."


def gain_table(tables: Tables) -> Table:
    """The differences that decide, by rank."""
    lines = []
    for layers in CANDIDATES:
        passed = follows_rule(tables, layers)
        if passed is None:
            lines.append([layers, *[DASH] * 5, DASH])
            continue
        known, all_tasks = (tables.gains(layers, column) for column in ("AP til", "AP cil"))
        cells = [f"{fmean(all_tasks):+.1f}", f"{min(all_tasks):+.1f}", f"{fmean(known):+.1f}", f"{min(known):+.1f}"]
        lines.append([layers, *cells, f"{tables.time_ratio(layers):.2f}", "holds" if passed else "fails"])
    head = ("layers", "AP CIL", "least AP CIL", "AP TIL", "least AP TIL", "CPU time", "rule")
    return Table("layers-gains", "differences by rank", head, lines)


def mean_table(tables: Tables) -> Table:
    """Means over seeds, by stream, method and layers."""
    lines = []
    for stream, method, layers in product(STREAMS, METHODS, LAYERS):
        means = [tables.mean(stream, layers, column, method) for column in ("AP cil", "AP til", "cpu_seconds")]
        cells = [
            DASH if mean is None or math.isnan(mean) else format(mean, how)
            for mean, how in zip(means, (".1f", ".1f", ".0f"), strict=True)
        ]
        lines.append([f"`{stream}`", f"`{method}`", layers, *cells])
    head = ("stream", "method", "layers", "AP CIL", "AP TIL", "s")
    return Table("layers-means", "means by stream, method and layers", head, lines)


def run_table(tables: Tables) -> Table:
    """All runs: a line each."""
    numbers = {"stream": "s", "method": "s", "layers": "s", "seed": "d", "AP cil": ".1f", "AP til": ".1f"}
    lines = [
        [DASH if run[name] != run[name] else format(run[name], how) for name, how in numbers.items()]
        for run in tables.runs.to_dict("records")
    ]
    return Table("layers-all", "all runs", ("stream", "method", "layers", "seed", "AP CIL", "AP TIL"), lines)


PAPER = Paper("layers", TITLE, "python -m experiments.layers.run --data DIR", (), Tables.load, make_page, Tables.store)
