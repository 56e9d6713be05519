"""Claims of SAPT (arXiv 2401.08295), and those asked here, judged over all runs (a seed with an order)."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from experiments.common.claims import (
    MARGIN,
    OWN_SOURCE,
    Claim,
    Judgment,
    above,
    at_least,
    at_most,
    below,
    describe_difference,
    describe_means,
    format_interval,
    near,
    negate,
)
from experiments.common.comparison import ACCURACY, mean_of, paired, where
from experiments.sapt.run import ROWS
from experiments.sapt.tables import PUBLISHED, SAPT, UNREFLECTED, Tables
from regard.continual.metrics import Scenario

Judge = Callable[[Tables, str], Judgment]

TO_JOINT, FORGOTTEN, TO_SEPARATE, OPENED = 3.0, 2.0, 2.0, 0.5
"""Bounds of the claims: points below all tasks at once, points forgotten, points of learning accuracy below a model a
task, and the weight that each task gives to its own adapter."""
DENSITY = "sapt, density"
FEW, MANY = "sapt, 3 vectors a task", "replay-lora, 1400 texts"
"""SAPT with as few vectors as the paper, and replay with as many texts as SAPT keeps vectors."""
STRONGER = "sapt, gate published, λ 1"
UNALIGNED = "sapt, not aligned"
FROM_BEST, FROM_NOTHING = "sapt, begun at the best", "sapt, begun at nothing"
SEQUENTIAL, INCREMENTAL, REPLAY, OLORA, SLAO = "sequential-lora", "incremental-lora", "replay-lora", "o-lora", "slao"

T5: Mapping[str, float] = {SEQUENTIAL: 46.0, INCREMENTAL: 64.7, OLORA: 69.6, REPLAY: 75.2, "joint": 80.0, SAPT: 82.0}
LLAMA: Mapping[str, float] = {SEQUENTIAL: 68.7, OLORA: 73.5, SLAO: 74.8, "joint": 78.1, SAPT: 81.9}
"""Published average accuracy on Long Sequence in per cent, ascending: T5-large and LLaMA-2-7B."""


def baselines(tables: Tables, stream: str) -> list[str]:
    """Return the rows of other methods that are scored without a task id, without variants and `joint`."""
    scored = where(tables.scores, stream=stream, scenario="cil")["method"].unique()
    plain = [row for row in tables.rows(stream) if row in scored and row != "joint" and ", " not in row]
    return [row for row in plain if ROWS[row].method != "sapt"]


# -- judges ----------------------------------------------------------------------------------------------------------


def _common_means(tables: Tables, stream: str, row: str, other: str, metric: str = ACCURACY) -> str:
    """Describe the means of two rows over the runs that both have."""
    values, reference = (tables.by_run(stream, name, metric, "cil") for name in (row, other))
    runs = [run for run in values if run in reference]
    return describe_means(
        (row, mean_of({run: values[run] for run in runs})), (other, mean_of({run: reference[run] for run in runs}))
    )


def above_all(tables: Tables, stream: str) -> Judgment:
    """Judge whether SAPT's performance is above that of every method without a task id."""
    differences = {row: tables.difference(stream, SAPT, row) for row in baselines(tables, stream)}
    if not differences:
        return [None], ["No other method was run."]
    parts = [above(difference) for difference in differences.values()]
    cells = (f"`{row}` {format_interval(one, 1, signed=True)}" for row, one in differences.items())
    higher, lower = (sum(part is sign for part in parts) for sign in (True, False))
    tests = where(tables.differences, stream=stream, metric=ACCURACY, scenario="cil")
    corrected = tests[tests["method"].isin(differences)]["t_test_holm"]
    own = [above(tables.difference(stream, SAPT, row, ACCURACY, "til")) for row in differences]
    weak = [
        f"`{row}`" for row in differences if row != SEQUENTIAL and not above(tables.difference(stream, row, SEQUENTIAL))
    ]
    return parts, [
        f"SAPT {format_interval(tables.mean(stream, SAPT), 1)}. Less the other: {', '.join(cells)}.",
        f"Above 0 for {higher} of {len(parts)}, below for {lower}.",
        f"p (Holm, all rows) is below .05 for {int((corrected < 0.05).sum())}.",
        f"Among the labels of a text's own task above 0 for {sum(part is True for part in own)}.",
        f"Not above `{SEQUENTIAL}`: {', '.join(weak)}." if SEQUENTIAL in differences and weak else "",
    ]


def no_worse(other: str, points: float, metric: str, scenario: Scenario) -> Judge:
    """Return the judge of whether a metric of SAPT is at most so many points below that of another row."""

    def judge(tables: Tables, stream: str) -> Judgment:
        values, reference = (tables.by_run(stream, row, metric, scenario) for row in (SAPT, other))
        difference = paired(values, reference)
        means = describe_means((SAPT, mean_of(values)), (other, mean_of(reference)))
        return [at_least(difference, -points)], [means, describe_difference(difference)]

    return judge


