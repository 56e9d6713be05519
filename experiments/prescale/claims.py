"""Claims of pre-scaling (Bai et al. 2024, arXiv 2410.05648), judged stream by stream."""

from collections.abc import Callable, Mapping

from experiments.common.claims import (
    MARGIN,
    Claim,
    Judgment,
    above,
    below,
    describe_difference,
    describe_means,
    near,
)
from experiments.common.comparison import ACCURACY, paired
from experiments.prescale.tables import Tables

Judge = Callable[[Tables, str], Judgment]

# -- published -------------------------------------------------------------------------------------------------------

PUBLISHED: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "db-split": {
        "finetune": {"average_performance": 66.22, "forgetting": 39.15, "cil": 15.90},
        "probe": {"average_performance": 99.30},
        "probe-finetune": {"average_performance": 98.47, "forgetting": 1.64, "cil": 72.41},
        "prescale": {"average_performance": 99.74, "forgetting": 0.13, "cil": 70.38},
        "separate": {"average_performance": 99.87},
        "joint": {"average_performance": 99.88},
        "replay": {"average_performance": 91.05, "forgetting": 10.20},
        "agem": {"average_performance": 94.71, "forgetting": 5.98},
        "mbpa++": {"average_performance": 97.17, "forgetting": 3.09},
        "idbr": {"average_performance": 99.84, "forgetting": 0.04},
        "idbr without replay": {"average_performance": 96.47, "forgetting": 3.95},
        "l2p": {"average_performance": 99.63, "forgetting": 0.29},
        "ctr": {"average_performance": 99.04, "forgetting": 0.29},
    },
    "news-series": {
        "finetune": {"average_performance": 68.98, "forgetting": 17.13},
        "probe": {"average_performance": 74.81},
        "probe-finetune": {"average_performance": 77.09, "forgetting": 8.16},
        "prescale": {"average_performance": 79.76, "forgetting": 4.40},
        "prescale uniform": {"average_performance": 78.98},
        "prescale sink": {"average_performance": 76.08},
        "separate": {"average_performance": 83.72},
        "joint": {"average_performance": 82.04},
        "replay": {"average_performance": 75.47, "forgetting": 7.81},
        "agem": {"average_performance": 75.90, "forgetting": 6.60},
        "mbpa++": {"average_performance": 72.55, "forgetting": 9.64},
        "idbr": {"average_performance": 76.90, "forgetting": 3.24},
        "idbr without replay": {"average_performance": 72.36, "forgetting": 8.67},
        "l2p": {"average_performance": 73.99, "forgetting": 3.43},
        "ctr": {"average_performance": 75.12, "forgetting": 3.40},
    },
}
"""Published accuracy, forgetting and CIL accuracy in per cent, by stream and row; BERT-base where models differ."""


def published(stream: str, row: str, measure: str) -> float | None:
    """Return a published number; None if the paper has none."""
    return PUBLISHED.get(stream, {}).get(row, {}).get(measure)


def _published(row: str, reference: str, measure: str = ACCURACY) -> str:
    """Return the published numbers of two rows on all streams that have both."""
    names = {"db-split": "DB", "news-series": "News"}
    pairs = {stream: (published(stream, reference, measure), published(stream, row, measure)) for stream in PUBLISHED}
    return "; ".join(
        f"{names[stream]}: {reference} {old:.2f}, {row} {new:.2f}"
        for stream, (old, new) in pairs.items()
        if old is not None and new is not None
    )


# -- judges ----------------------------------------------------------------------------------------------------------


def compare(row: str, reference: str, decide: Callable[..., bool | None], metric: str = ACCURACY) -> Judge:
    """Return the judge of the difference in a metric between two rows; the metric "cil" is accuracy in CIL."""
    key = (ACCURACY, "cil") if metric == "cil" else (metric, "til")

    def judge(tables: Tables, stream: str) -> Judgment:
        difference = tables.difference(stream, row, reference, *key)
        means = describe_means((row, tables.mean(stream, row, *key)), (reference, tables.mean(stream, reference, *key)))
        return [decide(difference)], [means, describe_difference(difference)]

    return judge


def above_rows(row: str, *references: str) -> Judge:
    """Return the judge of whether a row has a higher accuracy than each of others."""

    def judge(tables: Tables, stream: str) -> Judgment:
        differences = {name: tables.difference(stream, row, name) for name in references}
        sentences = [f"To `{name}`: {describe_difference(one).lower()}" for name, one in differences.items()]
        return [above(one) for one in differences.values()], sentences

    return judge


def diagnostic_differs(statistic: str, *others: str, higher: bool) -> Judge:
    """Return the judge of whether a statistic after a task is higher (or lower) than with other rows."""

    def judge(tables: Tables, stream: str) -> Judgment:
        values = tables.diagnosed(stream, "prescale", statistic, "after")
        differences = {row: paired(values, tables.diagnosed(stream, row, statistic, "after")) for row in others}
        decide = above if higher else below
        sentences = [f"To `{row}`: {describe_difference(one, 3).lower()}" for row, one in differences.items()]
        return [decide(one) for one in differences.values()], sentences

    return judge


