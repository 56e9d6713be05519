"""What the pages of experiments in continual learning have in common: findings, differences, and their command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.common.markdown import item
from experiments.common.verdicts import VERDICTS, Finding
from regard.errors import UserError
from regard.runs.output_dir import write_file

DASH = "–"


def counted(judged: Sequence[Finding[Any]]) -> str:
    """How many findings have each verdict."""
    counts = {word: sum(one.verdict == word for one in judged) for word in VERDICTS}
    return "; ".join(f"*{word}* {count}" for word, count in counts.items() if count)


def finding(one: Finding[Any]) -> str:
    """A claim, its numbers, and its verdict, as a paragraph of a list."""
    evidence = one.evidence[0].upper() + one.evidence[1:]
    return item(f"**{one.claim.said}** {evidence} *{one.verdict.capitalize()}.*")


def p_value(found: pd.DataFrame, row: str) -> str:
    """The corrected p of a row among differences (`regard.continual.comparison`) that are indexed by method."""
    value = float(found.loc[row, "t_test_holm"]) if row in found.index else float("nan")
    return DASH if value != value else "< 0.001" if value < 0.001 else f"{value:.3f}"


def command(
    arguments: list[str] | None,
    about: str | None,
    page: Path,
    gather: Callable[[Path, str | None], None],
    made: Callable[[], str],
) -> int:
    """Write a page, or say whether it is what its tables make: 0, 1 where it is out of date, 2 after a user's error.

    `gather` makes the tables of the runs in a folder, `made` the page of the tables.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="make the tables anew from the runs in this folder")
    parser.add_argument("--revision", help="the revision that the runs were made with, for the record")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is out of date")
    given = parser.parse_args(arguments)
    try:
        if given.work is not None and not given.check:
            gather(given.work, given.revision)
        text = made()
    except UserError as error:
        Console(stderr=True).print(str(error), style="bold")
        return 2
    if given.check:
        return int(not page.exists() or page.read_text(encoding="utf-8") != text)
    write_file(page, text)
    return 0
