"""docs/sinks.md and its picture, from the tables that the experiment left in docs/results. No figure in it is typed.

python -m experiments.sinks.page [--check]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.markdown import table, wrapped
from experiments.sinks.findings import ARCHITECTURE, MARGIN, VERDICTS, Finding, findings, rate
from experiments.sinks.plan import (
    BASELINE,
    NO_NUMBER,
    SINK,
    STAR,
    Runs,
    averaged,
    by_count,
    differing,
    listed,
)
from experiments.sinks.run import FOLDER
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = Path("docs") / "sinks.md"
PICTURE = Path("docs") / "images" / "sinks.png"
DRAWN = ("softmax", "sigmoid", "elu", "K bias", "weight decay 0.1", "sigmoid, normalised")
"""The rows whose curves are drawn, where there are runs of them."""
DOTS_PER_INCH = 150
PAPERS = {"fixed_token": None, "weight_decay": 0.1}
"""Where a small model may need another recipe than the paper's to grow a sink: the paper's values."""
BIASES, DECAY, INPUT, RATE = (
    "K/V biases and sink tokens",
    "Weight decay",
    "Window, prefix, first token",
    "Learning rate",
)
OPERATION, REST = "Operation", "Positions, norm, feed-forward, heads"
AXES = (OPERATION, BIASES, DECAY, INPUT, RATE, REST)
ELSEWHERE = ("softpick", "gated", "QK-norm", "sink logit", "off-by-one")
"""Rows of operations that the paper does not have."""

TEXT = """# Sinks at the scale of a laptop

