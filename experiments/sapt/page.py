"""docs/sapt.md, from the tables that the experiment left in docs/results. No figure in it is typed.

    python -m experiments.sapt.page [--work DIR [--revision REV]] [--check]

With --work the tables are first made anew from the runs in that folder (see `experiments.sapt.run`), and from what
`experiments.sapt.analyses` left there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common import results_page
from experiments.common.comparison import where
from experiments.common.markdown import collapsed, listed, pictures, table, wrapped
from experiments.common.results_page import DASH, counted, p_value
from experiments.common.runs import FOLDER, PICTURES
from experiments.common.verdicts import FEWEST, NEAR, starred, told
from experiments.sapt.analyses_page import analyses
from experiments.sapt.findings import LLAMA, T5, Finding, findings
from experiments.sapt.run import rows_of
from experiments.sapt.tables import PUBLISHED, SAPT, SCORED, UNREFLECTED, Tables
from regard.continual.methods.replay_lora import ReplayLora

PAGE = Path("docs") / "sapt.md"
BY_TASK = (SAPT, UNREFLECTED, PUBLISHED)
"""The rows whose weights are told task by task."""
CAPTIONS = {
    "sapt-weights.svg": "Weights that the rows of each task (down) give to the block of each task (across), when the "
    "task had just been learnt and at the end of the first order, means over seeds. How far they drifted, KL in nats, "
    "is the mean over tasks.",
    "sapt-own.svg": "Weight of each task's own block, when it was learnt and at the end, means over seeds of the first "
    "order.",
    "sapt-curves.svg": "Average performance on the tasks that were learnt so far, by their number, among all labels "
    "seen; means over seeds of the first order.",
    "sapt-cost.svg": "Average performance at the end against seconds of training, one mark a row.",
    "sapt-fifty.svg": "Fifty tasks: weight of the own block, entropy of the weights, average performance and seconds a "
    "step, by the number of tasks.",
}
"""The pictures of `experiments.sapt.figures`, and what is to be seen in them."""

TEXT = """# SAPT at the scale of a laptop

