"""Tables and text of docs/room.md, from docs/results/room-runs.csv."""

from collections.abc import Sequence
from typing import Any

from experiments.common.claims import MARGIN, above, below, format_interval
from experiments.common.method_runs import MethodTable
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table, join_words
from experiments.prescale.room import EVALUATED, METHODS, ROWS, SEEDS, STEPS
from regard.runs.intervals import t_interval

RECORD = "room.json"
TITLE = "Pre-scaling where accuracy has room to rise"
PLAIN, PROBING, SCALING = METHODS
NO_ROOM = 97.0
"""Mean accuracy of probing from which a stream decides nothing."""


class Tables(MethodTable):
    """The runs, a line each, and the record of versions."""

    name, module = "room", "experiments.prescale.room"
    streams, methods, seeds = tuple(ROWS), METHODS, SEEDS


def judge(tables: Tables, stream: str) -> str | None:
    """Return what the rule says of a stream; None unless all seeds were run."""
    gains = tables.gains(stream, SCALING, PROBING, "AP til")
    if not gains:
        return None
    probing, difference = t_interval([*tables.of(stream, PROBING, "AP til").values()]), t_interval(gains)
    if probing.mean >= NO_ROOM:
        return "no room"
    if above(difference):
        return "adds"
    if below(difference):
        return "takes"
    return "adds less than a point" if below(difference, MARGIN) else "cannot be told"


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    scores, gains = tables.score_table("room-means"), gain_table(tables)
    few = join_words(f"{rows} on `{stream}`" for stream, rows in ROWS.items())
    return Page(
        "room",
        TITLE,
        [
            "In [prescaling.md](prescaling.md) probing first reaches what learning all tasks at once reaches, and "
            f"scaling can add nothing. Does `{SCALING}` add to `{PROBING}` where there are fewer rows, or labels that "
            f"are alike? {describe_answer(tables)}",
            "## Rule, fixed before the runs",
            "With D the 95 % interval (Student's t, paired by seed) of accuracy after the last task, each text among "
            f"the classes of its own task (AP TIL), with `{SCALING}` minus `{PROBING}`, the first that is true: it "
            "*adds* if all of D is above 0, *takes* if all of D is below 0, *adds less than a point* if all of D is "
            f"below 1; else it *cannot be told*. A stream where `{PROBING}` reaches {NO_ROOM:g} or more on average has "
            "*no room*.",
            "## Differences",
            gains,
            "## All methods",
            scores,
            "AP in per cent after the last task, and seconds of CPU time of the whole run; means over "
            f"{len(SEEDS)} seeds ± half the 95 % interval. MiniLM; training rows a class: {few}; {STEPS} steps a task "
            f"with the head alone and {STEPS} with everything, on `sentiment` 3 epochs of each; at most {EVALUATED} "
            "test rows a task; 32 tokens a text, on `sentiment` 64; rates and batches of "
            "[prescaling.md](prescaling.md). The seed draws the training rows, and but for `sentiment` the order of "
            "tasks. `sentiment` is described in [methods.md](methods.md). One small encoder.",
        ],
        (scores, gains),
        (),
        [("room-runs.csv", "all runs"), (RECORD, "versions")],
    )


def describe_answer(tables: Tables) -> str:
    """Return the verdicts, and what gain the intervals exclude."""
    verdicts = {stream: judge(tables, stream) for stream in ROWS}
    if None in verdicts.values():
        return "The runs are not complete."
    told = {verdict: [f"`{stream}`" for stream in ROWS if verdicts[stream] == verdict] for verdict in verdicts.values()}
    answer = "; ".join(f"{verdict} on {join_words(streams)}" for verdict, streams in told.items())
    highest = [f"{t_interval(tables.gains(stream, SCALING, PROBING, 'AP til')).ci_high:.1f}" for stream in ROWS]
    return f"{answer[0].upper()}{answer[1:]}. Gains above {join_words(highest)} points are excluded."


def gain_table(tables: Tables) -> Table:
    """The differences, by stream."""
    lines = []
    for stream in ROWS:
        pairs = ((SCALING, PROBING, "AP til"), (SCALING, PROBING, "AP cil"), (PROBING, PLAIN, "AP til"))
        cells = [format_interval(t_interval(tables.gains(stream, *pair)), 1, signed=True) for pair in pairs]
        lines.append([f"`{stream}`", *cells, judge(tables, stream) or "–"])
    head = (
        "stream",
        f"`{SCALING}` − `{PROBING}`, AP TIL",
        "the same, AP CIL",
        f"`{PROBING}` − `{PLAIN}`, AP TIL",
        "pre-scaling",
    )
    return Table("room-gains", "differences by stream", head, lines)


PAPER = Paper("room", TITLE, "python -m experiments.prescale.room --data DIR", (), Tables.load, make_page, Tables.store)
