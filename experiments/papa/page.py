"""Tables, figure and text of docs/papa.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from experiments.common.claims import DASH, Verdict
from experiments.common.comparison import where
from experiments.common.figures import label_axes, new_figure
from experiments.common.papers import Paper
from experiments.common.parts import Figure, Page, Table, count_verdicts, item
from experiments.papa.claims import CLAIMS, DATA_FREE, NAMES, Tables
from experiments.papa.run import ELSEWHERE, OTHERS, SOURCES, TASKS
from regard.constants.patterns import BRIGHTER, NEIGHBORHOOD
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

METRICS = {"mcc": "MCC", "accuracy": "accuracy", "f1": "F1", "entity_f1": "entity F1", "token_f1": "token F1"}
BY_LAYER = ("first-layers", "last-layers")
FRACTIONS = {"all dynamic": 1.0, "1/2": 1 / 2, "1/8": 1 / 8, "1/16": 1 / 16, "none": 0.0}
PATTERNS = ("diagonal", "previous token", "next token", "special tokens", "broad")


def make_page(tables: Tables, verdicts: Sequence[Verdict]) -> Page:
    """Return the page of the experiment."""
    fractions, sources, forms = fraction_table(tables), source_table(tables), form_table(tables)
    figure = Figure(
        "papa-fractions",
        "Score relative to the untouched model, by the share of heads that stay dynamic; bars are 95 % intervals.",
        lambda: draw_fractions(tables),
    )
    record = next(iter(tables.records.values()))
    minutes = sum(one["cost"]["seconds"] for one in tables.records.values()) / 60
    return Page(
        "papa",
        "PAPA on MiniLM",
        [
            "What do tasks lose when heads give their average attention? *How Much Does Attention Actually Attend?* "
            "(Hassid et al. 2022, arXiv 2211.03495) tested BERT, RoBERTa and DeBERTa. Here the encoder has 72 heads: "
            "`python -m experiments.papa.run --data DIR`.",
            fractions,
            figure,
            "Average constants, heads selected by lambda, by the share that stays dynamic; means over three seeds ± "
            "half the 95 % interval (Student's t).",
            "## Verdicts",
            f"Tested claims: {count_verdicts([one for one in verdicts if one.claim.judge])}. Each with its verdict, "
            "published numbers and the rules are in [claims.md](claims.md). The rules were written after the runs.",
            "## Settings and cost",
            f"{record['model']['name']} (weights sha256 {record['model']['sha256'][:12]}…), torch "
            f"{record['versions']['torch']}, transformers {record['versions']['transformers']}. 1,000 to 1,600 "
            "training examples of 32 to 96 tokens a task; probes behind the frozen encoder, special tokens in fixed "
            f"positions. All runs took {minutes:.0f} minutes on a shared machine. A seed is one of the probe; gates "
            "and constants are trained once, so intervals leave out the variance of training them. Random orders are "
            "drawn for each seed.",
            "## Results",
            "\n".join(item(text(tables)) for text in (describe_drops, describe_sources, describe_orders)),
            "On NER and POS, where a label depends on neighbors, averages match attention, also those of another "
            "task, and every data-free source loses much. Hardly any head is needed, so orders do not differ.",
            "The three sentence tasks cannot test the paper here. MiniLM was trained for sentence similarity: its "
            "probe finds little of CoLA's grammar, on MRPC it does no better than the majority class, and SST-2 is "
            "decided by single words, so pruned heads score like averaged ones. Most intervals overlap.",
            sources.select(["task", "untouched", *DATA_FREE, "average", "elsewhere"]),
            "All heads constant; *elsewhere* takes the averages of another task.",
            "### Patterns",
            f"A head counts as diagonal if the brightest of the offsets −1, 0 and 1 has {BRIGHTER:g} times the mean "
            f"weight of the offsets 2 to {NEIGHBORHOOD} on both sides. Wider bands do not count, so the shares are "
            "not comparable with the paper's, which were counted by eye.",
            "### Other lengths",
            describe_lengths(tables),
            "### Cheaper forms",
            "Few diagonals, or a band with few columns, keep the score of the averages on NER; low rank, nearest in "
            "norm, does not. On SST-2 averages score no more than zeros, which tells nothing. The forms save little "
            "beyond what constant heads save, because C·V is a small part of a layer, and `replacing` has none of "
            "them. `python -m experiments.papa.structure`; time is in [benchmarks.md](benchmarks.md).",
            "## Not run",
            "Larger encoders, MNLI, masked language modeling and the paper's own scale.",
        ],
        (
            fractions,
            sources,
            order_table(tables),
            pattern_table(tables),
            length_table(tables),
            forms,
            setting_table(tables),
        ),
        (figure,),
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def _format(point: pd.Series) -> str:
    half = (point["ci_high"] - point["ci_low"]) / 2
    return f"{point['mean']:.3f}" if pd.isna(half) else f"{point['mean']:.3f} ± {half:.3f}"


def fraction_table(tables: Tables) -> Table:
    """Scores by the fraction of heads that stay dynamic."""
    rows = []
    for task in TASKS:
        cells = [_format(tables.point(task, fraction=fraction)) for fraction in FRACTIONS.values()]
        drop = where(tables.drops, task=task, dynamic_fraction=0.0, constants="average", rank_heads_by="lambda")["drop"]
        rows.append((NAMES[task], *cells, DASH if pd.isna(drop.iloc[0]) else f"{drop.iloc[0]:.1f} %"))
    head = ("task", *FRACTIONS, "relative drop")
    return Table("papa-fractions", "scores by fraction of dynamic heads", head, rows)


def source_table(tables: Tables) -> Table:
    """Scores with all heads constant, by the source of the constants."""
    rows = []
    for task in TASKS:
        names = (*SOURCES, "average", f"average of {ELSEWHERE[task]}")
        cells = [_format(tables.point(task, name)) for name in names]
        rows.append((NAMES[task], _format(tables.point(task, fraction=1.0)), *cells))
    head = ("task", "untouched", *SOURCES, "average", "elsewhere")
    return Table("papa-sources", "scores by source of the constants", head, rows)


def order_table(tables: Tables) -> Table:
    """Scores with half and an eighth of the heads dynamic, by the order that selects them."""
    rows = [
        (NAMES[task], name, *(_format(tables.point(task, fraction=FRACTIONS[name], order=order)) for order in ORDERS))
        for task in TASKS
        for name in ("1/2", "1/8")
    ]
    return Table("papa-orders", "scores by the order that selects dynamic heads", ("task", "dynamic", *ORDERS), rows)


ORDERS = ("lambda", *OTHERS)


def pattern_table(tables: Tables) -> Table:
    """Shares of heads with a diagonal or with most mass on special tokens, and the strongest pattern of each head."""
    rows = []
    for task, heads in tables.heads.items():
        shares = tables.records[task]["patterns"]
        counts = heads["pattern"].value_counts()
        both = (f"{100 * shares[name]:.0f} %" for name in ("has_diagonal", "on_special"))
        rows.append((NAMES[task], *both, *(int(counts.get(name, 0)) for name in PATTERNS)))
    head = ("task", "has a diagonal", "mostly on special tokens", *PATTERNS)
    return Table("papa-patterns", "heads by the pattern of their average", head, rows)


def length_table(tables: Tables) -> Table:
    """Errors of the last hidden states with averages of other lengths."""
    wide = tables.lengths.pivot_table(
        index=["length", "constants"], columns="against", values="relative_error", sort=False
    )
    rows = [
        (length, name, *(DASH if pd.isna(row.get(kind)) else f"{row[kind]:.3f}" for kind in ("untouched", "own")))
        for (length, name), row in wide.iterrows()
    ]
    head = ("tokens", "constants", "error against untouched", "error against own averages")
    return Table("papa-lengths", "errors with averages of other lengths", head, rows)


def form_table(tables: Tables) -> Table:
    """Scores of averages approximated by cheaper forms, with their errors and multiplications on the first task."""
    forms = tables.forms
    dense = where(forms, form="dense").groupby("task")["multiply_adds"].first()
    tasks, rows = list(dict.fromkeys(forms["task"])), []
    for (form, size), group in forms.groupby(["form", "size"], sort=False, dropna=False):
        scores = group.groupby("task")["score"].mean()
        first = group.iloc[0]
        cost = first["multiply_adds"] / dense[first["task"]]
        cells = (f"{scores[task]:.3f}" if task in scores else DASH for task in tasks)
        numbers = (DASH if pd.isna(value) else f"{value:.2f}" for value in (first["error"], cost))
        rows.append((form, "" if pd.isna(size) else f"{size:.0f}", *cells, *numbers))
    first_name = NAMES[tasks[0]]
    head = (
        "form",
        "size",
        *(NAMES[task] for task in tasks),
        f"error ({first_name})",
        f"multiplications ({first_name})",
    )
    return Table("papa-forms", "scores of cheaper forms of the averages", head, rows)


def setting_table(tables: Tables) -> Table:
    """Metric, data, length and cost of each task."""
    rows = []
    for task, record in tables.records.items():
        data, minutes = record["data"], f"{record['cost']['seconds'] / 60:.0f}"
        sizes = (data["train"], data["validation"], record["settings"]["length"])
        rows.append((NAMES[task], METRICS[data["metric"]], *sizes, minutes))
    head = ("task", "metric", "training", "validation", "tokens", "minutes, the machine shared")
    return Table("papa-settings", "metric, data, length and minutes of each task", head, rows)


# -- sentences -------------------------------------------------------------------------------------------------------


def describe_drops(tables: Tables) -> str:
    """Return the mean relative drops with all and half of the heads constant."""
    own = where(tables.drops, constants="average", rank_heads_by="lambda")
    none, half = (where(own, dynamic_fraction=fraction)["drop"] for fraction in (0.0, 0.5))
    return (
        f"All heads constant: scores drop by {none.mean():.1f} % on average ({none.min():.1f} to {none.max():.1f} %). "
        f"Half: {half.mean():.1f} % ({half.min():.1f} to {half.max():.1f} %)."
    )


def describe_sources(tables: Tables) -> str:
    """Return how averages compare with data-free sources, other tasks and trained constants."""
    tasks = list(dict.fromkeys(tables.points["task"]))

    def mean(task: str, constants: str) -> float:
        return float(tables.point(task, constants)["mean"])

    better = [task for task in tasks if all(mean(task, "average") > mean(task, name) for name in DATA_FREE)]
    gaps = [mean(task, f"average of {ELSEWHERE[task]}") - mean(task, "average") for task in tasks]
    trained = [mean(task, "average-init") - mean(task, "average") for task in tasks]
    return (
        f"Averages have a higher mean than every data-free source on {len(better)} of {len(tasks)} tasks. Averages of "
        f"another task: {sum(gaps) / len(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f}). Averages trained on "
        f"labels: {sum(trained) / len(trained):+.3f}."
    )


def describe_orders(tables: Tables) -> str:
    """Return how the orders of heads compare."""
    tasks = list(dict.fromkeys(tables.points["task"]))
    cases = [(task, fraction) for task in tasks for fraction in (1 / 2, 1 / 8)]
    means = {
        order: [float(tables.point(task, fraction=fraction, order=order)["mean"]) for task, fraction in cases]
        for order in ORDERS
    }
    wins = sum(all(means["lambda"][case] > means[other][case] for other in BY_LAYER) for case in range(len(cases)))
    averages = {order: sum(values) / len(values) for order, values in means.items()}
    ranked = sorted(averages, key=lambda order: -averages[order])
    return (
        f"Lambda is above both orders by layer in {wins} of {len(cases)} cases; mean over cases: "
        + ", ".join(f"{order} {averages[order]:.3f}" for order in ranked)
        + "."
    )


def describe_lengths(tables: Tables) -> str:
    """Return the errors of crops and fits beside those of constant attention itself."""
    own, untouched = (where(tables.lengths, against=kind) for kind in ("own", "untouched"))
    crops = own[own["constants"].str.startswith("crop")]["relative_error"]
    fits = own[own["constants"].str.startswith("fit")]["relative_error"]
    base = where(untouched, constants="own")["relative_error"]
    return (
        "Relative error of the last hidden states, all heads constant, windows of 16 to 128 tokens: averages of the "
        f"same length differ from the untouched model by {base.min():.2f} to {base.max():.2f}. Cropped averages of "
        f"longer inputs differ from them by {crops.min():.2f} to {crops.max():.2f}, averages of shorter inputs fitted "
        f"with `regard.constants.to_length` by {fits.min():.2f} to {fits.max():.2f}. "
        "`python -m experiments.papa.lengths`."
    )


# -- figure ----------------------------------------------------------------------------------------------------------


def draw_fractions(tables: Tables) -> Drawing:
    """Draw scores relative to the untouched model by the fraction of dynamic heads, one line a task."""
    drawing = new_figure(5.0, 2.8)
    axes = drawing.subplots()
    names = list(FRACTIONS)
    for task, color in zip(TASKS, colors.SERIES_LIGHT, strict=False):
        points = [tables.point(task, fraction=fraction) for fraction in FRACTIONS.values()]
        base = points[0]["mean"]
        means = [point["mean"] / base for point in points]
        halves = [(point["ci_high"] - point["ci_low"]) / 2 / base for point in points]
        axes.errorbar(names, means, halves, color=color, linewidth=1.3, capsize=2, elinewidth=0.7, label=NAMES[task])
    label_axes(axes, "Score, untouched = 1", "Heads that stay dynamic", ncols=2)
    return drawing


PAPER = Paper(
    "papa",
    "How Much Does Attention Actually Attend? (Hassid et al. 2022, arXiv 2211.03495)",
    "python -m experiments.papa.run --data DIR",
    CLAIMS,
    Tables.load,
    make_page,
)
