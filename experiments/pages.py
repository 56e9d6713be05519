"""Make the result pages, their CSV tables and figures, and docs/claims.md, from the tables in docs/results.

    python -m experiments.pages [papa prescale sapt sinks routing routers rates steps layers sides methods room causes
        convert margins] [--check] [--work DIR [--add] [--revision REV]] [--not-run "ROW;ROW"]

Without names all are made: the four papers, docs/claims.md, and routing, routers, rates, steps, layers, sides, methods,
room, causes, convert and margins, which are of no paper. With --work the stored tables of one of them (prescale, sapt,
routing, routers, rates, steps, layers, sides, methods, room, convert or margins) are first made anew from the runs in
DIR; with --add, which routing has, the runs in DIR join the stored ones, and take the place of those of the same seed.
A row of a page's first table that has no run is an error, unless --not-run names it (of prescale as "ROW on STREAM"):
its record keeps that it was left out, and the page says so. With --check nothing is written; the exit code is 1 if a
page or a table is out of date.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.common.figures import save_figures
from experiments.common.papers import Paper, claims_page
from experiments.common.parts import FIGURES, RESULTS, Page
from experiments.convert.page import PAPER as CONVERT
from experiments.layers.page import PAPER as LAYERS
from experiments.margins.page import PAPER as MARGINS
from experiments.methods.page import PAPER as METHODS
from experiments.papa.page import PAPER as PAPA
from experiments.prescale.page import PAPER as PRESCALE
from experiments.prescale.room_page import PAPER as ROOM
from experiments.rates.page import PAPER as RATES
from experiments.routing.candidates_page import PAPER as ROUTERS
from experiments.routing.page import PAPER as ROUTING
from experiments.sapt.page import PAPER as SAPT
from experiments.sides.page import PAPER as SIDES
from experiments.sinks.causes_page import PAPER as CAUSES
from experiments.sinks.page import PAPER as SINKS
from experiments.steps.page import PAPER as STEPS
from regard.errors import UserError
from regard.runs.output_dir import write_file

PAPERS: dict[str, Paper] = {paper.name: paper for paper in (PAPA, PRESCALE, SAPT, SINKS)}
OTHERS = (ROUTING, ROUTERS, RATES, STEPS, LAYERS, SIDES, METHODS, ROOM, CAUSES, CONVERT, MARGINS)
ALL: dict[str, Paper] = {**PAPERS, **{paper.name: paper for paper in OTHERS}}
DOCS = Path("docs")


def make_pages(papers: Sequence[Paper], folder: Path = RESULTS) -> list[Page]:
    """Make the pages of papers, and that of the claims if all papers are among them."""
    pages = [paper.page(folder) for paper in papers]
    published = [paper for paper in papers if paper.name in PAPERS]
    if len(published) == len(PAPERS):
        pages.append(claims_page({paper.name: paper.judge(folder) for paper in published}, published))
    return pages


def page_files(page: Page) -> dict[Path, str]:
    """Return the files of a page: its Markdown and its tables."""
    tables = {RESULTS / f"{table.name}.csv": table.to_csv() for table in page.tables}
    return {DOCS / f"{page.name}.md": page.to_markdown(), **tables}


def declare_not_run(record: Path, rows: Sequence[str]) -> None:
    """Write into the record of an experiment which rows of its page were left out. Raises UserError without one."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--not-run: expected the record of an experiment, cannot read {record}: {error}") from error
    content["not_run"] = [row.strip() for row in rows if row.strip()]
    write_file(record, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def is_current(path: Path, text: str) -> bool:
    """Whether a file has this text."""
    return path.exists() and path.read_text(encoding="utf-8") == text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages, tables and figures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"some of {', '.join(ALL)} (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    parser.add_argument("--work", type=Path, help="make the stored tables anew from the runs in this folder")
    parser.add_argument("--add", action="store_true", help="keep the stored runs that the folder has none of (routing)")
    parser.add_argument("--not-run", help="rows of one of them that were left out, semicolons between")
    parser.add_argument("--revision", help="the revision of the code that made the runs, for the record")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except UserError as error:
        Console(stderr=True).print(str(error), style="bold")
        return 2


def _run(options: argparse.Namespace) -> int:
    unknown = [name for name in options.papers if name not in ALL]
    if unknown:
        raise UserError(f"There is no paper {unknown[0]!r}. Choose from {', '.join(ALL)}.")
    papers = [ALL[name] for name in options.papers or ALL]
    if options.work is not None and not options.check:
        if len(papers) != 1 or papers[0].gather is None:
            raise UserError("--work needs one paper, prescale or sapt, or routing. Name it.")
        gather = papers[0].add if options.add else papers[0].gather
        if gather is None:
            raise UserError(f"--add: expected routing, {papers[0].name} makes all its tables anew")
        gather(options.work, options.revision, RESULTS)
    elif options.add:
        raise UserError("--add: expected --work DIR beside it, got none")
    if options.not_run is not None and not options.check:
        if len(papers) != 1:
            raise UserError("--not-run needs one paper. Name it.")
        declare_not_run(RESULTS / f"{papers[0].name}.json", options.not_run.split(";"))
    pages = make_pages(papers)
    files = {path: text for page in pages for path, text in page_files(page).items()}
    if options.check:
        return int(not all(is_current(path, text) for path, text in files.items()))
    for path, text in files.items():
        write_file(path, text)
    save_figures([figure for page in pages for figure in page.figures], FIGURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
