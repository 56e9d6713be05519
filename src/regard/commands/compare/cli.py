"""`regard compare`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.runs.arguments import parse_path
from regard.runs.output_dir import SWEEP

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "Put runs side by side: a table in the terminal, and a page."
EXAMPLES = """examples:
  regard compare runs/natural runs/random
  regard compare runs/* --out comparison.html
  regard compare runs/sapt runs/replay

Runs of measure are compared by their statistics. Those of learn, replace and
pretrain by their settings, as far as they differ, and by their main figures.
"""
PAGES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "runs", nargs="+", type=parse_path, metavar="RUN", help="folders of finished runs of one command"
    )
    parser.add_argument("--out", type=parse_path, metavar="FILE", help="also write a page, .html")
    parser.add_argument("--overwrite", action="store_true", help="write over FILE")


def run(args: argparse.Namespace) -> None:
    """Compare, print, and write the page."""
    if len(args.runs) < 2:
        given = args.runs[0]
        hint = f": {given} is a sweep; {given / 'trials'}/*/ are its runs, and its report.html compares them"
        hint = hint if (given / SWEEP).is_file() else ""
        raise UserError(f"expected at least two runs to compare, got {len(args.runs)}{hint}")
    if len({run.resolve() for run in args.runs}) < len(args.runs):
        raise UserError(f"expected different runs to compare, got {', '.join(map(str, args.runs))}")
    from rich.console import Console

    from regard.runs.output_dir import check_output_file, write_file

    if args.out is not None:
        check_output_file(args.out, overwrite=args.overwrite)
        if args.out.suffix.lower() not in PAGES:
            raise UserError(f"--out: expected a name that ends in {' or '.join(PAGES)}, got {args.out}")
    console = Console(highlight=False)
    shown, notes, page = _compare(_load(args.runs), console.width)
    for part in shown:
        console.print(part)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    if args.out is not None:
        write_file(args.out, page)
        console.print(f"\nWritten to {args.out}", soft_wrap=True)


COLUMN_NAMES = ("figure", "setting", "difference", "task")
"""Columns beside those of runs, which are called as their folders."""


def _load(folders: Sequence[Path]) -> Mapping[str, Any]:
    """Return the results by the names of their folders; all are of the command of the first."""
    from regard.commands.compare.comparison import result_class

    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    if reserved := next((name for name in names if name in COLUMN_NAMES or name[0] == "±"), None):
        raise UserError(
            f"expected other names of folders than those of columns ({', '.join(COLUMN_NAMES)}), got {reserved}"
        )
    kind = result_class(folders[0])
    return {name: kind.load(folder) for name, folder in zip(names, folders, strict=True)}


def _compare(runs: Mapping[str, Any], width: int) -> tuple[list[RenderableType], list[str], str]:
    """Return what a terminal of a width shows, notes, and the page."""
    from regard.commands.compare import comparison, terminal
    from regard.commands.measure.compare import compare, terminal_table
    from regard.commands.measure.result import MeasureResult

    two_runs = [comparison.describe_difference(*runs)] if len(runs) == 2 else []
    if all(isinstance(run, MeasureResult) for run in runs.values()):
        table, page = compare(runs)
        two_runs = [f"{note}; means over heads have no standard error" for note in two_runs]
        shown: list[RenderableType] = [terminal_table(table)]
        notes = list(table.attrs.get("notes", []))
    else:
        settings, figures = comparison.compare_settings(runs), comparison.compare_figures(runs)
        shown = [
            terminal.terminal_table(part, max_rows, width)
            for table, max_rows in ((settings, comparison.MAX_SETTINGS), (figures, None))
            for part in terminal.split_columns(table, width)
        ]
        notes, page = comparison.list_notes(runs, settings, figures), comparison.make_page(runs, settings, figures)
    return shown, [*notes, *two_runs], page
