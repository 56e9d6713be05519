"""Tables and text of docs/routing.md."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from experiments.common.claims import DASH, HOLDS, UNDECIDED, Part, at_least, at_most, format_interval
from experiments.common.comparison import mean_of, where
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table, join_words
from experiments.routing.beginnings import KEPT, NUMBERS
from experiments.routing.ceiling import ENCODER_RATES, EPOCHS, EPOCHS_OF, FOLDS, LINEAR, TUNED
from experiments.routing.reach import AIMS, describe_gains, describe_mixed_up, reach_table
from experiments.routing.routers import DEFAULT
from experiments.routing.run import BUDGETS, JOINT, LEARNT, REPLAY, ROWS, SAPT
from experiments.routing.streams import ANSWER_WORDS, PLAIN, STREAMS, TRAINED
from experiments.routing.tables import ROUTERS, SCORES, WEIGHTS, Tables
from experiments.sapt.run import SEEDS

NOT_HELD = "does not hold"
NO_RUNS = "not run"
BEGUN = ("long", "mixed", "instructed")
"""Streams on which it was measured where an adapter should begin."""
SCORES_SHOWN = ("stream", "row", "runs", "AP", "F.Ra", "own weight", "routed right", "kept")
ROUTERS_SHOWN = ("stream", "router", "seeds", "own weight", "routed right", "same source")
RULES_SHOWN = ("rule", "stream", "mean", "verdict")
REACH_SHOWN = ("stream", "aim", "better ceiling", "its value", "mean", "aim is", "router's share")
"""Columns that the page shows."""
ONLY_IN_FILE = ("closed form, states of half", "learnt, 3 vectors, states of a quarter and half")
BEGUN_AT = f"{SAPT}, begun at"
"""Routers, and rows of whole runs, that the page leaves out."""


class Rule(NamedTuple):
    """A rule of decision: what is measured by seed, and the bound that its interval must keep."""

    text: str
    streams: Sequence[str]
    values: Callable[[Tables, str], Mapping[int, float]]
    decide: Callable[[Any, float], Part]
    bound: float
    digits: int = 1


WHOLE = (*PLAIN, "classes")
"""The streams of whole runs that the rules on scores are for."""
RULES = (
    Rule(
        "AP at least that of replay with 50 texts: difference at least 0",
        WHOLE,
        lambda tables, stream: tables.margins(stream, SAPT, REPLAY),
        at_least,
        0.0,
    ),
    Rule(
        "AP at least .95 of that of joint training: AP minus .95 of it at least 0",
        WHOLE,
        lambda tables, stream: tables.margins(stream, SAPT, JOINT, 0.95),
        at_least,
        0.0,
    ),
    Rule("F.Ra at most 2", WHOLE, lambda tables, stream: tables.by_seed(stream, SAPT, "F.Ra"), at_most, 2.0),
    Rule(
        "own weight at least .9",
        PLAIN,
        lambda tables, stream: tables.by_seed(stream, SAPT, "own_weight"),
        at_least,
        AIMS["long"],
        2,
    ),
    Rule(
        "with instructions, AP not worse than with the learnt router: difference at least −1",
        ("instructed",),
        lambda tables, stream: tables.margins(stream, SAPT, f"{SAPT}, learnt router"),
        at_least,
        -1.0,
    ),
    Rule(
        "own weight at least .8 with fifty tasks, the router alone",
        ("fifty",),
        lambda tables, stream: tables.by_router(stream, DEFAULT, "own_weight"),
        at_least,
        AIMS["fifty"],
        2,
    ),
    Rule(
        "own weight at least .8 with fifty tasks, in whole runs",
        ("classes",),
        lambda tables, stream: tables.by_seed(stream, SAPT, "own_weight"),
        at_least,
        AIMS["fifty"],
        2,
    ),
)
"""Fixed before the runs."""


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page of the experiment."""
    rules, scores, routers, reach = (make(tables) for make in (rule_table, score_table, router_table, reach_table))
    files = [
        ("routing-runs.csv", "all runs"),
        ("routing-tasks.csv", "all tasks of all runs: accuracy when learnt and at the end, own weight"),
        ("routing-routers.csv", "all routers alone, and the ceilings"),
        ("routing-confusions.csv", "which tasks the ceilings take for which, by seed"),
        ("routing-beginnings.csv", "losses under earlier adapters, where a new one begins"),
        ("routing.json", "tasks, settings and versions"),
    ]
    learnt = " ".join(f"`{name}={value}`" for name, value in LEARNT.items())
    return Page(
        "routing",
        "Routing texts without instructions",
        [
            "Does `sapt` know whose task a text is when no instruction says so, and does it then forget less than "
            "replay and come near joint training? Its default router is a discriminant analysis of mean states of the "
            f"frozen model, which is not trained; `sapt, learnt router` has the router that the paper trains, on the "
            f"maxima of the input embeddings ({learnt}).",
            answer_table(tables),
            f"AP, and the [streams](#setting). {count_verdicts(rules)}",
            "## Rules, fixed before the runs",
            _name_once(rules.select(RULES_SHOWN)),
            "A rule holds if the whole 95 % interval over seeds (Student's t, at least three seeds) keeps the bound, "
            f"and does not if the whole interval is beyond it; else it *{UNDECIDED}*. Runs are paired by seed, which "
            f"draws the rows and, in `mixed`, the order of tasks.{describe_added(tables)} A seed repeats scores on one "
            "kind of processor only: on another, `joint` in `mixed` differed by some points of AP.",
            f"A new adapter begins where the loss is least. The rule: its mean AP over {join_words(BEGUN)} is above "
            "that of adapters begun at nothing, and on none more than 1 below. The differences are "
            f"{describe_begun(tables)}.",
            "## Whole runs",
            _trained(scores).select(SCORES_SHOWN),
            "AP: accuracy (in `answers` exact match) after the last task among the labels of all tasks, no task "
            "named; F.Ra: loss since each task's best. Own weight: mean weight of a task's own adapter over its test "
            "rows; routed right: test rows whose largest weight is that. Kept besides the model: MiB, texts. Means "
            "over seeds ± half the 95 % interval.",
            "## Routers alone",
            _on_page(routers).select(ROUTERS_SHOWN),
            "The same rows and length, no adapter: the router gets the training rows of one task after another, then "
            "routes all test rows. Same source: weight of all tasks of the same data set (`fifty` has seven parts of "
            "DBpedia, five of novels, two of speeches, five of Python's documentation). *Learnt* routers are taught "
            "each task in 300 steps beside kept vectors of earlier ones (3: the 2 % of `sapt`'s default memory), "
            "without the training of adapters. Others in closed form: [routers.md](routers.md).",
            *describe_ceilings(tables, reach),
            *describe_beginnings(tables),
            "## Setting",
            describe_setting(tables),
            "## Not tried",
            describe_missing(tables),
        ],
        (rules, scores, routers, reach),
        (),
        files,
    )