What *SAPT: A Shared Attention Framework for Parameter-Efficient Continual Learning of Large Language Models* (Zhao et
al. 2024, arXiv 2401.08295) claims, asked of a small encoder, beside other methods: `python -m experiments.sapt.run`.
This page is made from the tables in `docs/results` by `python -m experiments.sapt.page`; whether a finding holds
is decided from these numbers too, by the rules [below](#how-findings-are-decided).

`sapt` is not SAPT as it is published. There nothing makes a new block's gate open; here the attention is first taught
to know the new task's rows, and the block begins as the one before it (`gate=open`, which is Regard's). The published
gate is in the rows `sapt, gate published` (with Regard's default of λ) and `sapt, gate published, λ 1`.

{setting}

## Findings

{summary}

{verdicts}

{evidence}

## Scores

{columns}

{scores}

{differences}

{orders}

## The gate

{about_gate}

{gate}

{tasks}

{analyses}

{pictures}

## What was not run

{missing}

## How findings are decided

{rules}
"""


def page(folder: Path = FOLDER, drawn: Path = PICTURES) -> str:
    """The whole page, from the tables."""
    tables = Tables.load(folder)
    judged = findings(tables)
    return collapsed(
        TEXT.format(
            setting=wrapped(_setting(tables)),
            summary=wrapped(_summary(judged)),
            verdicts=table(["finding", "verdict"], [[one.claim.said, f"*{one.verdict}*"] for one in judged]),
            evidence="\n".join(map(results_page.finding, judged)),
            columns=wrapped(COLUMNS),
            scores=_scores(tables),
            differences=_differences(tables),
            orders=_orders(tables),
            about_gate=wrapped(ABOUT_GATE.format(rows=tables.record["looked_at_rows_a_task"])),
            gate=_gate(tables),
            tasks=_by_task(tables),
            analyses=analyses(tables.analyses),
            pictures=pictures(drawn, CAPTIONS),
            missing=wrapped(_missing(tables)),
            rules=wrapped(RULES),
        )
    )


# -- words -----------------------------------------------------------------------------------------------------------


def _setting(tables: Tables) -> str:
    record, budget = tables.record, tables.record["budget"]
    orders = listed(f"order {name} ({', '.join(of['tasks'])})" for name, of in record["orders"].items())
    absent = sorted({task for of in record["orders"].values() for task in of["missing"]})
    without = f" Of the published tasks there is no data here for {listed(absent)}." if absent else ""
    versions = record["versions"]
    named = listed(sorted({f"torch {each['torch']}, transformers {each['transformers']}" for each in versions}))
    revision = f" The last of them with revision {record['revision']}." if record["revision"] else ""
    hours = tables.cost["run_seconds"].sum() / 3600
    return (
        f"The model is `{record['model']}`, its weights frozen, with the head that compares a text's state with those "
        f"of the labels' words: no task has a head of its own, and at test nobody says which task a text is of. The "
        f"tasks are those of `{record['stream']}`, each text behind its instruction, as published: {orders}.{without} "
        f"{_chance(tables)}A task has at most {record['train_rows_a_task']} training rows, classes alike, and at most "
        f"{record['test_rows_a_task']} test rows; texts have at most {budget['length']} tokens; blocks have rank "
        f"{record['lora']['rank']}; {budget['num_epochs']} epochs at {budget['learning_rate']:g} in batches of "
        f"{budget['batch_size']}, computing in {budget['precision']}. {_otherwise(record)}"
        f"The seed draws rows, batches and weights: "
        f"{listed(map(str, record['seeds']))}. All {len(tables.cost)} runs together took {hours:.1f} hours on one core "
        f"each, {hours / 2:.1f} on two. Regard {listed(record['regard'])}, {named}.{revision}"
    )


def _chance(tables: Tables) -> str:
    """What chance gives among the labels of each task, where these are known."""
    of = next(iter(tables.record["orders"].values()))
    counts = [len(of["classes"][task]) for task in of["tasks"] if task in of["classes"]]
    if len(counts) < len(of["tasks"]):
        return ""
    return (
        f"Among a task's own labels chance gives {sum(100 / count for count in counts) / len(counts):.1f} %; among all "
        f"labels a model that says one and the same of every text is right about some, for tasks share labels. "
    )


def _otherwise(record: Mapping[str, Any]) -> str:
    """What is not the same for all rows."""
    rows = record["rows"]
    by_rate: dict[float, list[str]] = {}
    for row, of in rows.items():
        if of["rate"] is not None:
            by_rate.setdefault(of["rate"], []).append(f"`{row}`")
    rates = "; ".join(f"{rate:g} for {listed(names)}" for rate, names in by_rate.items())
    said = f"Other rates: {rates}. " if rates else ""
    own = {row: of["settings"] for row, of in rows.items() if of["settings"] and row != SAPT and ", " not in row}
    told_of = "; ".join(
        f"`{row}` {', '.join(f'{name}={value}' for name, value in of.items())}" for row, of in own.items()
    )
    said += f"Settings other than by default: {told_of}. " if told_of else ""
    if "l2p" in rows:
        said += "`l2p` learns a task among its own classes alone, as in its authors' code, all others among all seen. "
    stored = rows.get(SAPT, {}).get("settings", {}).get("stored")
    if stored:
        said += (
            f"`{SAPT}` reflects on {stored} query vectors a task, where the paper keeps 2 % of its rows; `replay-lora` "
            f"keeps {ReplayLora().settings.memory} texts of all tasks together. The published gate's λ is of the mean "
            f"over tasks, not of their sum. "
        )
    return said


def _summary(judged: Sequence[Finding]) -> str:
    return (
        f"Of {len(judged)} findings: {counted(judged)}. Published numbers are of models with 770 million parameters "
        f"and more, and of many more rows: compared is the order, not the height."
    )


COLUMNS = (
    "Means over runs (a seed with an order) ± half the 95 % interval (Student's t); no ± means one run, of which no "
    "interval can be told. *AP*: mean accuracy over tasks after the last, each text among the labels of all tasks "
    "(no task id); *own AP*: among those of its own task; *F.Ra*: how much was lost since each task's best; *BWT*: "
    "change since each task was learnt; *learning*: mean accuracy of each task just after it was learnt; these three "
    "among all labels seen by then. *own learning*: the same among the labels of the task; *FWT*: that less the "
    "accuracy of a model for each task (`separate` with the same seed, in whichever order). *runs*: of both orders "
    "together; where there are fewer, not every seed of every order was run, and the table by order shows which they "
    "are. *s*: seconds of training a run and of what is done "
    "before and after each task's, the median, taken beside other work on the same machine; *TFLOP*: what was computed "
    "in the training steps alone; *kept*: what is stored for later tasks beside the model. "
    "*T5* and *LLaMA*: published AP with T5-large and with LLaMA-2-7B. Points of per cent throughout. *To sapt*: "
    "differences run by run; \\*: the interval leaves 0 out; *p*: of the paired t-test, corrected for the number of "
    "rows (Holm)."
)

ABOUT_GATE = (
    "Of the rows that have one attention over all blocks; weights are those of {rows} dev rows a task, scores of the "
    "test rows. *Own*: the weight of a task's own block, mean over tasks, and the least of any task, when each was "
    "learnt and at the end; *entropy* of a row's weights and *reflection*, their divergence from the mean that was "
    "kept, in nats; *drift*: KL of a task's mean weights at the end from those when it was learnt. Scores at the end "
    "among the labels of the own task: *routed* as the gate does, with the *own* block alone, and with *another* alone."
)

RULES = (
    f"A run is a seed with an order. A score is higher or lower where the 95 % interval of the differences run by run "
    f"leaves out 0 and there are at least {FEWEST} runs; otherwise it is open, which is no proof that the two are the "
    f"same. Two rows are near where that interval lies within ±{NEAR:g} point, and are not where it lies wholly "
    f"outside. A bound is kept where the whole interval is on its side, and is not where the whole interval is on the "
    f"other. A finding of several parts *holds* where all are true, *in part* where some are; it is *against* where "
    f"none is true and at least one false, and *cannot be told* where all are open. Performance and forgetting are "
    f"among all labels that were seen, where nothing else is said. Intervals and findings are not corrected for their "
    f"number; the p in the tables are."
)


def _missing(tables: Tables) -> str:
    """Rows without runs, and with fewer seeds than others."""
    seeds, said = len(tables.record["seeds"]), []
    for order in tables.orders:
        counts = where(tables.cost, order=order).groupby("row", sort=False)["seed"].nunique()
        absent = [row for row in tables.record["rows"] if row in rows_of(order) and row not in counts]
        few = [f"`{row}` ({n})" for row, n in counts.items() if n < seeds]
        if absent:
            said.append(f"Of order {order}, without any run: {listed(f'`{row}`' for row in absent)}.")
        if few:
            said.append(f"Of order {order}, with fewer than {seeds} seeds: {listed(few)}.")
    if not said:
        every = listed(f"order {order}" for order in tables.orders)
        said.append(f"Every row that is run in it has its {seeds} seeds in {every}.")
    if len(tables.orders) > 1:
        said.append(f"Variants of `sapt` are run in order {tables.orders[0]} alone: compare them by *to sapt*.")
    decoded = "decoder" in set(tables.analyses["analysis"])
    rest = ", and of its tasks from text to text those of the decoder alone." if decoded else NO_TEXTS
    written = "lfpt5" in set(where(tables.analyses, analysis="decoder")["case"])
    rest += f" `lfpt5` needs a model that writes{', and was run with the decoder' if written else ''}."
    standing = set(where(tables.analyses, analysis="standing")["case"])
    if standing and "generated" not in standing:
        rest += (
            " Texts that the decoder writes did not stand for tasks: trained for 600 steps it wrote none to be read."
        )
    return " ".join(said) + f" Nothing was run at the paper's own scale{rest}"


NO_TEXTS = ", nor its tasks from text to text."


# -- tables ----------------------------------------------------------------------------------------------------------

SCORES: Mapping[str, tuple[str, str]] = {
    "AP": ("average_performance", "cil"),
    "own AP": ("average_performance", "til"),
    "F.Ra": ("forgetting_rate", "cil"),
    "BWT": ("bwt", "cil"),
    "learning": ("learning_accuracy", "cil"),
    "own learning": ("learning_accuracy", "til"),
    "FWT": ("fwt", "til"),
}


def _scores(tables: Tables) -> str:
    stream = tables.whole
    head = ("row", "runs", *SCORES, "s", "TFLOP", "kept, MiB", "T5", "LLaMA")
    lines = []
    for row in tables.rows(stream):
        cost = where(tables.cost, row=row)
        means = [told(tables.mean(stream, row, metric, setting), 1) for metric, setting in SCORES.values()]
        paid = (f"{tables.seconds(row):.0f}", f"{cost['flops'].mean() / 1e12:.1f}", _mebibytes(cost["memory_bytes"]))
        published = [f"{of[row]:.1f}" if row in of else DASH for of in (T5, LLAMA)]
        lines.append([row, str(tables.n(stream, row)), *means, *paid, *published])
    return table(head, lines)


def _mebibytes(stored: Any) -> str:
    return f"{stored.mean() / 2**20:.2f}"


def _differences(tables: Tables) -> str:
    """All rows against SAPT."""
    stream = tables.whole
    asked = {name: SCORES[name] for name in ("AP", "F.Ra", "learning", "own learning")}
    if SAPT not in tables.rows(stream):
        return "There is no run of `sapt` to hold the rows against."
    p = {name: tables.against(stream, SAPT, *of).set_index("method") for name, of in asked.items()}
    lines = []
    for row in (row for row in tables.rows(stream) if row != SAPT):
        found = {name: tables.difference(stream, row, SAPT, *of) for name, of in asked.items()}
        if any(found.values()):
            lines.append(
                [row, *(cell for name, one in found.items() for cell in (starred(one), p_value(p[name], row)))]
            )
    head = ["row", *(f"{name} to sapt{part}" for name in asked for part in ("", ", p"))]
    return table(head, lines) if lines else "There is no other run to hold `sapt` against."


def _orders(tables: Tables) -> str:
    """AP and forgetting, order by order, where there are several."""
    streams = tables.streams[1:]
    if not streams:
        return ""
    head = ["row", *(f"{name}, {stream}" for stream in streams for name in ("AP", "F.Ra"))]
    lines = [
        [
            row,
            *(
                told(tables.mean(stream, row, metric), 1)
                for stream in streams
                for metric in ("average_performance", "forgetting_rate")
            ),
        ]
        for row in tables.rows(tables.whole)
    ]
    return table(head, lines)


def _gate(tables: Tables) -> str:
    head = (
        *("row", "own, learnt", "least", "own, end", "least", "entropy, learnt", "end", "reflection, end", "drift"),
        *("routed", "own block", "another"),
    )
    lines = []
    for row in tables.gated():
        own = [
            told(tables.of_gate(row, f"own_adapter_weight_{when}", over), 2)
            for when in ("learning", "end")
            for over in ("mean", "min")
        ]
        nats = ("entropy_learning", "entropy_end", "reflection_end", "drift")
        rest = [told(tables.of_gate(row, name), 2) for name in nats]
        lines.append([row, *own, *rest, *(told(tables.of_gate(row, name), 1) for name in SCORED)])
    return table(head, lines) if lines else "No run has a gate."


def _by_task(tables: Tables) -> str:
    """The weight of the own block in the first order, task by task, when learnt and at the end."""
    rows = [row for row in BY_TASK if row in tables.gated()]
    columns = [(row, when) for row in rows for when in ("learning", "end")]
    if not columns:
        return ""
    found = [tables.own_weights(row, when, tables.orders[0]) for row, when in columns]
    head = ["task", *(f"{row}, {'learnt' if when == 'learning' else 'end'}" for row, when in columns)]
    tasks = list(dict.fromkeys(task for one in found for task in one.index))
    lines = [[task, *(f"{one[task]:.2f}" if task in one.index else DASH for one in found)] for task in tasks]
    return f"### Own weight by task\n\nMeans over the seeds of order {tables.orders[0]}.\n\n{table(head, lines)}"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is what the tables make."""
    return results_page.command(
        arguments, __doc__, PAGE, lambda work, revision: Tables.gather(work, revision).save(), page
    )


if __name__ == "__main__":
    sys.exit(main())
