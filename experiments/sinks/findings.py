"""What the runs say to each finding of Gu et al. 2025 (arXiv 2410.10781): decided from their numbers by stated rules.

A finding has parts, each true, false or open. A part about a sink is true or false where all seeds agree, two at least,
and open else; a part about a difference is decided by the 95 % interval of the differences seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.sinks.plan import BASELINE, SINK, STAR, Runs, averaged, by_count, counted, differing, listed
from regard.commands.sweep.means import Difference

HELD, PARTLY, AGAINST = "as in the paper", "in part as in the paper", "against the paper"
OPEN, ABSENT = "cannot be told at this scale", "not run"
VERDICTS = (HELD, PARTLY, AGAINST, OPEN, ABSENT)

Part = bool | None
Judged = tuple[list[Part], list[str]]
"""The parts of a finding, and the sentences that state the numbers."""


@dataclass(frozen=True)
class Claim:
    """A finding: what the paper says, its numbers, the rows that are needed, and what decides."""

    said: str
    paper: str
    needs: tuple[str, ...]
    judge: Callable[[Runs], Judged]


@dataclass(frozen=True)
class Finding:
    """A claim with what became of it."""

    claim: Claim
    verdict: str
    evidence: str


def verdict(parts: Sequence[Part]) -> str:
    """One word for the parts: all true, some true, none true but one false, all open."""
    if True in parts:
        return HELD if all(parts) else PARTLY
    return AGAINST if False in parts else OPEN


def agreed(flags: Sequence[bool]) -> Part:
    """True or False where all of at least two seeds agree."""
    return flags[0] if len(flags) > 1 and len(set(flags)) == 1 else None


def negated(part: Part) -> Part:
    """The contrary; what is open stays open."""
    return None if part is None else not part


def above(found: Difference | None) -> Part:
    """Whether a difference is above 0: open where the interval holds 0 or there is none."""
    return None if found is None or not found.sure or found.overlaps else found.value > 0


MARGIN = 0.05
"""Nats a token, about a hundredth of these losses: a loss that is surely less than so much higher is no higher."""


def no_more(found: Difference | None) -> Part:
    """Whether the interval of a difference lies below the margin; False if above it, else open."""
    if found is None or not found.sure or found.low <= MARGIN < found.high:
        return None
    return found.high <= MARGIN


def findings(runs: Runs) -> list[Finding]:
    """Every claim, judged; those whose rows have no run are told as such."""
    return [_judged(claim, runs) for claim in CLAIMS]


def _judged(claim: Claim, runs: Runs) -> Finding:
    missing = [row for row in claim.needs if row not in runs.rows]
    if missing:
        return Finding(claim, ABSENT, f"There is no run of {_names(missing)}.")
    parts, told = claim.judge(runs)
    return Finding(claim, verdict(parts) if parts else ABSENT, " ".join(told) if parts else "There is no run of it.")


def _names(rows: Sequence[str]) -> str:
    return listed(f"`{row}`" for row in rows)


# -- sentences -------------------------------------------------------------------------------------------------------


def rate(runs: Runs, row: str, column: str = "sink_rate") -> str:
    """A row's sink rate, and in how many seeds it is one."""
    name = "virtual sink" if column == "virtual_sink_rate" else "Sink₁"
    flags = runs.over(row, column)
    if not flags:
        return f"`{row}`: no {name}."
    return f"`{row}`: {name} {averaged(runs, row, column, 1)} %, at least {SINK:g} % in {counted(flags)}."


def anywhere(runs: Runs, row: str) -> str:
    """In how many seeds any position is a sink, and which."""
    flags, found = runs.over(row, "sink_rate_max"), runs.where(row)
    positions = f" (the strongest: {by_count(found)})" if found else ""
    return f"`{row}`: some position is a sink in {counted(flags)}{positions}."