# -- text ------------------------------------------------------------------------------------------------------------


def answer_table(tables: Tables) -> Table:
    """Return the AP of the rows that the rules compare, by stream."""
    names = (SAPT, f"{SAPT}, learnt router", REPLAY, JOINT)
    means = {stream: [tables.mean(stream, row, "AP") for row in names] for stream in TRAINED}
    lines = [
        [stream, *(DASH if mean is None else f"{mean.mean:.1f}" for mean in of_rows)]
        for stream, of_rows in means.items()
        if any(of_rows)
    ]
    return Table("routing-answer", "AP of the rows that the rules compare", ("stream", *names), lines)


def count_verdicts(rules: Table) -> str:
    """Say how many rules hold."""
    counts = Counter(line[-1] for line in rules.rows)
    verdicts = join_words(f"{count} *{word}*" for word, count in counts.items())
    return f"Of {len(rules.rows)} rules, counted stream by stream: {verdicts}."


def describe_added(tables: Tables) -> str:
    """Return which runs are of seeds beyond the first three."""
    added: dict[str, list[str]] = {}
    for stream in TRAINED:
        for row in tables.rows(stream):
            seeds = [str(seed) for seed in sorted(tables.by_seed(stream, row, "AP")) if seed not in SEEDS]
            if seeds:
                added.setdefault(join_words(seeds), []).append(f"`{row}` in `{stream}`")
    named = "; ".join(f"{seeds} ({join_words(rows)})" for seeds, rows in added.items())
    left_open = "Seeds that were added when the first three had left rules open, which stayed as they were"
    return f" {left_open}: {named}." if named else ""


def describe_begun(tables: Tables) -> str:
    """Return by how much adapters begun at the best surpass those begun at nothing, by stream."""
    differences = {stream: tables.difference(stream, SAPT, f"{SAPT}, begun at nothing") for stream in BEGUN}
    return join_words(f"{format_interval(mean, 1)} ({stream})" for stream, mean in differences.items())


