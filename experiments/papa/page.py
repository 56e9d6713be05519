"""Makes docs/papa.md from the tables that the experiments left in docs/results. No figure in it is typed.

python -m experiments.papa.page [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.markdown import table, wrapped
from experiments.papa.run import ELSEWHERE, FOLDER, OTHERS, SOURCES, TASKS
from regard.commands.replace.result import intervals, relative_drop
from regard.constants.patterns import BRIGHTER, NEIGHBOURHOOD

PAGE = Path("docs") / "papa.md"
NAMES = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "ner": "NER", "pos": "POS"}
METRICS = {"mcc": "MCC", "accuracy": "accuracy", "f1": "F1", "entity_f1": "entity F1", "token_f1": "token F1"}
DATA_FREE = ("identity", "toeplitz", "zeros")
BY_LAYER = ("first-layers", "last-layers")

TEXT = """# PAPA on MiniLM

What *How Much Does Attention Actually Attend?* (Hassid et al. 2022, arXiv 2211.03495) found on BERT, RoBERTa and
DeBERTa, asked of a model of 72 heads on a laptop: `python -m experiments.papa.run`. Probes behind the frozen
encoder, special tokens held in place; means over three seeds, ± half the 95 % interval (Student's t). A seed is one of
the probe: gates and constants are trained once, so the intervals leave out what another training of these would change
(random orders are drawn for each seed). This page is made from the tables in `docs/results` by
`python -m experiments.papa.page`.

{settings}

## How many heads need their attention

Average constants, the heads that stay dynamic chosen by lambda:

{fractions}

{fractions_said}

## Which constants

All heads constant. *elsewhere* takes the averages of another task:
{elsewhere}.

{sources}

{sources_said}

## Which heads

Average constants with half and an eighth of the heads dynamic, by the order that chooses them. `input-dependence` and
`output-norm` need no labels and no training; `first-layers` makes the first layers constant first.

{orders}

{orders_said}

## What to make of it

Where a word has to be told by its neighbours, NER and POS, the paper's findings hold and are sharper than in the paper:
averages serve as well as attention, also those of another task, and every data-free source loses much. There one head
is as good as another, since hardly any is needed, so that the orders cannot be told apart.

On the three tasks about whole sentences this encoder has too little to lose for a finding. It was trained for the
likeness of sentences, and with so few rows the probe finds little of CoLA's grammar in it; on MRPC it does no better
than calling every pair a paraphrase; and SST-2 is told by single words, so that pruned heads score like averaged ones.
Most differences between sources and between orders are inside the intervals there. Taken together the orders stand as
the paper has them, lambda first and its reverse last. To ask these tasks the paper's question takes a larger encoder
and all rows: `--scale paper`.

## What the averages look like

Shares of the 72 heads whose average has a diagonal band, and whose average puts most of its mass on the columns of
special tokens, and the strongest pattern of each head:

{patterns}

The paper counts about 90 % with a diagonal and about 40 % with most of their mass on special tokens, by eye and in
larger models. Our rule for a diagonal is that the brightest of the three offsets −1, 0 and 1 has, on average over the
rows, {brighter:g} times the weight of its neighbourhood, the offsets from 2 to {neighbourhood} on both sides. Wider
bands, of which there are many here, do not count.
{more}"""


def page(folder: Path = FOLDER) -> str:
    """The whole page, from the tables."""
    tasks = [task for task in TASKS if (folder / f"papa-{task}-scores.csv").exists()]
    scores = pd.concat([pd.read_csv(folder / f"papa-{task}-scores.csv") for task in tasks], ignore_index=True)
    heads = {task: pd.read_csv(folder / f"papa-{task}-heads.csv") for task in tasks}
    records = {task: json.loads((folder / f"papa-{task}.json").read_text(encoding="utf-8")) for task in tasks}
    points, drops = intervals(scores), relative_drop(scores)
    return TEXT.format(
        settings=_settings(records),
        fractions=_fractions(points, drops, tasks),
        fractions_said=_fractions_said(drops),
        elsewhere=", ".join(f"{NAMES[ELSEWHERE[task]]} for {NAMES[task]}" for task in tasks),
        sources=_sources(points, tasks),
        sources_said=_sources_said(points, tasks),
        orders=_orders(points, tasks),
        orders_said=_orders_said(points, tasks),
        patterns=_patterns(heads, records),
        brighter=BRIGHTER,
        neighbourhood=NEIGHBOURHOOD,
        more=_more(folder),
    )


def _settings(records: dict[str, Any]) -> str:
    rows = []
    for task, record in records.items():
        data, settings = record["data"], record["settings"]
        minutes = f"{record['cost']['seconds'] / 60:.0f}"
        metric = METRICS[data["metric"]]
        rows.append((NAMES[task], metric, data["train"], data["validation"], settings["length"], minutes))
    first = next(iter(records.values()))
    told = (
        f"{first['model']['name']} (weights sha256 {first['model']['sha256'][:12]}…), "
        f"torch {first['versions']['torch']}, transformers {first['versions']['transformers']}."
    )
    return (
        table(("task", "metric", "training", "validation", "tokens", "minutes, the machine shared"), rows)
        + f"\n\n{told}"
    )


def _at(points: pd.DataFrame, **equal: Any) -> pd.Series:
    for name, value in equal.items():
        points = points[points[name] == value]
    assert len(points) == 1, f"{len(points)} rows of {equal}"
    return points.iloc[0]


def _told(point: pd.Series) -> str:
    half = (point["ci_high"] - point["ci_low"]) / 2
    return f"{point['mean']:.3f}" if pd.isna(half) else f"{point['mean']:.3f} ± {half:.3f}"


def _fractions(points: pd.DataFrame, drops: pd.DataFrame, tasks: Sequence[str]) -> str:
    wanted = (1.0, 1 / 2, 1 / 8, 1 / 16, 0.0)
    rows = []
    for task in tasks:
        cells = [_told(_at(points, task=task, dynamic_fraction=f, **({} if f == 1 else _LAMBDA))) for f in wanted]
        lost = _at(drops, task=task, dynamic_fraction=0.0, **_LAMBDA)["drop"]
        rows.append((NAMES[task], *cells, "–" if pd.isna(lost) else f"{lost:.1f} %"))
    return table(("task", "all dynamic", "1/2", "1/8", "1/16", "none", "relative drop"), rows)


_LAMBDA = {"constants": "average", "rank_heads_by": "lambda"}


def _fractions_said(drops: pd.DataFrame) -> str:
    own = drops[(drops["constants"] == "average") & (drops["rank_heads_by"] == "lambda")]
    none, half = (own[own["dynamic_fraction"] == f]["drop"] for f in (0.0, 0.5))
    return wrapped(
        f"With all heads constant the score drops by {none.mean():.1f} % on average over the tasks (from "
        f"{none.min():.1f} to {none.max():.1f} %; the paper: 8 %, never above 20 %), with half of them by "
        f"{half.mean():.1f} % (from {half.min():.1f} to {half.max():.1f} %; the paper: next to nothing)."
    )


def _sources(points: pd.DataFrame, tasks: Sequence[str]) -> str:
    rows = []
    for task in tasks:
        names = (*SOURCES, "average", f"average of {ELSEWHERE[task]}")
        cells = [_told(_at(points, task=task, dynamic_fraction=0.0, **_LAMBDA | {"constants": name})) for name in names]
        rows.append((NAMES[task], _told(_at(points, task=task, dynamic_fraction=1.0)), *cells))
    return table(("task", "untouched", *SOURCES, "average", "elsewhere"), rows)


def _sources_said(points: pd.DataFrame, tasks: Sequence[str]) -> str:
    def mean(task: str, constants: str) -> float:
        return float(_at(points, task=task, constants=constants, rank_heads_by="lambda", dynamic_fraction=0.0)["mean"])

    beaten = {task: [name for name in DATA_FREE if mean(task, "average") <= mean(task, name)] for task in tasks}
    every = [task for task in tasks if not beaten[task]]
    lost = "; ".join(f"{NAMES[task]}: {', '.join(names)} no worse" for task, names in beaten.items() if names)
    gap = [mean(task, f"average of {ELSEWHERE[task]}") - mean(task, "average") for task in tasks]
    trained = [mean(task, "average-init") - mean(task, "average") for task in tasks]
    but = f" ({lost})" if lost else ""
    return wrapped(
        f"Averages beat every data-free source on {len(every)} of {len(tasks)} tasks{but}. "
        f"Averages of another task score {sum(gap) / len(gap):+.3f} against the task's own (from {min(gap):+.3f} to "
        f"{max(gap):+.3f}). Training the averages on labels changes the score by {sum(trained) / len(trained):+.3f}."
    )


def _orders(points: pd.DataFrame, tasks: Sequence[str]) -> str:
    rows = []
    for task in tasks:
        for fraction, name in ((1 / 2, "1/2"), (1 / 8, "1/8")):
            cells = [
                _told(_at(points, task=task, constants="average", rank_heads_by=select, dynamic_fraction=fraction))
                for select in ("lambda", *OTHERS)
            ]
            rows.append((NAMES[task], name, *cells))
    return table(("task", "dynamic", "lambda", *OTHERS), rows)


def _orders_said(points: pd.DataFrame, tasks: Sequence[str]) -> str:
    def mean(task: str, select: str, fraction: float) -> float:
        return float(
            _at(points, task=task, constants="average", rank_heads_by=select, dynamic_fraction=fraction)["mean"]
        )

    cases = [(task, fraction) for task in tasks for fraction in (1 / 2, 1 / 8)]
    averages = {
        select: sum(mean(*(task, select, fraction)) for task, fraction in cases) / len(cases)
        for select in ("lambda", *OTHERS)
    }
    wins = sum(all(mean(t, "lambda", f) > mean(t, other, f) for other in BY_LAYER) for t, f in cases)
    ranked = sorted(averages, key=lambda select: -averages[select])
    return wrapped(
        f"Lambda beats both orders by layer in {wins} of {len(cases)} cases. Mean over all cases: "
        + ", ".join(f"{select} {averages[select]:.3f}" for select in ranked)
        + "."
    )


def _patterns(heads: dict[str, pd.DataFrame], records: dict[str, Any]) -> str:
    names = ["diagonal", "previous token", "next token", "special tokens", "broad"]
    rows = []
    for task, found in heads.items():
        both = records[task]["patterns"]
        counts = found["pattern"].value_counts()
        shares = (f"{100 * both[name]:.0f} %" for name in ("has_diagonal", "on_special"))
        rows.append((NAMES[task], *shares, *(int(counts.get(name, 0)) for name in names)))
    return table(("task", "has a diagonal", "mostly on special tokens", *names), rows)


LENGTHS_TEXT = """
## Other lengths

All heads constant, natural layout, windows of whole sentences that fill the length; relative error of the last hidden
states against the untouched model's, and against those under averages taken at that very length
(`python -m experiments.papa.lengths`). Rows *own* are averages at the length itself, which a set of constants for
several lengths gives; a *crop* is what a shorter input gets anyway; a *fit* is `regard.constants.to_length` to a
longer one.

{table}
"""
STRUCTURE_TEXT = """
## Cheaper forms

What averages still score when they are approximated by forms that cost fewer multiplications
(`python -m experiments.papa.structure`), all heads constant, beside their relative error and their multiplications as
a share of the whole matrix's. What they save in time is in [benchmarks.md](benchmarks.md).

{table}

Few diagonals, or a band with few columns, keep what the averages give; low rank, nearest in norm, does not. The forms
that keep the score save little beyond what constant heads save already, because C·V is a small part of a layer: they
are not built into `replacing`.
"""


def _more(folder: Path) -> str:
    """Sections from the tables of further experiments."""
    parts = []
    if (folder / "lengths.csv").exists():
        parts.append(LENGTHS_TEXT.format(table=_lengths(pd.read_csv(folder / "lengths.csv"))))
    forms = {task: folder / f"structure-{task}.csv" for task in TASKS}
    found = [pd.read_csv(path) for path in forms.values() if path.exists()]
    if found:
        parts.append(STRUCTURE_TEXT.format(table=_forms(pd.concat(found, ignore_index=True))))
    return "".join(parts)


def _lengths(found: pd.DataFrame) -> str:
    wide = found.pivot_table(index=["length", "constants"], columns="against", values="relative_error", sort=False)
    rows = [
        (length, name, *("–" if pd.isna(row.get(kind)) else f"{row[kind]:.3f}" for kind in ("untouched", "own")))
        for (length, name), row in wide.iterrows()
    ]
    return table(("tokens", "constants", "error against untouched", "error against own averages"), rows)


def _forms(found: pd.DataFrame) -> str:
    rows = []
    dense = found[found["form"] == "dense"].groupby("task")["multiply_adds"].first()
    tasks = list(dict.fromkeys(found["task"]))
    for (form, size), group in found.groupby(["form", "size"], sort=False, dropna=False):
        scores = group.groupby("task")["score"].mean()
        first = group.iloc[0]
        cost = first["multiply_adds"] / dense[first["task"]]
        rows.append(
            (
                form,
                "" if pd.isna(size) else f"{size:.0f}",
                *(f"{scores[task]:.3f}" if task in scores else "–" for task in tasks),
                "–" if pd.isna(first["error"]) else f"{first['error']:.2f}",
                "–" if pd.isna(cost) else f"{cost:.2f}",
            )
        )
    return table(
        (
            "form",
            "size",
            *(NAMES[task] for task in tasks),
            f"error ({NAMES[tasks[0]]})",
            f"multiplications ({NAMES[tasks[0]]})",
        ),
        rows,
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is what the tables make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is out of date")
    given = parser.parse_args(arguments)
    made = page()
    if given.check:
        return int(PAGE.read_text(encoding="utf-8") != made)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