def diagnostic_changes(statistic: str, *, rises: bool) -> Judge:
    """Return the judge of whether a statistic rises (or falls) while pre-scaling learns a task."""

    def judge(tables: Tables, stream: str) -> Judgment:
        after, before = (tables.diagnosed(stream, "prescale", statistic, when) for when in ("after", "before"))
        change = paired(after, before)
        return [above(change) if rises else below(change)], [describe_difference(change, 3)]

    return judge


# -- claims ----------------------------------------------------------------------------------------------------------


def _higher(source: str, text: str, row: str, reference: str, metric: str = ACCURACY) -> Claim[Tables]:
    judge = compare(row, reference, above, metric)
    return Claim(source, text, judge, (row, reference), _published(row, reference, metric))


def _forgets_less(name: str, reference: str) -> Claim[Tables]:
    judge = compare("prescale", reference, below, "forgetting")
    text = f"Pre-scaling forgets less (FGT) than {name}."
    return Claim("ACC / FGT", text, judge, ("prescale", reference), _published("prescale", reference, "forgetting"))


def _diagnostic(name: str, statistic: str, *, rises: bool) -> tuple[Claim[Tables], Claim[Tables]]:
    others = ("finetune", "probe-finetune")
    side, verb = ("higher", "rises") if rises else ("lower", "falls")
    return (
        Claim(
            "Diagnostics",
            f"{name} is {side} with pre-scaling than with fine-tuning, with or without probing.",
            diagnostic_differs(statistic, *others, higher=rises),
            ("prescale", *others),
        ),
        Claim(
            "Diagnostics",
            f"{name} {verb} while pre-scaling learns a task.",
            diagnostic_changes(statistic, rises=rises),
            ("prescale",),
        ),
    )


RIVALS = ("replay", "agem", "mbpa++", "idbr without replay", "l2p", "ctr")
FULL_SIZE = "Needs BERT-base and RoBERTa-base, which were not at hand."
CLAIMS: tuple[Claim[Tables], ...] = (
    _higher("ACC / FGT", "Fine-tuning scores below probing then fine-tuning.", "probe-finetune", "finetune"),
    _higher("ACC / FGT", "Probing then fine-tuning scores below pre-scaling.", "prescale", "probe-finetune"),
    _higher("ACC / FGT", "Fine-tuning scores below pre-scaling.", "prescale", "finetune"),
    Claim(
        "ACC / FGT",
        f"Pre-scaling is near learning all tasks at once, within ±{MARGIN:g} point.",
        compare("prescale", "joint", near),
        ("prescale", "joint"),
        _published("prescale", "joint"),
    ),
    _forgets_less("fine-tuning", "finetune"),
    _forgets_less("probing then fine-tuning", "probe-finetune"),
    Claim(
        "ACC / FGT, other methods",
        f"Pre-scaling scores above {', '.join(RIVALS[:-1])} and {RIVALS[-1]}.",
        above_rows("prescale", *RIVALS),
        ("prescale", *RIVALS),
        "DB 99.74 against 91.05 to 99.63; News 79.76 against 72.36 to 75.90",
    ),
    _higher("Table 3, scaling", "Full scaling scores above uniform scaling.", "prescale", "prescale uniform"),
    _higher("Table 3, scaling", "Full scaling scores above scaling sinks alone.", "prescale", "prescale sink"),
    _higher("CIL", "In CIL, fine-tuning scores below pre-scaling.", "prescale", "finetune", "cil"),
    _higher("CIL", "In CIL, pre-scaling scores below probing then fine-tuning.", "probe-finetune", "prescale", "cil"),
    *_diagnostic("Over-smoothing", "over_smoothing", rises=False),
    *_diagnostic("Sink deviation (the strongest sink)", "sink_deviation", rises=True),
    *_diagnostic("Sink deviation (the five strongest)", "sink_deviation_top5", rises=True),
    Claim("Scaling maps", "Weights of the head on the tokens of single texts.", figure="prescale-scales"),
    Claim("t-SNE", "States of all tasks after the last one.", figure="prescale-tsne"),
    Claim("Outer degrees", "Average outer degree of sinks by layer.", figure="prescale-degrees"),
    Claim(
        "ACC / FGT, models",
        "RoBERTa gains more from pre-scaling than BERT and ends above it.",
        published="News: BERT 68.98 to 79.76, RoBERTa 70.61 to 81.59",
        reason=FULL_SIZE,
    ),
    Claim(
        "ACC / FGT, Yahoo Split",
        "The same order of methods on Yahoo Split.",
        published="BERT: 86.19, 90.24, 90.92",
        reason="The data were not at hand.",
    ),
    Claim(
        "Interference",
        "Sinks on common tokens make the loss gradients of tasks interfere.",
        reason="The gradients of two tasks were not kept in these runs.",
    ),
)