def loss(runs: Runs, row: str) -> str:
    """A row's validation loss against its reference."""
    found, other = runs.more(row, runs.reference(row), "valid_loss"), runs.reference(row)
    if found is None:
        return f"`{row}` and `{other}` have no seed in common."
    sure = "one seed, no interval" if not found.sure else "within noise" if found.overlaps else "beyond noise"
    what = "" if runs.comparable(row) else ", of other inputs or targets"
    return f"Its validation loss is {differing(found, 3)} to that of `{other}` ({sure}{what})."


# -- judges ----------------------------------------------------------------------------------------------------------


def grows(row: str) -> Callable[[Runs], Judged]:
    """Judge: the first token is a sink."""
    return lambda runs: ([agreed(runs.over(row))], [rate(runs, row)])


def stays(row: str) -> Callable[[Runs], Judged]:
    """Judge: the first token is a sink, as it is in softmax."""

    def judge(runs: Runs) -> Judged:
        told = [rate(runs, row), loss(runs, row)]
        if agreed(runs.over(BASELINE)) is not True:
            return [None], [*told, _nothing(BASELINE)]
        return [agreed(runs.over(row))], told

    return judge


def without(row: str, *, dearer: bool) -> Callable[[Runs], Judged]:
    """Judge: no position is a sink where softmax has one; and the loss is higher, or is not."""

    def judge(runs: Runs) -> Judged:
        told = [rate(runs, row), anywhere(runs, row), loss(runs, row)]
        if agreed(runs.over(BASELINE)) is not True:
            return [None], [*told, _nothing(BASELINE)]
        apart = runs.more(row, BASELINE, "valid_loss")
        none = negated(agreed(runs.over(row, "sink_rate_max")))
        return [none, above(apart) if dearer else no_more(apart)], told

    return judge


def _nothing(row: str) -> str:
    return f"As `{row}` has no sink in every one of at least two seeds, this says little."


def dear_sink(row: str) -> Callable[[Runs], Judged]:
    """Judge: the first token is a sink, and the loss is higher."""

    def judge(runs: Runs) -> Judged:
        parts = [agreed(runs.over(row)), above(runs.more(row, BASELINE, "valid_loss"))]
        return parts, [rate(runs, row), loss(runs, row)]

    return judge


def brings_back(row: str, other: str) -> Callable[[Runs], Judged]:
    """Judge: the first token is a sink in one row and none in the other."""

    def judge(runs: Runs) -> Judged:
        told = [rate(runs, row), rate(runs, other)]
        if agreed(runs.over(other)) is not False:
            return [None], [
                *told,
                f"As `{other}` is not without one in every one of at least two seeds, it says little.",
            ]
        return [agreed(runs.over(row))], told

    return judge


def takes_over(row: str) -> Callable[[Runs], Judged]:
    """Judge: the sink beside the tokens is one, and the first token is none any more."""

    def judge(runs: Runs) -> Judged:
        other = runs.reference(row)
        told = [rate(runs, row, "virtual_sink_rate"), rate(runs, row), loss(runs, row)]
        there = agreed(runs.over(other)) is True
        gone = negated(agreed(runs.over(row))) if there else None
        return [agreed(runs.over(row, "virtual_sink_rate")), gone], told if there else [*told, _nothing(other)]

    return judge


def weight_decay(runs: Runs) -> Judged:
    """Judge: the sink rate is higher at a middle weight decay than at the lowest, and at the highest there is none."""
    found = runs.changing("weight_decay")
    if BASELINE in runs.rows:
        found[BASELINE] = runs.base("weight_decay")
    rows = sorted((row for row in found if runs.over(row)), key=lambda row: float(found[row]))
    if len(rows) < 3:
        return [], []
    means = {row: float(runs.of(row)["sink_rate"].mean()) for row in rows}
    best, (lowest, *_, highest) = max(means, key=lambda row: means[row]), rows
    apart = runs.more(best, lowest, "sink_rate") if best != lowest else None
    rises: Part = False if best == lowest else above(apart)
    each = (f"{averaged(runs, row, 'sink_rate', 1)} % at {found[row]:g}" for row in rows)
    told = [f"Sink₁ is {', '.join(each)}."]
    if apart is not None:
        told.append(
            f"The largest mean, at {found[best]:g}, differs from that at {found[lowest]:g} by {differing(apart, 1)}."
        )
    return [rises, negated(agreed(runs.over(highest)))], [*told, rate(runs, highest)]