What *When Attention Sink Emerges in Language Models* (Gu et al. 2025, arXiv 2410.10781) found in models of 60 million
parameters and more, asked of a small one: `python -m experiments.sinks.run`. This page and its picture are made from
the tables in `docs/results` by `python -m experiments.sinks.page`; the words *as in the paper* and *against the
paper* too are decided from these numbers, by the rules [below](#how-findings-are-decided).

{setting}

{own}

![Mean α₁ and Sink₁ while the models train](images/sinks.png)

{picture}

## Findings

{summary}

{findings}

{elsewhere}

## Tables

{columns}

{tables}

{missing}

## How findings are decided

{rules}
"""


def page(folder: Path = FOLDER) -> str:
    """The whole page, from the tables."""
    runs = Runs.load(folder)
    judged = findings(runs)
    return TEXT.format(
        setting=wrapped(_setting(runs)),
        own=wrapped(_own(runs)),
        picture=wrapped(_under_picture(runs)),
        summary=wrapped(_summary(judged)),
        findings="\n".join(_item(one) for one in judged),
        elsewhere=wrapped(_elsewhere(runs)),
        columns=wrapped(_columns(runs)),
        tables="\n\n".join(f"### {axis}\n\n{_table(runs, axis, rows)}" for axis, rows in by_axis(runs).items()),
        missing=wrapped(_missing(runs)),
        rules=wrapped(_rules(runs)),
    )


# -- words -----------------------------------------------------------------------------------------------------------


def _setting(runs: Runs) -> str:
    recipe, record = runs.record["recipe"], runs.record
    tokens = recipe["max_steps"] * recipe["batch_size"] * recipe["length"]
    text = sum(domain["train_tokens"] for domain in record["data"]["domains"])
    first = recipe.get("fixed_token")
    fixed = "no fixed token" if first is None else f"one fixed token at position {first} of every sequence"
    several = [f"`{row}`" for row in runs.rows if len(runs.changes.get(row, {})) > 1]
    besides = f" ({listed(several)} more than one)" if several else ""
    minutes = runs.ends["seconds"].median() / 60
    return (
        f"The base is a decoder of {record['model']['parameters']:,} parameters ({recipe['num_layers']} layers, width "
        f"{recipe['hidden_size']}, {recipe['num_heads']} heads, feed-forward {recipe['intermediate_size']}), trained "
        f"for {recipe['max_steps']:,} steps of {recipe['batch_size']} sequences of {recipe['length']} tokens: "
        f"{tokens / 1e6:.2f}M tokens, {tokens / text:.2g} times a text of {text / 1e6:.2f}M. Learning rate "
        f"{recipe['learning_rate']:g}, "
        f"weight decay {recipe['weight_decay']:g}, {fixed}. Every row changes one thing of it{besides} and is trained "
        f"with {runs.seeds} seeds, from the weights to the order of the text; a run takes {minutes:.1f} minutes. "
        f"Sinks are measured on {record['watch']['samples']} held-out sequences of {runs.length} tokens with "
        f"ε = {runs.epsilon:g}; uniform attention has a mean α₁ of {record['watch']['uniform']:.3f}. "
        f"torch {record['versions']['torch']}."
    )


def _own(runs: Runs) -> str:
    """In what the base is not the paper's, and what becomes of softmax where it is."""
    apart = {field: value for field, value in PAPERS.items() if runs.base(field) != value}
    if not apart:
        return "Weight decay and first token of the base are those of the paper."
    rows = [row for row in runs.rows for field in apart if runs.changes.get(row) == {field: apart[field]}]
    words = {"weight_decay": f"a weight decay of {PAPERS['weight_decay']:g}", "fixed_token": "no fixed token"}
    alone = " ".join(rate(runs, row) for row in rows) or "There is no run of that."
    return f"The base of the paper has {listed(words[field] for field in apart)}. Changed to that alone: {alone}"


def _under_picture(runs: Runs) -> str:
    drawn = [row for row in DRAWN if row in set(runs.curves["row"])]
    named = listed(f"`{row}`" for row in drawn) if drawn else "no row"
    return f"Curves of {named}, means over the seeds; dotted is what uniform attention has, dashed is the virtual sink."


def _summary(judged: Sequence[Finding]) -> str:
    counts = {word: sum(one.verdict == word for one in judged) for word in VERDICTS}
    told = "; ".join(f"{count} {word}" for word, count in counts.items() if count)
    return (
        f"Of {len(judged)} findings: {told}. The paper's numbers, in parentheses, are of other models and texts: "
        f"compared is whether there is a sink, where, and what it costs, not how large it is."
    )


def _item(one: Finding) -> str:
    numbers = f"Paper, {one.claim.paper}." if one.claim.paper else "The paper's numbers are not quoted here."
    text = f"**{one.claim.said}** ({numbers}) {one.evidence} *{one.verdict.capitalize()}.*"
    return textwrap.fill(
        text,
        120,
        initial_indent="* ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _elsewhere(runs: Runs) -> str:
    rows = [row for row in ELSEWHERE if row in runs.rows]
    if not rows:
        return "Operations that the paper does not have were not run."
    virtual = [row for row in rows if runs.values(row, "virtual_sink_rate")]
    told = [*(rate(runs, row) for row in rows), *(rate(runs, row, "virtual_sink_rate") for row in virtual)]
    return f"Not in the paper: {' '.join(told)}"


def _columns(runs: Runs) -> str:
    return (
        f"Means over seeds ± half the 95 % interval (Student's t); no ± means one seed, of which no interval can be "
        f"told. *Sink₁* and *virtual sink* (Sink_∗ of the paper) are shares of heads × samples that give the first "
        f"token, or what stands beside the tokens, more than ε of their attention. *strongest*: the position, from 0, "
        f"with the highest rate among those that at least half of the queries may see, of the seeds in which it is "
        f"at least {SINK:g} %, and that rate where it is not position 0. *|h₁|/|hₜ|*: the largest of all layers. "
        f"*to softmax*: the difference in validation loss, seed by seed. *emerged*: the step, seed by seed, from which "
        f"on some token is one in every look until the end. {STAR}: weights that are no distribution are measured "
        f"on |A| / Σ|A|. †: the difference is to the row that has the same sequences, not to softmax. ‡: other tokens "
        f"are predicted, or from other sequences, so that losses cannot be compared."
    )


def _rules(runs: Runs) -> str:
    return (
        f"A row has a sink where its rate is at least {SINK:g} % in all seeds, and none where it is below in all; "
        f"otherwise, and with fewer than two seeds, it is open. A loss or a rate is higher or lower where the 95 % "
        f"interval of the differences seed by seed leaves out 0; *within noise* where it does not, which with "
        f"{runs.seeds} seeds is no proof of equality: the half interval says how large a difference may have gone "
        f"unseen. A loss counts as no higher where the whole interval lies under {MARGIN:g} nats. A finding may have "
        f"several parts: all true is *as in the paper*, some true *in part*, none true and "
        f"at least one false *against the paper*, all open *cannot be told at this scale*. Intervals are not corrected "
        f"for their number, nor for the choice of the largest of several means."
    )


def _missing(runs: Runs) -> str:
    few = [
        f"`{row}` ({len(runs.of(row))} of {runs.seeds} seeds)" for row in runs.rows if len(runs.of(row)) < runs.seeds
    ]
    told = [f"Without any run: {listed(f'`{row}`' for row in runs.absent)}."] if runs.absent else []
    told += [f"With fewer seeds: {listed(few)}."] if few else []
    return " ".join(told) or f"Every row has its {runs.seeds} seeds."


# -- tables ----------------------------------------------------------------------------------------------------------


def axis_of(runs: Runs, row: str) -> str:
    """Which table a row stands in, by what it changes."""
    change = runs.changes.get(row, {})
    if "attention" in change:
        spec = runs.spec(row)
        beside = spec.sink_token or spec.extra != "none"
        return BIASES if beside else REST if spec.qk_norm else OPERATION
    axes = {DECAY: ("weight_decay",), INPUT: ("window", "prefix", "fixed_token", "random_tokens")}
    axes |= {RATE: ("learning_rate",), REST: ARCHITECTURE}
    return next((axis for axis, fields in axes.items() if set(fields) & set(change)), REST)


def by_axis(runs: Runs) -> dict[str, list[str]]:
    """The rows of each table, softmax in all of them: first, or, where an axis is of numbers, in its order."""
    found: dict[str, list[str]] = {axis: [] for axis in AXES}
    for row in runs.rows:
        if row != BASELINE:
            found[axis_of(runs, row)].append(row)
    base = [BASELINE] if BASELINE in runs.rows else []
    tables = {axis: [*base, *rows] for axis, rows in found.items() if rows or (axis == OPERATION and base)}
    for axis in NUMBERS.keys() & tables.keys():
        tables[axis].sort(key=lambda row: _value(runs, row, NUMBERS[axis]))
    return tables


NUMBERS = {DECAY: "weight_decay", RATE: "learning_rate"}
"""The axes of numbers, and the field that is the number."""


def _value(runs: Runs, row: str, field: str) -> float:
    return float(runs.changes.get(row, {}).get(field, runs.base(field)))


def _table(runs: Runs, axis: str, rows: Sequence[str]) -> str:
    head = ("row", "seeds", "Sink₁ %", "virtual sink %", "strongest", "mean α₁", "|h₁|/|hₜ|".replace("|", r"\|"))
    return table((*head, "validation loss", "to softmax", "emerged"), [_cells(runs, axis, row) for row in rows])


def _cells(runs: Runs, axis: str, row: str) -> tuple[Any, ...]:
    return (
        f"{row}, {runs.base(NUMBERS[axis]):g}" if row == BASELINE and axis in NUMBERS else row,
        f"{len(runs.of(row))} of {runs.seeds}",
        averaged(runs, row, "sink_rate", 1),
        averaged(runs, row, "virtual_sink_rate", 1),
        _strongest(runs, row),
        averaged(runs, row, "alpha_first", 3),
        averaged(runs, row, "norm_ratio", 2),
        averaged(runs, row, "valid_loss", 3),
        _to_reference(runs, row),
        _emerged(runs, row),
    )


def _strongest(runs: Runs, row: str) -> str:
    found = runs.where(row)
    if not found:
        return NO_NUMBER
    if set(found) == {0}:
        return "0"
    return f"{by_count(found)} ({averaged(runs, row, 'sink_rate_max', 1)} %)"


def _to_reference(runs: Runs, row: str) -> str:
    if row == BASELINE:
        return NO_NUMBER
    other = runs.reference(row)
    mark = "‡" if not runs.comparable(row) else "†" if other != BASELINE else ""
    found = runs.more(row, other, "valid_loss")
    return NO_NUMBER if found is None else f"{differing(found, 3)}{mark}"


def _emerged(runs: Runs, row: str) -> str:
    steps = runs.of(row)["emergence_step"]
    return ", ".join(NO_NUMBER if step != step else f"{step:.0f}" for step in steps.astype(float))


# -- the picture -----------------------------------------------------------------------------------------------------


def picture(runs: Runs) -> Figure:
    """Mean α₁ and the sink rate by step, a line a row."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = made.subplots(1, 2)
    inks: Mapping[str, str] = dict(zip(DRAWN, colors.SERIES_LIGHT, strict=True))
    for row, ink in inks.items():
        curve = runs.curves[runs.curves["row"] == row].sort_values("step")
        if curve.empty:
            continue
        left.plot(curve["step"], curve["alpha_first"], color=ink, linewidth=1.5, label=row)
        right.plot(curve["step"], curve["sink_rate"], color=ink, linewidth=1.5, label=row)
        if curve["virtual_sink_rate"].notna().any():
            right.plot(
                curve["step"], curve["virtual_sink_rate"], "--", color=ink, linewidth=1.2, label=f"{row}: virtual"
            )
    left.axhline(runs.record["watch"]["uniform"], linestyle=":", color=colors.RAMP_LIGHT[-1], linewidth=1)
    _framed(left, "Mean α₁")
    _framed(right, f"Sink rate, % of heads × samples (ε = {runs.epsilon:g})")
    return made


def _framed(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("Step")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, frameon=False)


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the picture, or say whether the page is what the tables make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is out of date")
    given = parser.parse_args(arguments)
    made = page()
    if given.check:
        return int(not PICTURE.exists() or not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made)
    PAGE.write_text(made, encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    picture(Runs.load(FOLDER)).savefig(PICTURE, dpi=DOTS_PER_INCH, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
