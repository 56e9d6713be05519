"""`regard compare`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands.measure.result import MeasureResult
from regard.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from regard.commands.measure.compare_page import comparison, comparison_page

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "Put runs side by side: a table in the terminal, and a page."
EXAMPLES = """examples:
  regard compare runs/natural runs/random
  regard compare runs/* --out comparison.html
"""
PAGES = (".html", ".htm")
"""How the name of a page may end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `regard measure` wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a page, .html")
    parser.add_argument("--overwrite", action="store_true", help="write over FILE")


def run(given: argparse.Namespace) -> None:
    """Compare, print, write."""
    if len(given.runs) < 2:
        raise UserError(f"expected at least two runs to compare, got {len(given.runs)}")
    if len({run.resolve() for run in given.runs}) < len(given.runs):
        raise UserError(f"expected different runs to compare, got {', '.join(map(str, given.runs))}")
    from rich.console import Console

    from regard.commands.measure.result import MeasureResult
    from regard.runs.output_dir import check_output_file, write_file

    if given.out is not None:
        check_output_file(given.out, overwrite=given.overwrite)
        if given.out.suffix.lower() not in PAGES:
            raise UserError(f"--out: expected a name that ends in {' or '.join(PAGES)}, got {given.out}")
    runs = {name: MeasureResult.load(run) for name, run in zip(_names(given.runs), given.runs, strict=True)}
    table, page = compare(runs)
    console = Console(highlight=False)
    console.print(_rich(table))
    for note in table.attrs.get("notes", []):
        console.print(f"note: {note}", soft_wrap=True)
    if len(runs) == 2:
        first, second = runs
        note = f"note: difference is {second} − {first}; means over heads have no standard error"
        console.print(note, soft_wrap=True)
    if given.out is not None:
        write_file(given.out, page)
        console.print(f"\nWritten to {given.out}", soft_wrap=True)


def _names(runs: list[Path]) -> list[str]:
    """The folders' own names where these differ, else their paths."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _rich(table: pd.DataFrame) -> RenderableType:
    """The comparison for a terminal: what a value is of in one column, a number in each of the others."""
    import pandas as pd
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    several = table["site"].nunique() > 1
    numbers = list(table.columns[table.columns.get_loc("position") + 1 :])
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("statistic", overflow="fold")
    for column in numbers:
        shown.add_column(Text(str(column).replace("_", " ")), justify="right", overflow="fold")
    for row in table.to_dict("records"):
        parts = [str(row["statistic"])]
        parts += [] if pd.isna(row["epsilon"]) else [f"ε={row['epsilon']:g}"]
        parts += [] if pd.isna(row["position"]) else [f"at {row['position']}"]
        parts += [str(row["site"])] if several else []
        shown.add_row(Text(" ".join(parts)), *("" if pd.isna(row[n]) else f"{row[n]:.4g}" for n in numbers))
    means = "Of the whole model where that is measured, else means over layers and heads; at N: of position N."
    return Group(shown, Text(means, style="italic"))


def compare(runs: Mapping[str, MeasureResult]) -> tuple[pd.DataFrame, str]:
    """Runs side by side: a table with one column each (its notes in `.attrs["notes"]`), and a page."""
    table = comparison({name: (run.table, run.metadata) for name, run in runs.items()})
    page = comparison_page({name: (run.table, run.metadata, run.tokens) for name, run in runs.items()})
    return table, page
