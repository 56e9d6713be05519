"""docs/prescaling.md, from the tables that the experiment left in docs/results. No figure in it is typed.

    python -m experiments.prescale.page [--work DIR [--revision REV]] [--check]

With --work the tables are first made anew from the runs in that folder (see `experiments.prescale.run`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common import results_page
from experiments.common.comparison import paired
from experiments.common.markdown import collapsed, listed, pictures, table, wrapped
from experiments.common.results_page import DASH, counted, p_value
from experiments.common.runs import FOLDER, PICTURES
from experiments.common.verdicts import FEWEST, NEAR, starred, told
from experiments.prescale.findings import Finding, findings, published
from experiments.prescale.tables import Tables

PAGE = Path("docs") / "prescaling.md"
STATISTICS = {
    "over_smoothing": ("Over-smoothing", 3),
    "sink_deviation": ("Sink deviation", 3),
    "common_sink_ratio": ("Common-sink ratio, %", 1),
}
"""The diagnostics that are told by layer: title, and digits."""
WHOLE = {
    **STATISTICS,
    "sink_deviation_top5": ("Sink deviation, five sinks", 3),
    "spectral_bound": ("Spectral bound", 1),
}
"""Those that are told of all layers."""
BY_LAYER = ("finetune", "prescale")
CAPTIONS = {
    "prescale-layers.svg": "Sink deviation and common-sink ratio by layer, before and after a task (means over tasks "
    "and seeds), of fine-tuning and of pre-scaling.",
    "prescale-degrees.svg": "Average outer degree of the strongest column of each head, by layer, before and after a "
    "task: one run each on the documentation of Python's standard library.",
    "prescale-smoothing.svg": "Over-smoothing before and after a task, means over tasks and seeds; bars of error are "
    "95 % intervals over seeds.",
    "prescale-scales.svg": "How a pre-scaling head weighs the tokens of three texts for the two classes of their task, "
    "after the last task. The texts are from the documentation of Python's standard library.",
    "prescale-tsne.svg": "t-SNE of the [CLS] states of test rows of all tasks after the last task: one run each on the "
    "documentation of Python's standard library.",
}
"""The pictures of `experiments.prescale.figures`, and what is to be seen in them."""

TEXT = """# Pre-scaling at the scale of a laptop