def placed(runs: Runs, row: str, allowed: Sequence[int]) -> Part:
    """Whether the strongest position is one of these, of the seeds in which it is a sink."""
    return agreed([position in allowed for position in runs.where(row)])


def prefixes(runs: Runs) -> Judged:
    """Judge: with a prefix the strongest position lies in it."""
    rows = {row: int(runs.changes[row]["prefix"]) for row in runs.rows if "prefix" in runs.changes.get(row, {})}
    first = [f"In `{row}` that is the first token, as without a prefix." for row in rows if set(runs.where(row)) == {0}]
    parts = [placed(runs, row, range(size)) for row, size in rows.items()]
    return parts, [*(anywhere(runs, row) for row in rows), *first]


def fixed_tokens(runs: Runs) -> Judged:
    """Judge: a fixed token at another position is the strongest there."""
    rows = {row: at for row, at in runs.changing("fixed_token").items() if at is not None}
    return [placed(runs, row, [at]) for row, at in rows.items()], [anywhere(runs, row) for row in rows]


def windows(runs: Runs) -> Judged:
    """Judge: in a window the strongest position is the first token; open where it cannot get more than ε at all."""
    parts: list[Part] = []
    told = []
    for row, size in runs.changing("window").items():
        told.append(anywhere(runs, row))
        if (most := size / runs.length) <= runs.epsilon:
            uniform = math.fsum(1 / n for n in range(1, size + 1)) / runs.length
            told.append(
                f"With {size} of {runs.length} queries that see it, the first token gets {most:.2f} at the most, which "
                f"ε = {runs.epsilon:g} rules out; mean α₁ is {averaged(runs, row, 'alpha_first', 3)}, of uniform "
                f"attention in this window {uniform:.3f}."
            )
            parts.append(None)
        else:
            parts.append(placed(runs, row, [0]))
    return parts, told


def learning_rates(runs: Runs) -> Judged:
    """Judge: the sink rate is lower where the learning rate is."""
    base = float(runs.base("learning_rate"))
    rows = {row: float(value) for row, value in runs.changing("learning_rate").items() if float(value) < base}
    parts, told = [], [rate(runs, BASELINE)]
    for row in rows:
        apart = runs.more(row, BASELINE, "sink_rate")
        parts.append(negated(above(apart)))
        told += [rate(runs, row), f"It differs from `{BASELINE}` by {differing(apart, 1)} points, at as many steps."]
    return parts, told


def norms(runs: Runs) -> Judged:
    """Judge: the first token's hidden state is larger, against the others', in softmax than in sigmoid."""
    apart = runs.more(BASELINE, "sigmoid", "norm_ratio")
    each = listed(f"{averaged(runs, row, 'norm_ratio', 2)} (`{row}`)" for row in (BASELINE, "sigmoid"))
    return [above(apart)], [f"The largest of all layers is {each}, a difference of {differing(apart, 2)}."]


ARCHITECTURE = ("positions", "norm", "ffn", "num_heads", "num_kv_heads")


def architectures(runs: Runs) -> Judged:
    """Judge: the first token is a sink whatever the positions, norm, feed-forward layer and number of heads."""
    found = {row: agreed(runs.over(row)) for row in runs.changing(*ARCHITECTURE)}
    kinds: dict[Part, str] = {True: "a sink in every seed", False: "none in any seed", None: "open"}
    told = [
        f"{kind[0].upper()}{kind[1:]}: {_names(rows)}."
        for part, kind in kinds.items()
        if (rows := [row for row, other in found.items() if other is part])
    ]
    if agreed(runs.over(BASELINE)) is not True:
        return [None] * len(found), [*told, _nothing(BASELINE)]
    return list(found.values()), told


