"""Whether the own weights that docs/routing.md aims at are within reach: the rule of `experiments.routing.ceiling`."""

from collections.abc import Mapping

from experiments.common.claims import UNDECIDED, at_least, format_interval
from experiments.common.comparison import mean_of, paired, where
from experiments.common.parts import Table, join_words
from experiments.routing.ceiling import LINEAR, TUNED
from experiments.routing.routers import DEFAULT
from experiments.routing.streams import PLAIN
from experiments.routing.tables import WEIGHTS, Tables

AIMS: Mapping[str, float] = {**dict.fromkeys(PLAIN, 0.9), "fifty": 0.8}
"""The own weight that is aimed at, by stream."""
OUT_OF_REACH, WITHIN_REACH = "out of reach", "within reach"
MEASURES = {"own_weight": "own weight", "own_largest": "routed right"}
MIXED_UP, MOST = 0.1, 4
"""Least share of a task's texts that go to another task, and most pairs of tasks, that the page names by stream."""


def value_of(tables: Tables, stream: str, ceiling: str) -> tuple[str, dict[int, float]]:
    """Return by seed the own weight of a ceiling, or its rows routed right where their mean is larger."""
    measured = {name: tables.by_router(stream, ceiling, name) for name in WEIGHTS}
    name = max(measured, key=lambda name: _mean(measured[name]))
    return name, measured[name]


def better_ceiling(tables: Tables, stream: str) -> tuple[str, str, dict[int, float]] | None:
    """Return the better ceiling of a stream, what its value is, and that by seed; None without any."""
    values = [(ceiling, *value_of(tables, stream, ceiling)) for ceiling in (LINEAR, TUNED)]
    present = [value for value in values if value[2]]
    return max(present, key=lambda value: _mean(value[2])) if present else None


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0


def judge_reach(values: Mapping[int, float], aim: float) -> str:
    """Return the verdict of the rule on the values of the better ceiling by seed."""
    part = at_least(mean_of(values), aim)
    return UNDECIDED if part is None else WITHIN_REACH if part else OUT_OF_REACH


def shares_of(tables: Tables, stream: str, values: Mapping[int, float]) -> dict[int, float]:
    """Return the own weight of the router alone as a share of the ceiling's value, by seed."""
    own = tables.by_router(stream, DEFAULT, "own_weight")
    return {seed: own[seed] / value for seed, value in values.items() if seed in own}


def reach_table(tables: Tables) -> Table:
    """The better ceiling of each stream against the aim, and the router's share of it."""
    lines = []
    for stream, aim in AIMS.items():
        if better := better_ceiling(tables, stream):
            ceiling, measure, values = better
            by_seed = ", ".join(f"{value:.2f}" for _, value in sorted(values.items()))
            mean, share = mean_of(values), mean_of(shares_of(tables, stream, values))
            cells = [by_seed, format_interval(mean, 2), judge_reach(values, aim), format_interval(share, 2)]
            lines.append([stream, f"{aim:g}", ceiling, MEASURES[measure], *cells])
    head = ("stream", "aim", "better ceiling", "its value", "by seed", "mean", "aim is", "router's share")
    return Table("routing-reach", "the better ceiling of each stream, and the router's share of it", head, lines)


def describe_gains(tables: Tables) -> str:
    """Return by how much the own weights of the ceilings surpass that of the router."""
    sentences = []
    for ceiling, place in ((LINEAR, "on the same vectors"), (TUNED, "with the model trained")):
        gains = {
            stream: paired(*(tables.by_router(stream, name, "own_weight") for name in (ceiling, DEFAULT)))
            for stream in AIMS
        }
        named = [f"{format_interval(gain, 2, signed=True)} (`{stream}`)" for stream, gain in gains.items() if gain]
        sentences += [f"{place} {join_words(named)}"] if named else []
    return (
        f"Own weight of the ceilings minus that of the router: {'; '.join(sentences)}. The first is what another "
        "linear rule would add on the vectors of the frozen model, the second what training the model for it would."
    )


def describe_mixed_up(tables: Tables) -> str:
    """Return which tasks the better ceiling takes for others, by stream."""
    sentences = []
    for stream in AIMS:
        pairs = mixed_up(tables, stream)
        named = [f"{task} for {other} ({share:.2f})" for (task, other), share in list(pairs.items())[:MOST]]
        sentences += [f"In `{stream}` it takes {join_words(named)}."] if named else []
    return " ".join(sentences)


def mixed_up(tables: Tables, stream: str) -> dict[tuple[str, str], float]:
    """Return the tasks that the better ceiling takes for others: the mean share of texts, from `MIXED_UP`, by pair."""
    better = better_ceiling(tables, stream)
    if better is None:
        return {}
    rows = where(tables.confusions, stream=stream, router=better[0])
    shares = rows.groupby(["task", "other"])["share"].sum() / len(better[2])
    largest = shares[shares >= MIXED_UP].sort_values(ascending=False, kind="stable")
    return {(str(task), str(other)): float(share) for (task, other), share in largest.items()}