def describe_setting(tables: Tables) -> str:
    """Return model, streams, budget and versions."""
    record, budget = tables.record, tables.record["budget"]
    streams = record["streams"]
    named = {
        "long": "tasks of Long Sequence in order 3, without their instructions",
        "mixed": "tasks of other files, in an order drawn by the seed",
        "instructed": f"tasks of `long` behind their instructions, {BUDGETS['instructed'].length} tokens",
        "answers": "tasks of `long` as text to text, without instructions, exact match",
        "fifty": "tasks: both, DBpedia and novels in more parts, SuperNI without definitions, Python's documentation",
        "classes": "tasks with labels: those of `fifty`, larger ones in parts of two classes, and four more",
    }
    parts = [f"`{name}`: {len(streams[name])} {named[name]}." for name in STREAMS if name in streams]
    parts += [f"Tasks of `mixed`: {', '.join(streams['mixed'])}."] if "mixed" in streams else []
    versions = join_words(
        sorted({f"torch {one['torch']}, transformers {one['transformers']}" for one in record["versions"]})
    )
    revision = f" Last revision {record['revision']}." if record["revision"] else ""
    return (
        f"`{record['model']}`, frozen, label-text head; {' '.join(parts)} At most 120 training and 40 test rows a "
        f"task, {budget['length']} tokens, adapters of rank 8 on queries and values, {budget['num_epochs']} epochs at "
        f"{budget['learning_rate']:g} in batches of {budget['batch_size']}, {budget['precision']}. `joint` trains "
        f"adapters of the same rank on all tasks at once. In `answers` the model is a decoder pre-trained on Python's "
        f"documentation (with one seed, anew on each machine: what is compared has one), "
        f"{BUDGETS['answers'].num_epochs} epochs at {BUDGETS['answers'].learning_rate:g}, the first "
        f"{ANSWER_WORDS} words of a text. Regard {join_words(record['regard'])}, {versions}.{revision}"
    )


def describe_missing(tables: Tables) -> str:
    """Return which rows have no runs, and what else was not tried."""
    sentences = []
    for stream in TRAINED:
        counts = {row: len(tables.by_seed(stream, row, "AP")) for row in ROWS}
        absent = [f"`{row}`" for row, count in counts.items() if not count and stream in PLAIN]
        sentences += [f"`{stream}`, without any run: {join_words(absent)}."] if absent else []
    return " ".join(
        (
            *sentences,
            "T5 and pre-trained decoders, other lengths, budgets and rates, and other encoders were not run.",
        )
    )


def describe_ceilings(tables: Tables, reach: Table) -> list[str | Table]:
    """Return the section on what is within reach; nothing without a ceiling."""
    if not reach.rows:
        return []
    return [
        "## Is the aim within reach?",
        f"*{LINEAR.capitalize()}* and *{TUNED.removeprefix('all tasks at once, ')}*, above, are ceilings: classifiers "
        "that see the training rows of all tasks at once, which no continual method may. The linear one reads the "
        f"vectors of the default router; its kind and strength are chosen by {FOLDS}-fold cross-validation. The other "
        f"is the whole model (in `answers` the decoder), trained for {EPOCHS} epochs ({EPOCHS_OF['fifty']} in `fifty`) "
        f"at one of {len(ENCODER_RATES)} rates, chosen on training rows left out: `python -m "
        "experiments.routing.ceiling --data DIR`.",
        "The rule, fixed before they ran: the value of a ceiling is its own weight or its rows routed right, whichever "
        "has the larger mean. The aim is *out of reach* on these rows if the whole 95 % interval of the better ceiling "
        f"lies below it, *within reach* if the whole interval is at least the aim; else it *{UNDECIDED}*. A ceiling is "
        "no proof that nothing could do better.",
        reach.select(REACH_SHOWN),
        "Router's share: own weight of the default router alone over the value of the ceiling, paired by seed.",
        describe_gains(tables),
        f"No router here tells apart what the better ceiling mixes up (mean share of a task's test rows). "
        f"{describe_mixed_up(tables)} Tasks whose texts are of one sort and differ only in the question need an "
        "instruction, as in `instructed`, or one adapter for all of them.",
    ]


