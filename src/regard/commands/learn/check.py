"""`regard check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from regard.errors import check_choice
from regard.runs.arguments import parse_number

if TYPE_CHECKING:
    from rich.table import Table

    from regard.continual.forgetting import ForgottenTask

HELP = "Say whether old tasks of a run of learning have been forgotten."
EXAMPLES = """examples:
  regard check runs/db
  regard check runs/db --margin 0.5 --scenario cil

Ends with code 1 if an old task has dropped by more than the margin: the whole
95 % interval of its drop is over it. With 0 if none has, or there is none.
"""
WIDTH = 120
"""Columns of the table where it is not shown on a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder that `regard learn` has written")
    parser.add_argument("--margin", default="1.0", metavar="POINTS", help="points that a task may drop (default: 1.0)")
    parser.add_argument(
        "--scenario", default="til", metavar="SCENARIO", help="til: among a task's own classes (default), or cil: all"
    )


def run(given: argparse.Namespace) -> int:
    """1 if a task has dropped, else 0; every old task is told of, or why there is none."""
    from rich.console import Console

    from regard.commands.learn.result import LearnResult
    from regard.continual.forgetting import explain_nothing_to_check, find_drops
    from regard.continual.metrics import Scenario

    margin = float(parse_number(given.margin, float, "--margin"))
    check_choice("scenario", given.scenario, get_args(Scenario))
    scores = LearnResult.load(given.run).accuracy_matrix
    methods = list(scores["method"].unique())
    found = sorted(find_drops(scores, margin, scenario=given.scenario), key=lambda one: methods.index(one.method))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)  # a log has no edge, and a verdict must not be cut
    if not found:
        console.print(explain_nothing_to_check(scores, scenario=given.scenario), soft_wrap=True)
        return 0
    console.print(_table(found))
    dropped = sum(one.verdict == "dropped" for one in found)
    told = f"{dropped} of {len(found)} old tasks" if len(found) > 1 else f"{dropped} of 1 old task"
    console.print(f"\n{told} dropped by more than {margin:g} points ({given.scenario.upper()}, 95 % intervals)")
    if any(one.verdict == "maybe" for one in found):
        console.print("maybe: dropped by more, but the interval of the drop leaves that open", soft_wrap=True)
    return int(dropped > 0)


def _table(found: Sequence[ForgottenTask]) -> Table:
    """A line for each old task."""
    from rich.table import Table
    from rich.text import Text

    from regard.commands.learn.metrics import format_fixed

    several = len({(one.stream, one.method) for one in found}) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "task") if several else ("task",):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("before", "after", "drop", "interval"):
        table.add_column(name, no_wrap=True, justify="right", min_width=len("before"))
    table.add_column("verdict", no_wrap=True, min_width=len("verdict"))
    for one in found:
        names = (one.method, one.task) if several else (one.task,)
        scores = [format_fixed(value, 1) for value in (one.before, one.after, one.drop)]
        table.add_row(
            *map(
                Text, (*names, *scores, f"{format_fixed(one.ci_low, 1)} to {format_fixed(one.ci_high, 1)}", one.verdict)
            )
        )
    return table
