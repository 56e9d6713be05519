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

HELP = "Check whether a continual-learning run has forgotten old tasks."
EXAMPLES = """examples:
  regard check runs/db
  regard check runs/db --margin 0.5 --scenario cil

Exits with 1 if an old task dropped by more than the margin, that is, if the
whole 95 % interval of its drop exceeds it. Exits with 3 if none did but some
interval holds the margin, which more test rows or seeds would narrow. Exits
with 0 if all intervals are within the margin, and with 2 for a mistake.
"""
DROPPED, CANNOT_TELL = 1, 3
"""Exit codes."""
WIDTH = 120
"""Width of the table without a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder written by `regard learn`")
    parser.add_argument("--margin", default="1.0", metavar="POINTS", help="allowed drop in points (default: 1.0)")
    parser.add_argument(
        "--scenario", default="til", metavar="SCENARIO", help="til: classes of the task (default), or cil: all classes"
    )


def run(args: argparse.Namespace) -> int:
    """Print how much every old task dropped.

    Returns:
        `DROPPED` if one dropped by more than the margin, else `CANNOT_TELL` if that is open for one, else 0.
    """
    from rich.console import Console

    from regard.commands.learn.result import LearnResult
    from regard.continual.forgetting import explain_nothing_to_check, find_drops
    from regard.continual.metrics import Scenario

    margin = float(parse_number(args.margin, float, "--margin"))
    check_choice("scenario", args.scenario, get_args(Scenario))
    scores = LearnResult.load(args.run).accuracy_matrix
    methods = list(scores["method"].unique())
    drops = sorted(find_drops(scores, margin, scenario=args.scenario), key=lambda drop: methods.index(drop.method))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)  # keep verdicts in logs complete
    if not drops:
        console.print(explain_nothing_to_check(scores, scenario=args.scenario), soft_wrap=True)
        return 0
    console.print(_table(drops))
    num_dropped, num_open = (sum(drop.verdict == verdict for drop in drops) for verdict in ("dropped", "cannot tell"))
    count = f"{num_dropped} of {len(drops)} old tasks" if len(drops) > 1 else f"{num_dropped} of 1 old task"
    intervals = f"95 % intervals over {_units(drops)}"
    told = f"{count} dropped by more than {margin:g} points ({args.scenario.upper()}, {intervals})"
    console.print(f"\n{told}", soft_wrap=True)
    if num_open:
        console.print(f"cannot tell: {num_open}, whose interval has drops on both sides of the margin", soft_wrap=True)
    return DROPPED if num_dropped else CANNOT_TELL if num_open else 0


def _units(drops: Sequence[ForgottenTask]) -> str:
    """Say what intervals are over (`find_drops`): test rows, or seeds where they differ in a task's drop."""
    if all(len(drop.seeds) < 2 for drop in drops):
        return "test rows"
    several = any(len(set(drop.seeds)) > 1 for drop in drops)
    return f"{'seeds' if several else 'runs'}; over test rows where a task has one, or equal drops"


def _table(drops: Sequence[ForgottenTask]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from regard.commands.learn.metrics import format_fixed

    multiple_methods = len({(drop.stream, drop.method) for drop in drops}) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "task") if multiple_methods else ("task",):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("before", "after", "drop", "interval"):
        table.add_column(name, no_wrap=True, justify="right", min_width=len("before"))
    table.add_column("verdict", no_wrap=True, min_width=len("verdict"))
    for drop in drops:
        names = (drop.method, drop.task) if multiple_methods else (drop.task,)
        numbers = (drop.before, drop.after, drop.drop, drop.ci_low, drop.ci_high)
        *scores, low, high = (format_fixed(value, 1) for value in numbers)
        table.add_row(*map(Text, (*names, *scores, f"{low} to {high}", drop.verdict)))
    return table
