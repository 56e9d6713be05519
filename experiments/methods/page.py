"""Table and text of docs/methods.md, from docs/results/methods-runs.csv."""

from collections.abc import Sequence
from typing import Any

from experiments.common.claims import DASH, format_interval
from experiments.common.method_runs import MethodTable
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table
from experiments.methods.run import CANDIDATE, LENGTH, METHODS, MOODS, PRESENT, ROUTED, SEEDS, STREAMS
from regard.commands.learn.config import LearnConfig
from regard.continual.methods.sapt_config import SaptConfig
from regard.runs.intervals import t_interval

RECORD = "methods.json"
TITLE = "The method by default"
MOST_LOST = 2.0
"""Points of AP with the task known that the candidate may lose."""
MOST_LOST_BY_KNOWING = 1.0
"""Points of AP that a stream may lose where the adapter of a known task answers alone."""


class Tables(MethodTable):
    """The runs, a line each, and the record of versions."""

    name, module = "methods", "experiments.methods.run"
    streams, methods, seeds = STREAMS, METHODS, SEEDS


def follows_rule(tables: Tables, stream: str) -> bool | None:
    """Return whether the candidate passes on a stream; None unless all seeds were run."""
    known, all_tasks = (tables.gains(stream, CANDIDATE, PRESENT, column) for column in ("AP til", "AP cil"))
    if not known:
        return None
    return t_interval(all_tasks).ci_low > 0 and sum(known) / len(known) >= -MOST_LOST


def knows_tasks(tables: Tables) -> bool | None:
    """Return whether adapters of known tasks answer alone, by the rule; None unless all seeds were run."""
    gains = [tables.gains(stream, CANDIDATE, ROUTED, "AP til") for stream in STREAMS]
    if not all(gains):
        return None
    means = [sum(of_stream) / len(of_stream) for of_stream in gains]
    return sum(means) > 0 and min(means) >= -MOST_LOST_BY_KNOWING


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    scores, gains, known = tables.score_table("methods-means"), gain_table(tables), known_table(tables)
    return Page(
        "methods",
        TITLE,
        [
            describe_choice(tables),
            "## Rule, fixed before the runs",
            f"`{CANDIDATE}` takes the place of `{PRESENT}` if on each stream the whole 95 % interval (Student's t, "
            "paired by seed) of its AP among the classes of all tasks (CIL) minus that of "
            f"`{PRESENT}` is above 0, and the mean of its AP with the task known (TIL) is at most {MOST_LOST:g} points "
            "below.",
            f"## `{CANDIDATE}` minus `{PRESENT}`",
            gains,
            "## What answers a text whose task is known",
            describe_knowing(tables),
            known,
            "## All methods",
            scores,
            "AP in per cent after the last task, and seconds of CPU time of the whole run on one core; means over "
            f"{len(SEEDS)} seeds ± half the 95 % interval. MiniLM, defaults of the scale `laptop` but {LENGTH} tokens "
            "a text and no diagnostics. `stdlib-split` and `news-series` are described in "
            f"[prescaling.md](prescaling.md); `sentiment` is {', '.join(MOODS)} of Long Sequence, without "
            "instructions. One small encoder, and few rows a task.",
        ],
        (scores, gains, known),
        (),
        [("methods-runs.csv", "all runs"), (RECORD, "versions")],
    )


def describe_choice(tables: Tables) -> str:
    """Return what the rule says, and whether the default is that."""
    passed = {stream: follows_rule(tables, stream) for stream in STREAMS}
    if None in passed.values():
        return "The runs are not complete."
    failed = [f"`{stream}`" for stream, holds in passed.items() if not holds]
    chosen = PRESENT if failed else CANDIDATE
    default = LearnConfig().method
    why = f"the rule fails on {' and '.join(failed)}" if failed else "the rule holds on each stream"
    follows = "so is the default" if default == chosen else f"the default departs from it, `{default}`"
    return (
        f"Which method should `regard learn` have without `--method`: `{PRESENT}` or `{CANDIDATE}`, which tells tasks "
        f"apart by itself? It is `{chosen}`: {why}; {follows}."
    )


def describe_knowing(tables: Tables) -> str:
    """Return what answers a known task, the rule, and whether the default is that."""
    chosen = "adapter" if knows_tasks(tables) else "router"
    default = SaptConfig().known_task
    follows = "so is the default" if default == chosen else f"the default departs from it, `{default}`"
    return (
        f"In `{CANDIDATE}` the adapter that was trained on the task may answer alone (`known_task=adapter`), or the "
        f"router weighs all of them by the text (`{ROUTED}` below). The rule, fixed when one run of `{STREAMS[0]}` "
        "with longer texts had been seen: the adapter, if the mean gain of AP TIL over the streams is above 0 and none "
        f"loses more than {MOST_LOST_BY_KNOWING:g} point. By it the choice is `{chosen}`; {follows}. Where the task is "
        "not known (CIL) nothing changes."
    )


def known_table(tables: Tables) -> Table:
    """What the adapter of a known task gains, by stream."""
    lines = []
    for stream in STREAMS:
        gains = tables.gains(stream, CANDIDATE, ROUTED, "AP til")
        lines.append([f"`{stream}`", format_interval(t_interval(gains), 1, signed=True)])
    return Table("methods-known", "gain of a known task's adapter", ("stream", "AP TIL"), lines)


def gain_table(tables: Tables) -> Table:
    """The differences that decide, by stream."""
    lines = []
    for stream in STREAMS:
        passed = follows_rule(tables, stream)
        verdict = DASH if passed is None else "holds" if passed else "fails"
        cells = [
            format_interval(t_interval(tables.gains(stream, CANDIDATE, PRESENT, column)), 1, signed=True)
            for column in ("AP cil", "AP til")
        ]
        lines.append([f"`{stream}`", *cells, verdict])
    return Table("methods-gains", "differences by stream", ("stream", "AP CIL", "AP TIL", "rule"), lines)


PAPER = Paper(
    "methods", TITLE, "python -m experiments.methods.run --data DIR", (), Tables.load, make_page, Tables.store
)