# -- claims ----------------------------------------------------------------------------------------------------------

_SIXTY = "60M: Sink₁ {} %, validation loss {}"
_TAKEN = "60M: virtual sink {} %, Sink₁ {} %, validation loss {}; softmax 18.18 % and 3.73"
CLAIMS = (
    Claim("Softmax grows a sink on the first token.", _SIXTY.format(18.18, 3.73), (BASELINE,), grows(BASELINE)),
    *(
        Claim(f"{name} without normalisation grows none, and its loss is no higher.", numbers, (row, BASELINE), judge)
        for name, row, numbers, judge in (
            ("Sigmoid", "sigmoid", _SIXTY.format(f"0.44{STAR}", "3.70"), without("sigmoid", dearer=False)),
            ("ELU", "elu", _SIXTY.format(f"0.80{STAR}", 3.69), without("elu", dearer=False)),
        )
    ),
    Claim(
        "Normalising sigmoid brings the sink back.",
        _SIXTY.format(30.24, 3.74),
        ("sigmoid, normalised", "sigmoid"),
        brings_back("sigmoid, normalised", "sigmoid"),
    ),
    Claim(
        "A normalised kernel, that of ELU, has a sink too, at a higher loss.",
        _SIXTY.format(f"53.65{STAR}", 4.19),
        ("elu kernel, normalised", BASELINE),
        dear_sink("elu kernel, normalised"),
    ),
    *(
        Claim(f"The {name} grows none, at a higher loss.", numbers, (row, BASELINE), without(row, dearer=True))
        for name, row, numbers in (
            ("MLP kernel without normalisation", "mlp kernel", _SIXTY.format(f"0.74{STAR}", 3.91)),
            ("linear kernel", "linear", _SIXTY.format(f"0.00{STAR}", 3.99)),
        )
    ),
    *(
        Claim(f"{name} beside the keys takes the sink over.", numbers, (row, BASELINE), takes_over(row))
        for name, row, numbers in (
            ("A learned key (K bias)", "K bias", _TAKEN.format(73.34, "0.00", 3.72)),
            ("A learned key and value (KV bias)", "KV bias", _TAKEN.format(72.76, 0.04, 3.72)),
        )
    ),
    Claim(
        "A learned value alone (V bias) leaves the sink where it is.",
        _SIXTY.format(17.53, 3.73),
        ("V bias", BASELINE),
        stays("V bias"),
    ),
    Claim(
        "A learned token in front of the sequence takes the sink over.",
        _TAKEN.format(74.12, "0.00", 3.72),
        ("sink token", BASELINE),
        takes_over("sink token"),
    ),
    Claim(
        "The sink grows with weight decay, and is gone where that is too strong.",
        "60M: Sink₁ 18.18 % at 0.1; quoted from memory 41 % at 0.5 and 0 % at 5",
        (),
        weight_decay,
    ),
    Claim("In a prefix LM the sink is on one of the prefix's tokens.", "", (), prefixes),
    Claim("With a window the sink stays on the absolute first token.", "", (), windows),
    Claim("A token fixed at another position draws the sink there.", "", (), fixed_tokens),
    Claim("A lower learning rate weakens the sink.", "", (BASELINE,), learning_rates),
    Claim(
        "The first token's hidden state is far larger than others' with softmax, not with sigmoid.",
        "1B: |h₁|/|hₜ| near 23 with softmax, 1 to 1.5 with sigmoid",
        (BASELINE, "sigmoid"),
        norms,
    ),
    Claim(
        "Positions, norm, feed-forward layer and number of heads do not decide whether there is a sink.",
        "",
        (BASELINE,),
        architectures,
    ),
)
"""The findings with the published numbers, rates in percent and losses in nats a token."""