def forgets_little(tables: Tables, stream: str) -> Judgment:
    """Judge whether SAPT's forgetting is at most the bound."""
    cil, til = (tables.mean(stream, SAPT, "forgetting_rate", scenario) for scenario in ("cil", "til"))
    text = f"F.Ra {format_interval(cil, 1)}; among the labels of a text's own task {format_interval(til, 1)}."
    return [at_most(cil, FORGOTTEN)], [text]


WHEN_NAMES = {"learning": "when learnt", "end": "at the end"}


def opens(tables: Tables, _: str) -> Judgment:
    """Judge whether the lowest weight of a task's own adapter is at least the bound, when learnt and at the end."""
    parts, sentences = [], []
    for when, name in WHEN_NAMES.items():
        lowest = tables.of_gate(SAPT, f"own_adapter_weight_{when}", "min")
        parts.append(at_least(lowest, OPENED))
        sentences.append(f"Lowest of any task {name}: {format_interval(lowest, 2)}, {_lowest(tables, when)}.")
    return parts, sentences


def _lowest(tables: Tables, when: str) -> str:
    weights = tables.own_weights(SAPT, when)
    if weights.empty or weights.isna().all():
        return "no weights"
    return f"mean {weights.mean():.2f}, lowest for {weights.idxmin()}"


def closes(tables: Tables, _: str) -> Judgment:
    """Judge whether the published gate gives tasks' own adapters less than the bound on average."""
    parts, sentences = [], []
    for when, name in WHEN_NAMES.items():
        column = f"own_adapter_weight_{when}"
        published, ours = tables.of_gate(PUBLISHED, column), tables.of_gate(SAPT, column, beside=PUBLISHED)
        parts.append(negate(at_least(published, OPENED)))
        sentences.append(f"{name}: {format_interval(published, 2)}, `{SAPT}` {format_interval(ours, 2)}.")
    stronger = tables.of_gate(STRONGER, "own_adapter_weight_learning")
    return parts, [*sentences, f"With λ 1: {format_interval(stronger, 2)} when learnt." if stronger else ""]


def forgets_without(tables: Tables, stream: str) -> Judgment:
    """Judge whether SAPT without reflection forgets more and performs worse."""
    more = tables.difference(stream, UNREFLECTED, SAPT, "forgetting_rate")
    lower = tables.difference(stream, UNREFLECTED, SAPT)
    drifts = {row: tables.of_gate(row, "drift", beside=UNREFLECTED) for row in (UNREFLECTED, SAPT)}
    return [above(more), below(lower)], [
        f"F.Ra: {_common_means(tables, stream, UNREFLECTED, SAPT, 'forgetting_rate')}",
        describe_difference(more),
        f"AP: {_common_means(tables, stream, UNREFLECTED, SAPT)}",
        describe_difference(lower),
        f"Drift of the mean weights (KL, nats): "
        f"{', '.join(f'`{row}` {format_interval(drift, 2)}' for row, drift in drifts.items())}.",
    ]


def compare(row: str, other: str, decide: Callable[..., bool | None]) -> Judge:
    """Return the judge of the difference in performance between two rows."""

    def judge(tables: Tables, stream: str) -> Judgment:
        difference = tables.difference(stream, row, other)
        return [decide(difference)], [_common_means(tables, stream, row, other), describe_difference(difference)]

    return judge


def in_order(published: Mapping[str, float]) -> Judge:
    """Return the judge of whether each row is above the one before it, in the published order."""

    def judge(tables: Tables, stream: str) -> Judgment:
        rows = [row for row in published if tables.has_row(stream, row)]
        steps = [tables.difference(stream, row, before) for before, row in pairwise(rows)]
        means = ", ".join(f"`{row}` {format_interval(tables.mean(stream, row), 1)}" for row in rows)
        cells = ", ".join(format_interval(step, 1, signed=True) for step in steps)
        return [above(step) for step in steps] or [None], [f"{means}. Step by step: {cells}."]

    return judge


def analysis(name: str, cases: Mapping[str, str], measure: str = "average_performance cil") -> Judge:
    """Return the judge of an analysis that has too few runs to decide: it states the numbers of some cases."""

    def judge(tables: Tables, _: str) -> Judgment:
        rows = where(tables.analyses, analysis=name, measure=measure)
        if rows.empty:
            return [], []
        means = rows.groupby("case")["value"].mean()
        cells = (f"{title} {means[case]:.1f}" for case, title in cases.items() if case in means)
        return [None], [f"One seed: {', '.join(cells)}."]

    return judge


# -- claims ----------------------------------------------------------------------------------------------------------

ANALYSES = "python -m experiments.sapt.analyses {} --data DIR"
LONG = "Long Sequence"
FULL_SIZE = "Needs T5-large or LLaMA-2, which were not at hand."


