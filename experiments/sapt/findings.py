"""What the runs say to the claims of SAPT (arXiv 2401.08295), and to what is asked of it here, decided by stated rules.

How parts make a finding, and what decides a part: `experiments.common.verdicts`. A run is a seed with an order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from experiments.common import verdicts
from experiments.common.comparison import paired, where
from experiments.common.verdicts import (
    ABSENT,
    FEWEST,
    NEAR,
    OPEN,
    Judged,
    Part,
    above,
    at_least,
    at_most,
    below,
    means,
    near,
    told,
    verdict,
)
from experiments.sapt.run import ROWS
from experiments.sapt.tables import PUBLISHED, SAPT, UNREFLECTED, Tables
from regard.continual.metrics import Scenario
from regard.runs.intervals import Interval, t_interval

Claim = verdicts.Claim[Tables]
Finding = verdicts.Finding[Tables]
Judge = Callable[[Tables, str], Judged]

TO_JOINT, FORGOTTEN, TO_SEPARATE, OPENED = 3.0, 2.0, 2.0, 0.5
"""The bounds that are asked for: points below all tasks at once, points forgotten, points of learning accuracy below a
model for each task, and the weight that each task gives to its own block."""
DENSITY = "sapt, density"
FEW, MANY = "sapt, 3 vectors a task", "replay-lora, 1400 texts"
"""SAPT that keeps as little as the paper, and replay that keeps as many texts as SAPT keeps vectors."""
STRONGER = "sapt, gate published, λ 1"
UNALIGNED = "sapt, not aligned"
FROM_BEST, FROM_NOTHING = "sapt, begun at the best", "sapt, begun at nothing"
SEQUENTIAL, INCREMENTAL, REPLAY, OLORA, SLAO = "sequential-lora", "incremental-lora", "replay-lora", "o-lora", "slao"

T5: Mapping[str, float] = {SEQUENTIAL: 46.0, INCREMENTAL: 64.7, OLORA: 69.6, REPLAY: 75.2, "joint": 80.0, SAPT: 82.0}
LLAMA: Mapping[str, float] = {SEQUENTIAL: 68.7, OLORA: 73.5, SLAO: 74.8, "joint": 78.1, SAPT: 81.9}
"""Published average accuracy on the long sequence, in per cent, in its order: with T5-large, and with LLaMA-2-7B."""


def findings(tables: Tables) -> list[Finding]:
    """Every claim, judged over all runs; those whose rows have no run are told as such."""
    return [_judged(claim, tables, tables.whole) for claim in CLAIMS]


def _judged(claim: Claim, tables: Tables, stream: str) -> Finding:
    missing = [row for row in claim.needs if row not in tables.rows(stream)]
    if missing:
        return Finding(claim, stream, ABSENT, f"no run of {', '.join(f'`{row}`' for row in missing)}.")
    parts, said = claim.judge(tables, stream)
    found = verdict(parts)
    if found == OPEN:
        said = [*said, *_few(min((tables.n(stream, row) for row in claim.needs), default=0))]
    return Finding(claim, stream, found, " ".join(filter(None, said)))


def _few(runs: int) -> list[str]:
    """A sentence where there are too few runs for any interval."""
    return [f"Too few runs ({runs}; {FEWEST} are needed)."] if runs < FEWEST else []


def baselines(tables: Tables, stream: str) -> list[str]:
    """The rows of other methods that are scored without being told a text's task.

    All tasks at once are left out, and variants: of a method with other budgets than SAPT and its rivals have.
    """
    scored = where(tables.scores, stream=stream, scenario="cil")["method"].unique()
    plain = [row for row in tables.rows(stream) if row in scored and row != "joint" and ", " not in row]
    return [row for row in plain if ROWS[row].method != "sapt"]


# -- sentences -------------------------------------------------------------------------------------------------------


def difference(found: Interval | None, digits: int = 2) -> str:
    """A difference run by run, and whether its interval holds 0."""
    return verdicts.difference(found, digits, runs="run")


def bounded(found: Interval | None, bound: float, part: Part) -> str:
    """Where an interval lies beside a bound."""
    if found is None or found.n < FEWEST:
        return ""
    side = "above" if found.ci_low >= bound else "below" if found.ci_high <= bound else "on both sides of"
    return f"Its interval lies {side} {bound:g}." if part is not None or side.startswith("on") else ""


def _sides(
    tables: Tables, stream: str, one: str, other: str, metric: str = "average_performance", setting: Scenario = "cil"
) -> str:
    """The means of two rows over the runs that both have, and whether their intervals overlap."""
    ours, theirs = (tables.by_run(stream, row, metric, setting) for row in (one, other))
    both = [key for key in ours if key in theirs]
    return means((one, _mean({key: ours[key] for key in both})), (other, _mean({key: theirs[key] for key in both})), 1)


# -- judges ----------------------------------------------------------------------------------------------------------


def above_all(tables: Tables, stream: str) -> Judged:
    """Judge: SAPT's average performance is above that of every method that needs no task id."""
    found = {row: tables.difference(stream, SAPT, row) for row in baselines(tables, stream)}
    if not found:
        return [None], ["No other method was run."]
    parts = [above(one) for one in found.values()]
    said = [f"SAPT has {told(tables.mean(stream, SAPT), 1)}. Less what the other has, run by run:"]
    said.append(", ".join(f"`{row}` {told(one, 1, signed=True)}" for row, one in found.items()) + ".")
    over, under = (sum(part is sure for part in parts) for sure in (True, False))
    said.append(f"The interval lies above 0 for {over} of {len(found)}, below 0 for {under};")
    told_of = where(tables.differences, stream=stream, metric="average_performance", scenario="cil")
    corrected = told_of[told_of["method"].isin(found)]["t_test_holm"]
    said.append(f"corrected for all rows of the table (Holm), p is below .05 for {int((corrected < 0.05).sum())}.")
    own = [above(tables.difference(stream, SAPT, row, "average_performance", "til")) for row in found]
    said.append(f"Among the labels of a text's own task it lies above 0 for {sum(part is True for part in own)}.")
    fallen = [row for row in found if row != SEQUENTIAL and not above(tables.difference(stream, row, SEQUENTIAL))]
    if SEQUENTIAL in found and fallen:
        said.append(f"Not surely above `{SEQUENTIAL}` themselves: {', '.join(f'`{row}`' for row in fallen)}.")
    return parts, said


