"""`regard compare`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from regard.commands.measure.result import MeasureResult

HELP = "Put runs side by side: a table in the terminal, and a page."
EXAMPLES = """examples:
  regard compare runs/natural runs/random
  regard compare runs/* --out comparison.html
"""
PAGES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `regard measure` wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a page, .html")
    parser.add_argument("--overwrite", action="store_true", help="write over FILE")


def run(args: argparse.Namespace) -> None:
    """Compare, print, and write the page."""
    if len(args.runs) < 2:
        raise UserError(f"expected at least two runs to compare, got {len(args.runs)}")
    if len({run.resolve() for run in args.runs}) < len(args.runs):
        raise UserError(f"expected different runs to compare, got {', '.join(map(str, args.runs))}")
    from rich.console import Console

    from regard.commands.measure.page import terminal_table
    from regard.commands.measure.result import MeasureResult
    from regard.runs.output_dir import check_output_file, write_file

    if args.out is not None:
        check_output_file(args.out, overwrite=args.overwrite)
        if args.out.suffix.lower() not in PAGES:
            raise UserError(f"--out: expected a name that ends in {' or '.join(PAGES)}, got {args.out}")
    names = [run.resolve().name for run in args.runs]
    names = names if len(set(names)) == len(names) else [str(run) for run in args.runs]
    runs = {name: MeasureResult.load(run) for name, run in zip(names, args.runs, strict=True)}
    table, page = compare(runs)
    console = Console(highlight=False)
    console.print(terminal_table(table))
    two_runs = "difference is {1} − {0}; means over heads have no standard error"
    for note in (*table.attrs.get("notes", []), *([two_runs.format(*runs)] if len(runs) == 2 else [])):
        console.print(f"note: {note}", soft_wrap=True)
    if args.out is not None:
        write_file(args.out, page)
        console.print(f"\nWritten to {args.out}", soft_wrap=True)


def compare(runs: Mapping[str, MeasureResult]) -> tuple[pd.DataFrame, str]:
    """Return a table of measurements by name, a column per run and its notes in `.attrs["notes"]`, and a page."""
    from regard.commands.measure.page import comparison, comparison_page

    tables = {name: (run.table, run.metadata) for name, run in runs.items()}
    return comparison(tables), comparison_page(tables)
