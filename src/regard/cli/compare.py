"""`regard compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from regard.errors import UserError

HELP = "Put runs side by side: a table in the terminal, and a page."
EXAMPLES = """examples:
  regard compare runs/natural runs/random
  regard compare runs/* --out comparison.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `regard measure` wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a page, .html")
    parser.add_argument("--overwrite", action="store_true", help="write over FILE")


def run(given: argparse.Namespace) -> None:
    """Compare, print, write."""
    if len(given.runs) < 2:
        raise UserError(f"expected at least two runs to compare, got {len(given.runs)}")
    if given.out is not None and given.out.exists() and not given.overwrite:
        raise UserError(f"--out: {given.out} exists; choose another name, or allow --overwrite")
    from rich.console import Console

    from regard.results import Measurements, compare, write_file

    runs = {name: Measurements.load(run) for name, run in zip(_names(given.runs), given.runs, strict=True)}
    table, page = compare(runs)
    console = Console(highlight=False)
    console.print(_rich(table))
    for note in table.attrs.get("notes", []):
        console.print(f"note: {note}", soft_wrap=True)
    if given.out is not None:
        write_file(given.out, page)
        console.print(f"\nWritten to {given.out}", soft_wrap=True)


def _names(runs: list[Path]) -> list[str]:
    """The folders' own names where these differ, else their paths."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _rich(table: object) -> object:
    """The comparison for the terminal."""
    import pandas as pd
    from rich.table import Table

    assert isinstance(table, pd.DataFrame)
    shown = Table(box=None, header_style="bold", pad_edge=False)
    numbers = {c for c in table.columns if pd.api.types.is_float_dtype(table[c])}
    for column in table.columns:
        shown.add_column(str(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in table.itertuples(index=False):
        shown.add_row(*("" if pd.isna(v) else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    return shown
