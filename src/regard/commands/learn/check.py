"""`regard check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from regard.errors import check_choice
from regard.runs.arguments import parse_number, parse_path

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
GAP, MIN_NAME = 2, 12
"""Blanks between columns, and the least width of a task's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=parse_path, metavar="RUN", help="folder written by `regard learn`")
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

    margin = parse_number(args.margin, float, "--margin")
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
    console.print(drops_table(drops, console.width))
    num_dropped, num_open = (sum(drop.verdict == verdict for drop in drops) for verdict in ("dropped", "cannot tell"))
    count = f"{num_dropped} of {len(drops)} old tasks" if len(drops) > 1 else f"{num_dropped} of 1 old task"
    intervals = f"95 % intervals over {_units(drops)}"
    points = "1 point" if margin == 1 else f"{margin:g} points"
    told = f"{count} dropped by more than {points} ({args.scenario.upper()}, {intervals})"
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


def drops_table(drops: Sequence[ForgottenTask], width: int) -> Table:
    """Return the drops as a table; names lose their middle where it would be wider."""
    from rich.table import Table
    from rich.text import Text

    from regard.report.labels import format_fixed
    from regard.report.terminal import shorten

    multiple_methods = len({(drop.stream, drop.method) for drop in drops}) > 1
    rows: list[list[str]] = []
    for drop in drops:
        numbers = (drop.before, drop.after, drop.drop, drop.ci_low, drop.ci_high)
        *scores, low, high = (format_fixed(value, 1) for value in numbers)
        rows.append([*scores, f"{low} to {high}", drop.verdict])
    heads = ("before", "after", "drop", "interval", "verdict")
    widths = [max(len(head), *map(len, cells)) for head, cells in zip(heads, zip(*rows, strict=True), strict=True)]
    methods = max(len("method"), *(len(drop.method) for drop in drops)) + GAP if multiple_methods else 0
    room = max(MIN_NAME, width - methods - sum(GAP + column for column in widths))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "task") if multiple_methods else ("task",):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for head, column in zip(heads, widths, strict=True):
        table.add_column(head, no_wrap=True, justify="left" if head == heads[-1] else "right", min_width=column)
    for drop, cells in zip(drops, rows, strict=True):
        task = shorten(drop.task, room)
        table.add_row(*map(Text, ((drop.method, task) if multiple_methods else (task,))), *map(Text, cells))
    return table
