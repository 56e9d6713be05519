"""Table and text of docs/sides.md, from docs/results/sides-runs.csv."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.claims import format_difference, format_interval
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table
from experiments.common.run_table import RunTable
from experiments.sides.run import LENGTH, LONG, METHODS, SEEDS, SIDES
from regard.commands.learn.config import LearnConfig
from regard.runs.intervals import difference_interval, t_interval

RECORD = "sides.json"
SCORE = "AP til"
PREFERRED, MARGIN = "middle", 1.0
"""The side that is the default unless another is better by more than so many points."""
LOST = {"right": "its end", "middle": "its middle", "left": "its beginning"}


class Tables(RunTable):
    """The runs, a line each, and the record of versions."""

    name, module = "sides", "experiments.sides.run"
    columns = ("side", "method", "seed", "tasks", "rows cut", SCORE, "cpu_seconds")
    floats = ("rows cut", SCORE, "cpu_seconds")

    @classmethod
    def paths(cls, work: Path) -> Iterable[Path]:
        return (work / "runs").glob("*.json")

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        return SIDES.index(run["side"]), METHODS.index(run["method"]), SEEDS.index(run["seed"])

    def of(self, side: str, method: str) -> dict[int, float]:
        """Return AP by seed."""
        rows = self.runs[(self.runs["side"] == side) & (self.runs["method"] == method)]
        return dict(zip(rows["seed"].astype(int), rows[SCORE].astype(float), strict=True))

    def mean(self, side: str) -> float | None:
        """Return the mean AP over methods and seeds; None unless all were run."""
        values = [value for method in METHODS for value in self.of(side, method).values()]
        return sum(values) / len(values) if len(values) == len(METHODS) * len(SEEDS) else None


def choose_side(tables: Tables) -> str | None:
    """Return what the rule picks; None unless all runs are there."""
    means = {side: mean for side in SIDES if (mean := tables.mean(side)) is not None}
    if len(means) < len(SIDES):
        return None
    best = max(means, key=lambda side: means[side])
    return PREFERRED if means[PREFERRED] >= means[best] - MARGIN else best


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    means, lost = mean_table(tables), LOST[LearnConfig().side]
    cut, count = tables.runs["rows cut"].mean(), int(tables.runs["tasks"].max())
    return Page(
        "sides",
        "What a prompt that is too long loses",
        [
            f"`regard learn` at the scale `laptop` takes from a prompt longer than `--length` {lost}, unless "
            "`--truncation-side` says otherwise. Of a prompt with the instruction first and `Output: `, or the "
            "assistant's turn of a chat template, last, both then stay.",
            describe_choice(tables),
            "## Rule, fixed before the runs",
            f"The default is the {PREFERRED} if its mean AP, over methods and seeds, is at most {MARGIN:g} point below "
            "that of each other side; else it is the side with the highest mean.",
            "## AP",
            means,
            f"AP in per cent (exact match of answers after the last task), means over {len(SEEDS)} seeds ± half "
            "the 95 % interval (Student's t), differences paired by seed. The tasks of Long Sequence as text to text "
            f"of which more than half of the prompts have more than {LONG} tokens: {count} tasks, {cut:.0f} % of "
            f"whose prompts are cut to {LENGTH}. The small decoder, pre-trained on Python's documentation, is that of "
            "`answers` in [routing.md](routing.md); `joint` trains one adapter on all tasks.",
        ],
        (means,),
        (),
        [("sides-runs.csv", "all runs"), (RECORD, "versions")],
    )


def describe_choice(tables: Tables) -> str:
    """Return what the rule says, and whether the default is that."""
    chosen, default = choose_side(tables), LearnConfig().side
    if chosen is None:
        return "The runs are not complete."
    follows = "which is the default" if chosen == default else f"and the default, {default}, departs from it"
    means = ", ".join(f"{tables.mean(side):.1f} without {LOST[side]}" for side in SIDES)
    return f"The rule picks {chosen}, {follows}: mean AP {means}."


def mean_table(tables: Tables) -> Table:
    """Means over seeds by side and method, and differences to a prompt without its end."""
    lines = []
    for side in SIDES:
        cells = []
        for method in METHODS:
            scores, reference = tables.of(side, method), tables.of(SIDES[0], method)
            gains = [scores[seed] - reference[seed] for seed in scores if seed in reference]
            shown = format_difference(difference_interval(gains)) if side != SIDES[0] and gains else "–"
            cells += [format_interval(t_interval([*scores.values()]), 1), shown]
        lines.append([f"{LOST[side]} (`{side}`)", *cells])
    head = [title for method in METHODS for title in (f"`{method}`", f"`{method}`, minus without its end")]
    return Table("sides-means", "means by side and method", ("a prompt loses", *head), lines)


PAPER = Paper(
    "sides",
    "What a prompt that is too long loses",
    "python -m experiments.sides.run --data DIR",
    (),
    Tables.load,
    make_page,
    Tables.store,
)