What *Does RoBERTa Perform Better than BERT in Continual Learning: An Attention Sink Perspective* (Bai et al. 2024,
arXiv 2410.05648) found with BERT-base, asked of a small encoder: `python -m experiments.prescale.run`. This page is
made from the tables in `docs/results` by `python -m experiments.prescale.page`; whether a finding holds is
decided from these numbers too, by the rules [below](#how-findings-are-decided).

{setting}

## Findings

{summary}

{verdicts}

{evidence}

## Scores

{columns}

{streams}

## Diagnostics

{diagnosed}

{whole}

{layers}

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
    made = TEXT.format(
        setting=wrapped(_setting(tables)),
        summary=wrapped(_summary(judged)),
        verdicts=_verdicts(tables, judged),
        evidence="\n\n".join(_evidence(stream, judged) for stream in tables.streams),
        columns=wrapped(_columns(tables)),
        streams="\n\n".join(_stream(tables, stream) for stream in tables.streams),
        diagnosed=wrapped(_diagnosed(tables)),
        whole="\n\n".join(_whole(tables, stream) for stream in tables.streams),
        layers="\n\n".join(_layers(tables, stream) for stream in tables.streams),
        pictures=pictures(drawn, CAPTIONS),
        missing=wrapped(_missing(tables)),
        rules=wrapped(RULES),
    )
    return collapsed(made)


# -- words -----------------------------------------------------------------------------------------------------------


def _setting(tables: Tables) -> str:
    record = tables.record
    budgets = {name: record["streams"][name]["budget"] for name in tables.streams}
    one = next(iter(budgets.values()))
    lengths = _by_value({name: str(budget["length"]) for name, budget in budgets.items()})
    dropped = {name: record["streams"][name]["most_rows_dropped"] for name in tables.streams}
    versions = record["versions"]
    named = listed(sorted({f"torch {each['torch']}, transformers {each['transformers']}" for each in versions}))
    revision = f" Revision {record['revision']}." if record["revision"] else ""
    runs = tables.cost["run_seconds"]
    return (
        f"The model is `{record['model']}`. Each task has at most {record['train_rows_a_class']} training rows a class "
        f"and {record['test_rows_a_task']} test rows; texts have at most {lengths} tokens. Stages that train the head "
        f"alone: {one['num_probing_epochs']} epochs at {one['probing_learning_rate']:g}; stages that train all: "
        f"{one['num_epochs']} epochs at {one['learning_rate']:g}; batches of {one['batch_size']}, computing in "
        f"{one['precision']}. These are fewer rows and larger rates than the paper's, the same for all methods. "
        f"The seed draws the rows, the order of the tasks "
        f"and all that chance decides: {listed(map(str, record['seeds']))}. Splits are clean: rows of train and dev "
        f"that another split has, or that stand there twice, were dropped before any were drawn "
        f"({listed(f'{n} at the most on {name}' for name, n in dropped.items())}). All {len(tables.cost)} runs "
        f"together took {runs.sum() / 3600:.1f} hours on one core each. Regard {listed(record['regard'])}, "
        f"{named}.{revision}"
    )


def _by_value(values: Mapping[str, str]) -> str:
    """Values by name, said once where they are all the same."""
    distinct = set(values.values())
    return distinct.pop() if len(distinct) == 1 else listed(f"{value} ({name})" for name, value in values.items())


def _summary(judged: Sequence[Finding]) -> str:
    return (
        f"Of {len(judged)} findings, counted stream by stream: {counted(judged)}. Published numbers are of BERT-base "
        f"with many more rows: compared is the order, not the height."
    )


def _verdicts(tables: Tables, judged: Sequence[Finding]) -> str:
    """A table of the verdicts, a line a claim and a column a stream."""
    claims = list(dict.fromkeys(one.claim.said for one in judged))
    found = {(one.claim.said, one.stream): one.verdict for one in judged}
    lines = [[claim, *(f"*{found[claim, stream]}*" for stream in tables.streams)] for claim in claims]
    return table(["finding", *tables.streams], lines)


def _evidence(stream: str, judged: Sequence[Finding]) -> str:
    items = [results_page.finding(one) for one in judged if one.stream == stream]
    return f"### Numbers on {stream}\n\n" + "\n".join(items)


def _columns(tables: Tables) -> str:
    return (
        "Means over seeds ± half the 95 % interval (Student's t); no ± means one seed, of which no interval can be "
        "told. *AP*: mean accuracy over tasks after the last, each text among the classes of its own task; *FGT*: "
        "how much of it was lost since each task was learnt; *learning*: mean accuracy of each task just after it "
        "was learnt; *CIL AP*: mean accuracy among the classes of all tasks. *s*: seconds of training a run, taken "
        "beside other work on the same machine; *TFLOP*: what was computed in training, of `agem` without "
        "its reference gradients and of `mbpa++` without its adapting before answers, which were not counted then. "
        "*paper*: published numbers, "
        "ACC / FGT and CIL, with BERT-base. Points of per cent throughout. *To finetune* and *to joint*: differences "
        "seed by seed; \\*: the interval leaves 0 out; *p*: of the paired t-test, corrected for the number of rows "
        "(Holm)."
    )


RULES = (
    f"A score, or a diagnostic, is higher or lower where the 95 % interval of the differences seed by seed leaves out "
    f"0 and there are at least {FEWEST} seeds; otherwise it is open, which is no proof that the two are the same. Two "
    f"methods are near where that interval lies within ±{NEAR:g} point, and are not where it lies wholly outside. "
    f"Whether the intervals of two means overlap is told beside it; that they do does not make a difference seed by "
    f"seed any less sure. A finding of several parts *holds* where all are true, *in part* where some are; it is "
    f"*against* where none is true and at least one false, and *cannot be told* where all are open. Intervals and "
    f"findings are not corrected for their number; the p in the tables are."
)


def _diagnosed(tables: Tables) -> str:
    return (
        f"Taken before and after each task on {tables.record['diagnosed_rows_a_task']} of its training rows, of the "
        f"rows {listed(f'`{row}`' for row in tables.record['looked_at'])}. Before the first task the model is as it "
        f"was pretrained. *Over-smoothing*: mean cosine of two different tokens' states; *sink deviation*: Δ of the "
        f"strongest column of each head, or of the five strongest; *common-sink ratio*: share of the strongest columns "
        f"that are special tokens or punctuation. Differences to `finetune` are seed by seed, after a task."
    )


def _missing(tables: Tables) -> str:
    """Rows without runs, with fewer seeds, and what the paper has and nobody ran."""
    seeds, said = len(tables.record["seeds"]), []
    for stream in tables.streams:
        absent = [row for row in tables.record["rows"] if row not in tables.rows(stream)]
        few = [(row, tables.n(stream, row)) for row in tables.rows(stream) if tables.n(stream, row) < seeds]
        if absent:
            said.append(f"On {stream}, without any run: {listed(f'`{row}`' for row in absent)}.")
        if few:
            said.append(f"On {stream}, with fewer than {seeds} seeds: {listed(f'`{row}` ({n})' for row, n in few)}.")
    if not said:
        said.append(f"Every row has its {seeds} seeds on {listed(tables.streams)}.")
    return " ".join(said) + " Of the paper, Yahoo Split and RoBERTa were not run, nor anything at its own scale."


# -- tables ----------------------------------------------------------------------------------------------------------


def _stream(tables: Tables, stream: str) -> str:
    record = tables.record["streams"][stream]
    tasks = listed(f"{task} ({len(record['classes'][task])})" for task in record["tasks"])
    said = f"{len(record['tasks'])} tasks, with how many classes: {tasks}. Published: {record['published']}."
    return "\n\n".join([f"### {stream}", wrapped(said), _scores(tables, stream), _differences(tables, stream)])


def _scores(tables: Tables, stream: str) -> str:
    head = ("row", "seeds", "AP", "FGT", "learning", "CIL AP", "s", "TFLOP", "paper", "paper CIL")
    return table(head, [_cells(tables, stream, row) for row in tables.rows(stream)])


def _cells(tables: Tables, stream: str, row: str) -> tuple[str, ...]:
    cost = tables.cost[(tables.cost["stream"] == stream) & (tables.cost["row"] == row)]
    scores = [
        told(tables.mean(stream, row, name), 1) for name in ("average_performance", "forgetting", "learning_accuracy")
    ]
    return (
        row,
        str(tables.n(stream, row)),
        *scores,
        told(tables.mean(stream, row, setting="cil"), 1),
        f"{cost['seconds'].mean():.0f}",
        f"{cost['flops'].mean() / 1e12:.1f}",
        _of_paper(published(stream, row, "average_performance"), published(stream, row, "forgetting")),
        _of_paper(published(stream, row, "cil")),
    )


def _of_paper(*numbers: float | None) -> str:
    return DASH if numbers[0] is None else " / ".join(DASH if n is None else f"{n:.2f}" for n in numbers)


def _differences(tables: Tables, stream: str) -> str:
    """All rows against fine-tuning and against all tasks at once."""
    held = [
        ("finetune", "average_performance", "AP"),
        ("finetune", "forgetting", "FGT"),
        ("joint", "average_performance", "AP"),
    ]
    found = [tables.against(stream, other, metric).set_index("method") for other, metric, _ in held]
    head = ["row", *(f"{title} to {other}{part}" for other, _, title in held for part in ("", ", p"))]
    lines = []
    for row in tables.rows(stream):
        pairs = [tables.difference(stream, row, other, metric) if row != other else None for other, metric, _ in held]
        cells = [(starred(pair), p_value(of, row)) for pair, of in zip(pairs, found, strict=True)]
        if any(pair is not None for pair in pairs):
            lines.append([row, *(cell for both in cells for cell in both)])
    return table(head, lines) if lines else "There is nothing to hold the rows against."


def _whole(tables: Tables, stream: str) -> str:
    """Statistics of all layers, before and after a task, and after it to fine-tuning."""
    lines = []
    for row in [row for row in tables.record["looked_at"] if row in tables.rows(stream)]:
        for statistic, (title, digits) in WHOLE.items():
            before, after = (tables.diagnosed(stream, row, statistic, when) for when in ("before", "after"))
            if not after:
                continue
            other = (
                paired(after, tables.diagnosed(stream, "finetune", statistic, "after")) if row != "finetune" else None
            )
            means = [f"{sum(each.values()) / len(each):.{digits}f}" for each in (before, after)]
            change = starred(paired(after, before), digits)
            lines.append([title, row, str(len(after)), *means, change, starred(other, digits)])
    lines.sort(key=lambda line: [title for title, _ in WHOLE.values()].index(line[0]))
    head = ("statistic", "row", "seeds", "before a task", "after it", "change", "to finetune")
    return f"### All layers, {stream}\n\n{table(head, lines)}" if lines else ""


def _layers(tables: Tables, stream: str) -> str:
    """Statistics by layer before and after the first and the last task."""
    rows = [row for row in BY_LAYER if row in tables.rows(stream)]
    places = [(tasks, when) for tasks in ("first", "last") for when in ("before", "after")]
    lines, width = [], 0
    for statistic, (title, digits) in STATISTICS.items():
        for row in rows:
            for tasks, when in places:
                found = tables.layers(stream, row, statistic, tasks, when).dropna(subset="layer").sort_values("layer")
                if len(found):
                    width = max(width, len(found))
                    values = [f"{value:.{digits}f}" for value in found["mean"]]
                    lines.append([title, row, f"{when} the {tasks}", str(found["n"].iloc[0]), *values])
    head = ("statistic", "row", "task", "seeds", *(f"layer {number}" for number in range(width)))
    return f"### By layer, {stream}\n\n{table(head, lines)}" if lines else ""


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is what the tables make."""
    return results_page.command(
        arguments, __doc__, PAGE, lambda work, revision: Tables.gather(work, revision).save(), page
    )


if __name__ == "__main__":
    sys.exit(main())
