"""Tables and text of docs/prescaling.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.claims import DASH, NOT_RUN, Verdict, format_difference, format_interval
from experiments.common.comparison import ACCURACY, format_p_value, paired, where
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table, check_runs, count_verdicts, join_words
from experiments.prescale.claims import CLAIMS, published
from experiments.prescale.figures import make_figures, read_data
from experiments.prescale.tables import Tables

STATISTICS = {
    "over_smoothing": ("Over-smoothing", 3),
    "sink_deviation": ("Sink deviation", 3),
    "common_sink_ratio": ("Common-sink ratio, %", 1),
}
"""Diagnostics by layer: title and digits."""
ALL_LAYERS = {
    **STATISTICS,
    "sink_deviation_top5": ("Sink deviation, five sinks", 3),
    "spectral_bound": ("Spectral bound", 1),
}
"""Diagnostics of all layers together."""
SHOWN = ("finetune", "probe-finetune", "prescale", "prescale uniform", "replay", "idbr", "l2p", "separate", "joint")
"""Rows of the table on the page."""


def make_page(tables: Tables, verdicts: Sequence[Verdict]) -> Page:
    """Return the page of the experiment."""
    figures = make_figures(tables, read_data())
    files = [
        ("prescale-matrix.csv", "all accuracies, run by run"),
        ("prescale-cost.csv", "time, FLOPs and memory, run by run"),
        ("prescale-diagnostics-seeds.csv", "diagnostics of all layers, run by run"),
    ]
    smoothing = next(figure for figure in figures if figure.name == "prescale-smoothing")
    return Page(
        "prescaling",
        "Pre-scaling on MiniLM",
        [
            "*Does RoBERTa Perform Better than BERT in Continual Learning* (Bai et al. 2024, arXiv 2410.05648) used "
            "BERT-base and RoBERTa-base; this is a small encoder: `python -m experiments.prescale.run STREAM --data "
            "DIR`.",
            main_table(tables),
            smoothing,
            "Accuracy after the last task (ACC, among the classes of a text's own task) and forgetting (FGT), means "
            "over seeds ± half the 95 % interval (Student's t).",
            "## Verdicts",
            f"Counted stream by stream: {count_verdicts([one for one in verdicts if one.claim.judge])}. Each claim "
            "with its verdicts, published numbers and the rules are in [claims.md](claims.md).",
            "## What follows",
            describe_results(tables),
            "## Settings and cost",
            describe_settings(tables),
            "## Diagnostics",
            f"Taken before and after each task on {tables.record['diagnosed_rows_a_task']} of its training rows: mean "
            "cosine of two tokens' states (over-smoothing), Δ of the strongest columns of each head (sink deviation), "
            "share of the strongest columns on special tokens and punctuation (common-sink ratio).",
            "## Not run",
            describe_missing(tables),
        ],
        (
            score_table(tables),
            difference_table(tables),
            diagnostic_table(tables),
            layer_table(tables),
        ),
        figures,
        files,
    )


# -- text ------------------------------------------------------------------------------------------------------------


def describe_results(tables: Tables) -> str:
    """Return what the verdicts come to, in numbers."""
    sentences = []
    for stream in tables.streams:
        gains = [
            format_difference(tables.difference(stream, row, "finetune")) for row in ("probe-finetune", "prescale")
        ]
        between = format_difference(tables.difference(stream, "prescale", "probe-finetune"))
        sentences.append(f"{stream} {gains[0]} and {gains[1]}, pre-scaling to probing {between}")
    return (
        "Accuracy gained over fine-tuning by probing first and by pre-scaling (\\*: the interval excludes 0): "
        + "; ".join(sentences)
        + ". At this scale probing first brings the whole measurable gain; scaling, of whichever kind, adds none, and "
        "none that could be told [where accuracy has room to rise](room.md). "
        "Negative results: over-smoothing rises while pre-scaling learns a task, where the paper's falls, and the "
        "deviation of the five strongest sinks falls, where the paper's rises."
    )


def describe_settings(tables: Tables) -> str:
    """Return model, data, budget, seeds and versions."""
    record = tables.record
    streams = record["streams"]
    budget = next(iter(streams.values()))["budget"]
    lengths = join_words(f"{streams[name]['budget']['length']} ({name})" for name in tables.streams)
    dropped = join_words(f"{streams[name]['most_rows_dropped']} ({name})" for name in tables.streams)
    named = join_words(
        sorted({f"torch {one['torch']}, transformers {one['transformers']}" for one in record["versions"]})
    )
    revision = f" Revision {record['revision']}." if record["revision"] else ""
    return (
        f"`{record['model']}`; at most {record['train_rows_a_class']} training rows a class and "
        f"{record['test_rows_a_task']} test rows a task; texts of at most {lengths} tokens. Head alone: "
        f"{budget['num_probing_epochs']} epochs at {budget['probing_learning_rate']:g}; everything: "
        f"{budget['num_epochs']} epochs at {budget['learning_rate']:g}; batches of {budget['batch_size']}, "
        f"{budget['precision']}. That is fewer rows and larger rates than the paper's, the same for all methods. Seeds "
        f"{join_words(map(str, record['seeds']))} draw rows, task order and weights. Rows in two splits were dropped "
        f"first: at most {dropped}. {len(tables.cost)} runs took {tables.cost['run_seconds'].sum() / 3600:.1f} hours "
        f"on one core each. FLOPs were counted on four rows of the first batch, without the products of fused "
        f"attention; they leave out the reference gradients of `agem` and the adaptation of `mbpa++`. Regard "
        f"{join_words(record['regard'])}, {named}.{revision}"
    )


def describe_missing(tables: Tables) -> str:
    """Return which rows have no runs or too few, and what of the paper was not run."""
    seeds, sentences = len(tables.record["seeds"]), []
    for stream in tables.streams:
        absent = [f"`{row}`" for row in tables.record["rows"] if not tables.has_row(stream, row)]
        counts = {row: tables.num_runs(stream, row) for row in tables.rows(stream)}
        few = [f"`{row}` ({n})" for row, n in counts.items() if n < seeds]
        sentences += [f"On {stream}, without any run: {join_words(absent)}."] if absent else []
        sentences += [f"On {stream}, with fewer than {seeds} seeds: {join_words(few)}."] if few else []
    everything = [f"Every row has its {seeds} seeds on {join_words(tables.streams)}."]
    return " ".join(sentences or everything) + " Yahoo Split, RoBERTa and the paper's scale were not run."


# -- tables ----------------------------------------------------------------------------------------------------------


def main_table(tables: Tables) -> Table:
    """Accuracy and forgetting of the main rows on all streams."""
    missing = [f"{row} on {stream}" for row in SHOWN for stream in tables.streams if not tables.has_row(stream, row)]
    check_runs("prescaling.md", missing, tables.record.get("not_run", ()))
    lines = [
        [
            row,
            *(
                format_interval(tables.mean(stream, row, metric), 1) if tables.has_row(stream, row) else NOT_RUN
                for stream in tables.streams
                for metric in (ACCURACY, "forgetting")
            ),
        ]
        for row in SHOWN
    ]
    head = ("row", *(f"{stream} {name}" for stream in tables.streams for name in ("ACC", "FGT")))
    return Table("", "", head, lines)


def score_table(tables: Tables) -> Table:
    """Scores, costs and published numbers of all rows."""
    head = ("stream", "row", "seeds", "AP", "FGT", "learning", "CIL AP", "s", "TFLOP", "paper", "paper CIL")
    lines = [_score_cells(tables, stream, row) for stream in tables.streams for row in tables.rows(stream)]
    return Table("prescale-scores", "scores, cost and published numbers", head, lines)


def _score_cells(tables: Tables, stream: str, row: str) -> tuple[str, ...]:
    cost = where(tables.cost, stream=stream, row=row)
    metrics = (ACCURACY, "forgetting", "learning_accuracy")
    return (
        stream,
        row,
        str(tables.num_runs(stream, row)),
        *(format_interval(tables.mean(stream, row, metric), 1) for metric in metrics),
        format_interval(tables.mean(stream, row, scenario="cil"), 1),
        f"{cost['seconds'].mean():.0f}",
        f"{cost['flops'].mean() / 1e12:.1f}",
        _format_published(published(stream, row, ACCURACY), published(stream, row, "forgetting")),
        _format_published(published(stream, row, "cil")),
    )


def _format_published(*numbers: float | None) -> str:
    return DASH if numbers[0] is None else " / ".join(DASH if n is None else f"{n:.2f}" for n in numbers)


REFERENCES = [("finetune", ACCURACY, "AP"), ("finetune", "forgetting", "FGT"), ("joint", ACCURACY, "AP")]


def difference_table(tables: Tables) -> Table:
    """All rows against fine-tuning and against all tasks at once, with corrected p."""
    lines = [[stream, *line] for stream in tables.streams for line in _difference_lines(tables, stream)]
    titles = [f"{title} to {reference}{part}" for reference, _, title in REFERENCES for part in ("", ", p")]
    about = "paired differences with p of the t-test (Holm)"
    return Table("prescale-differences", about, ["stream", "row", *titles], lines)


def _difference_lines(tables: Tables, stream: str) -> list[list[str]]:
    tests = [tables.against(stream, reference, metric).set_index("method") for reference, metric, _ in REFERENCES]
    lines = []
    for row in tables.rows(stream):
        differences = [
            tables.difference(stream, row, reference, metric) if row != reference else None
            for reference, metric, _ in REFERENCES
        ]
        if any(difference is not None for difference in differences):
            pairs = zip(differences, tests, strict=True)
            lines.append(
                [row, *(cell for one, test in pairs for cell in (format_difference(one), format_p_value(test, row)))]
            )
    return lines


def diagnostic_table(tables: Tables) -> Table:
    """Diagnostics of all layers before and after a task, and after it against fine-tuning."""
    lines = []
    for stream in tables.streams:
        for statistic, (title, digits) in ALL_LAYERS.items():
            for row in tables.record["looked_at"]:
                if tables.diagnosed(stream, row, statistic, "after"):
                    lines.append([stream, title, row, *_diagnostic_cells(tables, stream, row, statistic, digits)])
    head = ("stream", "statistic", "row", "seeds", "before a task", "after it", "change", "to finetune")
    return Table("prescale-all-layers", "diagnostics of all layers, before and after a task", head, lines)


def _diagnostic_cells(tables: Tables, stream: str, row: str, statistic: str, digits: int) -> list[str]:
    before, after = (tables.diagnosed(stream, row, statistic, when) for when in ("before", "after"))
    reference: Mapping[int, float] = tables.diagnosed(stream, "finetune", statistic, "after")
    means = [f"{sum(values.values()) / len(values):.{digits}f}" for values in (before, after)]
    difference = paired(after, reference) if row != "finetune" else None
    change = format_difference(paired(after, before), digits)
    return [str(len(after)), *means, change, format_difference(difference, digits)]


def layer_table(tables: Tables) -> Table:
    """Diagnostics by layer, before and after the first and the last task, of fine-tuning and pre-scaling."""
    lines, num_layers = [], 0
    for stream in tables.streams:
        for statistic, (title, digits) in STATISTICS.items():
            for row in ("finetune", "prescale"):
                for task, when in ((task, when) for task in ("first", "last") for when in ("before", "after")):
                    layers = tables.layers(stream, row, statistic, task, when).dropna(subset="layer")
                    layers = layers.sort_values("layer")
                    if len(layers):
                        num_layers = max(num_layers, len(layers))
                        values = [f"{value:.{digits}f}" for value in layers["mean"]]
                        lines.append([stream, title, row, f"{when} the {task}", str(layers["n"].iloc[0]), *values])
    head = ("stream", "statistic", "row", "task", "seeds", *(f"layer {number}" for number in range(num_layers)))
    return Table("prescale-layers", "diagnostics by layer, before and after the first and last task", head, lines)


def gather(work: Path, revision: str | None, folder: Path) -> None:
    """Make the stored tables anew from the runs in a folder."""
    Tables.gather(work, revision).save(folder)


PAPER = Paper(
    "prescale",
    "Does RoBERTa Perform Better than BERT in Continual Learning (Bai et al. 2024, arXiv 2410.05648)",
    "python -m experiments.prescale.run STREAM --data DIR",
    CLAIMS,
    Tables.load,
    make_page,
    gather,
)
