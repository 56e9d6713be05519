"""What a paper brings to the pages: its claims, its tables, and the page made from both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.claims import Claim, Verdict, judge_claims
from experiments.common.parts import Page, Table, count_verdicts, format_verdicts, group_verdicts


@dataclass(frozen=True)
class Paper:
    """A paper that is reproduced.

    Attributes:
        name: Name of its folder in `experiments`.
        title: Title with authors, year and arXiv number.
        command: What makes most of its runs.
        claims: Its tables, figures and statements.
        load: Reads the stored tables of a folder.
        make_page: Makes the page from the tables and the verdicts.
        gather: Makes the stored tables anew from a folder of runs, where the experiment keeps those.
        add: Adds the runs in a folder to the stored tables, where the experiment can.
    """

    name: str
    title: str
    command: str
    claims: Sequence[Claim[Any]]
    load: Callable[[Path], Any]
    make_page: Callable[[Any, Sequence[Verdict]], Page]
    gather: Callable[[Path, str | None, Path], None] | None = None
    add: Callable[[Path, str | None, Path], None] | None = None

    def judge(self, folder: Path) -> list[Verdict]:
        """Judge the claims from the tables in a folder."""
        return judge_claims(self.claims, self.load(folder))

    def page(self, folder: Path) -> Page:
        """Make the page from the tables in a folder."""
        tables = self.load(folder)
        return self.make_page(tables, judge_claims(self.claims, tables))


RULES = """Verdicts are computed from the stored tables by these rules.

* A claim has parts, each true, false or undecided. All true is *as published*, some true *in part*, none true and at
  least one false *against*, all undecided *cannot be told*. What no paper claims (*asked here*) *holds* if all is
  true. A figure that no rule decides is *drawn*.
* A difference counts if its 95 % interval (Student's t, paired by run, at least 3 runs) excludes 0. *Near* means that
  the whole interval is within the margin; a bound holds if the whole interval is on its side.
* A row has a sink if its rate is at least 5 % in every seed, and none if it is below in every seed, with two seeds or
  more.
* The rules for PAPA, and those for pre-scaling's claims about other methods and CIL, were written after the runs; the
  others before.
* Undecided is no proof of equality. Intervals are not corrected for their number. Published numbers come from larger
  models and more data: compared are signs and orders, not heights."""


def claims_page(verdicts: dict[str, list[Verdict]], papers: Sequence[Paper]) -> Page:
    """Make the page that lists all claims of all papers, with the file of the evidence."""
    every = [verdict for paper in papers for verdict in verdicts[paper.name]]
    counts = f"Claims, counted stream by stream: {count_verdicts(every)}."
    parts: list[str | Table] = [
        "Tables, figures and statements of the four papers, with the command that tests each here and its verdict. "
        f"{counts} The evidence behind each verdict is in [claims.csv](results/claims.csv).",
        *RULES.split("\n\n", 1),
    ]
    evidence: list[tuple[str, ...]] = []
    for paper in papers:
        groups = group_verdicts(verdicts[paper.name])
        lines = [
            (claim.source, f"{claim.text}{_command(claim)}", claim.published, _verdict(group))
            for claim, group in groups.items()
        ]
        head = ("source", "claim", "published", "verdict")
        main = (
            f"Commands are `{paper.command}` unless named. Results: [{PAGES[paper.name]}.md]({PAGES[paper.name]}.md)."
        )
        parts += [f"## {paper.title}", main, Table("", "", head, lines)]
        evidence += [
            (paper.name, one.claim.source, one.claim.text, one.claim.published, one.stream, one.word, one.evidence)
            for one in verdicts[paper.name]
        ]
    columns = ("paper", "source", "claim", "published", "stream", "verdict", "evidence")
    table = Table("claims", "verdicts with their evidence, one row a claim and stream", columns, evidence)
    return Page("claims", "Claims of the four papers", parts, (table,))


PAGES = {"papa": "papa", "prescale": "prescaling", "sapt": "sapt", "sinks": "sinks"}


def _command(claim: Claim[Any]) -> str:
    """Return the command of a claim that is not that of its paper."""
    return f" (`{claim.command}`)" if claim.command else ""


def _verdict(group: Sequence[Verdict]) -> str:
    claim = group[0].claim
    if claim.figure:
        return f"{format_verdicts(group)}: [figure](figures/{claim.figure}.svg)"
    return format_verdicts(group) + (f": {claim.reason}" if claim.reason else "")