def describe_beginnings(tables: Tables) -> list[str | Table]:
    """Return the section on which earlier adapters a new one tries; nothing without a record."""
    late = tables.beginnings[tables.beginnings["place"] > NUMBERS[-1] + 1]
    if not len(late):
        return []
    gain = (late["nothing"] - late["best"]).sum()
    kept = {most: float((late["nothing"] - late[f"likeliest {most}"]).sum() / gain) for most in NUMBERS}
    shares = join_words(f"{share:.2f} ({most})" for most, share in kept.items())
    chosen = next((str(most) for most, share in kept.items() if share >= KEPT), "all")
    return [
        "## Where a new adapter begins",
        "To try all earlier adapters costs more with each task. So `sapt` tries those that its router finds likeliest "
        f"for the task's rows (`init_candidates`). In `{late['stream'].iloc[0]}`, in the {len(late)} tasks behind more "
        f"than {NUMBERS[-1]} others, a text loses {gain / len(late):.2f} less where the task's adapter begins at the "
        f"best of all than where it begins at nothing. Of this gain the likeliest keep {shares}. The rule, fixed "
        f"before the run, takes the least of these numbers that keeps {KEPT:.2f}: {chosen}. Command: `python -m "
        "experiments.routing.beginnings --data DIR`. In the runs of `sapt` in `classes` above all were tried.",
    ]


# -- tables ----------------------------------------------------------------------------------------------------------


def _name_once(rules: Table) -> Table:
    """Return the rules with the text of each in its first line alone."""
    pairs = pairwise([[""], *rules.rows])
    lines = [["" if line[0] == before[0] else line[0], *line[1:]] for before, line in pairs]
    return replace(rules, rows=lines)


def _trained(scores: Table) -> Table:
    """Return the rows of whole runs that the page shows."""
    return replace(scores, rows=[line for line in scores.rows if not line[1].startswith(BEGUN_AT)])


def _on_page(routers: Table) -> Table:
    """Return the routers that the page shows."""
    return replace(routers, rows=[line for line in routers.rows if line[1] not in ONLY_IN_FILE])


def rule_table(tables: Tables) -> Table:
    """Each rule with what was measured and its verdict, stream by stream."""
    lines = []
    for rule in RULES:
        for stream in rule.streams:
            values = rule.values(tables, stream)
            mean = mean_of(values)
            by_seed = ", ".join(f"{value:.{rule.digits}f}" for _, value in sorted(values.items())) or DASH
            lines.append([rule.text, stream, by_seed, format_interval(mean, rule.digits), judge(rule, values)])
    head = ("rule", "stream", "by seed", "mean", "verdict")
    return Table("routing-rules", "the rules and their verdicts", head, lines)


def judge(rule: Rule, values: Mapping[int, float]) -> str:
    """Return the verdict of a rule on what was measured by seed."""
    if not values:
        return NO_RUNS
    part = rule.decide(mean_of(values), rule.bound)
    return UNDECIDED if part is None else HOLDS if part else NOT_HELD


def score_table(tables: Tables) -> Table:
    """Scores, weights and cost of all rows by stream."""
    lines = []
    for stream in TRAINED:
        for row in tables.rows(stream):
            mean, runs = tables.mean, where(tables.runs, stream=stream, row=row)
            cells = [format_interval(mean(stream, row, name), 1) for name in SCORES]
            cells.append(format_interval(mean(stream, row, "own_weight"), 2))
            cells.append(format_interval(mean(stream, row, "own_largest"), 2))
            kept = f"{runs['kept_bytes'].mean() / 2**20:.2f}, {runs['kept_examples'].mean():.0f}"
            lines.append([stream, row, str(len(runs)), *cells, f"{runs['run_s'].median():.0f}", kept])
    head = ("stream", "row", "runs", *SCORES, "own weight", "routed right", "s", "kept")
    return Table("routing-scores", "scores, weights and cost of the rows", head, lines)


def router_table(tables: Tables) -> Table:
    """Routers alone, by stream: weights and seconds."""
    lines = []
    for stream in STREAMS:
        for name in ROUTERS:
            values = {column: tables.by_router(stream, name, column) for column in tables.routers.columns[3:]}
            if values["own_weight"]:
                weights = [format_interval(mean_of(values[column]), 2) for column in (*WEIGHTS, "same_source")]
                seconds = [
                    f"{median(values[column].values()):.3f}" if values[column] else DASH
                    for column in ("second_s", "last_s")
                ]
                lines.append([stream, name, str(len(values["own_weight"])), *weights, *seconds])
    head = ("stream", "router", "seeds", "own weight", "routed right", "same source", "s, second", "s, last")
    return Table("routing-alone", "routers alone", head, lines)


def gather(work: Path, revision: str | None, folder: Path) -> None:
    """Make the stored tables anew from the runs in a folder."""
    Tables.gather(work, revision).save(folder)


def add(work: Path, revision: str | None, folder: Path) -> None:
    """Add the runs in a folder to the stored tables."""
    Tables.load(folder).join(Tables.gather(work, revision)).save(folder)


PAPER = Paper(
    "routing",
    "Routing texts without instructions",
    "python -m experiments.routing.run --data DIR",
    (),
    Tables.load,
    make_page,
    gather,
    add,
)