def no_worse(other: str, by: float, metric: str, setting: Scenario, against: str = "average_performance") -> Judge:
    """Judge: a measure of SAPT is at most so many points below a measure of another row."""

    def judge(tables: Tables, stream: str) -> Judged:
        ours = tables.by_run(stream, SAPT, metric, setting)
        theirs = tables.by_run(stream, other, against, setting)
        found = paired(ours, theirs)
        both = means((SAPT, _mean(ours)), (other, _mean(theirs)), 1)
        part = at_least(found, -by)
        return [part], [both, difference(found), bounded(found, -by, part)]

    return judge


def _mean(values: Mapping[Any, float]) -> Interval | None:
    return t_interval(list(values.values())) if values else None


def forgets_little(tables: Tables, stream: str) -> Judged:
    """Judge: SAPT's forgetting from the best is at most the bound."""
    found = tables.mean(stream, SAPT, "forgetting_rate")
    part = at_most(found, FORGOTTEN)
    til = tables.mean(stream, SAPT, "forgetting_rate", "til")
    said = f"`{SAPT}` {told(found, 1)}; among the classes of a text's own task {told(til, 1)}."
    return [part], [said, bounded(found, FORGOTTEN, part)]


def opens(tables: Tables, _: str) -> Judged:
    """Judge: in each run even the task with the least weight for its own block gives it the bound, learnt and later."""
    parts, said = [], []
    for when, words in (("learning", "when learnt"), ("end", "at the end")):
        least = tables.of_gate(SAPT, f"own_adapter_weight_{when}", "min")
        by_task = tables.own_weights(SAPT, when)
        part = at_least(least, OPENED)
        parts.append(part)
        said.append(f"{words.capitalize()}: the least of any task {told(least, 2)}, {_lowest(by_task)}.")
        said.append(bounded(least, OPENED, part))
    return parts, said


def _lowest(by_task: Any) -> str:
    if by_task.empty or by_task.isna().all():
        return "no gate was looked at"
    return f"on average {by_task.mean():.2f}, lowest for {by_task.idxmin()}"


def shuts(tables: Tables, _: str) -> Judged:
    """Judge: with the published gate tasks give their own block less than the bound on average, learnt and later."""
    parts, said = [], []
    for when, words in (("learning", "when learnt"), ("end", "at the end")):
        found = tables.of_gate(PUBLISHED, f"own_adapter_weight_{when}")
        ours = tables.of_gate(SAPT, f"own_adapter_weight_{when}", beside=PUBLISHED)
        part = None if (sure := at_least(found, OPENED)) is None else not sure
        parts.append(part)
        said.append(f"{words.capitalize()}: {told(found, 2)} on average over tasks, `{SAPT}` {told(ours, 2)}.")
        said.append(bounded(found, OPENED, part))
    stronger = tables.of_gate(STRONGER, "own_adapter_weight_learning")
    said += [f"With λ 1: {told(stronger, 2)} when learnt."] if stronger is not None else []
    return parts, said