def _list_published(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{row} {number:.1f}" for row, number in numbers.items())


def _analysis(source: str, text: str, name: str, judge: Judge) -> Claim[Tables]:
    return Claim(source, text, judge, command=ANALYSES.format(name))


CLAIMS: tuple[Claim[Tables], ...] = (
    Claim(
        LONG,
        "SAPT performs better at the end than every method that needs no task id.",
        above_all,
        (SAPT,),
        "T5-large 82.0 against 75.2 and less",
    ),
    Claim(
        LONG,
        "Methods come in the order published with T5-large.",
        in_order(T5),
        (SEQUENTIAL, SAPT),
        _list_published(T5),
    ),
    Claim(
        LONG,
        "Methods come in the order published with LLaMA-2-7B.",
        in_order(LLAMA),
        (SEQUENTIAL, SAPT),
        _list_published(LLAMA),
    ),
    Claim(
        LONG,
        f"SAPT is at most {TO_JOINT:g} points below learning all tasks at once.",
        no_worse("joint", TO_JOINT, ACCURACY, "cil"),
        (SAPT, "joint"),
        "T5-large 82.0 and 80.0",
    ),
    Claim(OWN_SOURCE, f"SAPT forgets at most {FORGOTTEN:g} points (F.Ra).", forgets_little, (SAPT,)),
    Claim(
        OWN_SOURCE,
        f"SAPT learns each task to at most {TO_SEPARATE:g} points below a model of its own.",
        no_worse("separate", TO_SEPARATE, "learning_accuracy", "til"),
        (SAPT, "separate"),
    ),
    Claim(
        OWN_SOURCE,
        f"The gate is open: each task gives its own adapter a weight of at least {OPENED:g}.",
        opens,
        (SAPT,),
    ),
    Claim(
        OWN_SOURCE,
        f"The published gate gives a task's own adapter less than {OPENED:g} on average.",
        closes,
        (SAPT, PUBLISHED),
    ),
    Claim(
        OWN_SOURCE,
        "With 3 vectors a task SAPT performs better than replay of 50 texts.",
        compare(FEW, REPLAY, above),
        (FEW, REPLAY),
    ),
    Claim(
        OWN_SOURCE,
        "SAPT performs better than replay of as many texts as it keeps vectors.",
        compare(SAPT, MANY, above),
        (SAPT, MANY),
    ),
    Claim("Ablation, ARM", "Without reflection SAPT forgets.", forgets_without, (SAPT, UNREFLECTED)),
    Claim(
        "Ablation, shared attention",
        "Adapters learnt under the weights that select them are better than adapters learnt alone.",
        compare(SAPT, UNALIGNED, above),
        (SAPT, UNALIGNED),
    ),
    Claim(
        "Ablation, pseudo samples",
        f"A density of query vectors is as good as real ones, within ±{MARGIN:g} point.",
        compare(DENSITY, SAPT, near),
        (SAPT, DENSITY),
    ),
    Claim(
        OWN_SOURCE,
        "An adapter that begins as the one before it learns better than one that begins as the best of them.",
        compare(SAPT, FROM_BEST, above),
        (SAPT, FROM_BEST),
    ),
    Claim(
        OWN_SOURCE,
        "An adapter that begins as the one before it learns better than one that begins at nothing.",
        compare(SAPT, FROM_NOTHING, above),
        (SAPT, FROM_NOTHING),
    ),
    Claim("Heat map", "Attention weights of each task's rows on each adapter.", figure="sapt-weights"),
    _analysis(
        "Pseudo samples, 2 to 100 %",
        "More samples of earlier tasks change the performance little.",
        "share",
        analysis("share", {f"real, {part}%": f"{part} %" for part in (2, 5, 10, 50, 100)}),
    ),
    _analysis(
        "Model sizes",
        "SAPT stays above sequential LoRA at every size.",
        "size",
        analysis("size", {f"{row}, {n} layers": f"{row} {n} layers" for n in (2, 4, 6) for row in (SAPT, SEQUENTIAL)}),
    ),
    _analysis(
        "Unseen tasks",
        "SAPT is better on unseen tasks than other methods.",
        "unseen",
        analysis("unseen", {row: row for row in ("base model", SAPT, SEQUENTIAL)}, "score"),
    ),
    _analysis(
        "SAPT-Prompt",
        "Soft prompts as adapters perform below low-rank adapters.",
        "prompts",
        analysis("prompts", {"low-rank": "low-rank", "prompts, rate ×20": "prompts, rate ×20"}),
    ),
    Claim(
        "Generated samples",
        "Texts written by the model stand in for real ones.",
        command=ANALYSES.format("standing"),
        reason="Trained for 600 steps instead of 5,000, the decoder wrote no readable texts.",
    ),
    Claim(
        "SuperNI",
        "SAPT has the highest AP and the least forgetting on 15 SuperNI tasks.",
        reason="The data and the models were not at hand; no number of it is quoted.",
    ),
    Claim("Scale", "The same from 770M to 13B parameters, T5 and LLaMA-2.", reason=FULL_SIZE),
    Claim(
        "Baseline LFPT5",
        "LFPT5 scores below SAPT.",
        published="T5-large 69.2",
        command=ANALYSES.format("decoder"),
        reason="Needs a model that writes texts; it was not run with the decoder.",
    ),
)