def forgets_without(tables: Tables, stream: str) -> Judged:
    """Judge: without reflection SAPT forgets more, and performs worse at the end."""
    more = tables.difference(stream, UNREFLECTED, SAPT, "forgetting_rate")
    lower = tables.difference(stream, UNREFLECTED, SAPT)
    said = [f"Forgetting: {_sides(tables, stream, UNREFLECTED, SAPT, 'forgetting_rate')}", difference(more)]
    said += [f"AP: {_sides(tables, stream, UNREFLECTED, SAPT)}", difference(lower), _drifts(tables)]
    return [above(more), below(lower)], said


def _drifts(tables: Tables) -> str:
    found = {row: tables.of_gate(row, "drift", beside=UNREFLECTED) for row in (UNREFLECTED, SAPT)}
    both = ", ".join(f"`{row}` {told(one, 2)}" for row, one in found.items())
    return f"How far a task's mean weights went from those when it was learnt, KL in nats: {both}."


def as_good(row: str, other: str) -> Judge:
    """Judge: a row's average performance is near another's."""

    def judge(tables: Tables, stream: str) -> Judged:
        found = tables.difference(stream, row, other)
        return [near(found)], [_sides(tables, stream, row, other), difference(found)]

    return judge


def better(row: str, other: str) -> Judge:
    """Judge: a row's average performance is above another's."""

    def judge(tables: Tables, stream: str) -> Judged:
        found = tables.difference(stream, row, other)
        return [above(found)], [_sides(tables, stream, row, other), difference(found)]

    return judge


def in_order(published: Mapping[str, float]) -> Judge:
    """Judge: each row is above the one before it, in the published order; rows without runs are left out, and told."""

    def judge(tables: Tables, stream: str) -> Judged:
        there = [row for row in published if row in tables.rows(stream)]
        steps = list(pairwise(there))
        said = [", ".join(f"`{row}` {told(tables.mean(stream, row), 1)}" for row in there) + "."]
        found = [tables.difference(stream, more, less) for less, more in steps]
        said.append(
            "Step by step: " + ", ".join(told(one, 1, signed=True) if one else "no run in common" for one in found)
        )
        said[-1] += "."
        said.append(f"(Published: {', '.join(f'{row} {published[row]:.1f}' for row in published)}.)")
        return [above(one) for one in found] or [None], said

    return judge


# -- claims ----------------------------------------------------------------------------------------------------------

CLAIMS = (
    Claim("SAPT performs better at the end than every method that needs no task id.", (SAPT,), above_all),
    Claim("With 3 vectors a task SAPT performs better than replay of 50 texts.", (FEW, REPLAY), better(FEW, REPLAY)),
    Claim("SAPT performs better than replay of as many texts as it keeps vectors.", (SAPT, MANY), better(SAPT, MANY)),
    Claim(
        f"SAPT is at most {TO_JOINT:g} points below learning all tasks at once.",
        (SAPT, "joint"),
        no_worse("joint", TO_JOINT, "average_performance", "cil"),
    ),
    Claim(f"SAPT forgets at most {FORGOTTEN:g} points (F.Ra).", (SAPT,), forgets_little),
    Claim(
        f"SAPT learns each task to at most {TO_SEPARATE:g} points below a model of its own (among its own classes).",
        (SAPT, "separate"),
        no_worse("separate", TO_SEPARATE, "learning_accuracy", "til", "learning_accuracy"),
    ),
    Claim(f"The gate is open: each task gives its own block a weight of at least {OPENED:g}.", (SAPT,), opens),
    Claim(
        f"The published gate gives a task's own block less than {OPENED:g} on average.",
        (SAPT, PUBLISHED),
        shuts,
    ),
    Claim("Without reflection SAPT forgets.", (SAPT, UNREFLECTED), forgets_without),
    Claim(
        f"A density of query vectors is as good as real ones, within ±{NEAR:g} point.",
        (SAPT, DENSITY),
        as_good(DENSITY, SAPT),
    ),
    Claim(
        "Blocks that are learnt under the weights that select them are better than blocks learnt alone.",
        (SAPT, UNALIGNED),
        better(SAPT, UNALIGNED),
    ),
    Claim(
        "A block that begins as the one before it learns better than one that begins as the one that helps most.",
        (SAPT, FROM_BEST),
        better(SAPT, FROM_BEST),
    ),
    Claim(
        "A block that begins as the one before it learns better than one that begins at nothing.",
        (SAPT, FROM_NOTHING),
        better(SAPT, FROM_NOTHING),
    ),
    Claim(
        "Methods come in the order that is published with T5-large.",
        (SEQUENTIAL, SAPT),
        in_order(T5),
    ),
    Claim(
        "Methods come in the order that is published with LLaMA-2-7B.",
        (SEQUENTIAL, SAPT),
        in_order(LLAMA),
    ),
)
"""The findings, in the order of the page."""
