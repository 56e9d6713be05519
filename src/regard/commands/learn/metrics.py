"""The metrics of continual learning as a report tells them: names, order, means with intervals, differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from regard.errors import UserError

REFERENCES = {"joint": "all tasks at once", "separate": "a model for each task"}
"""Methods that do not learn task after task: what one could hope for, not competitors."""


@dataclass(frozen=True)
class Metric:
    """A metric: its title, what it is, and whether more of it is better."""

    title: str
    about: str
    rises: bool = True


_ZERO_SHOT = (
    "mean score of all tasks but the first, each just before it is learnt, less what guessing scores "
    "(100 divided by the number of its classes, or 0 where answers are written)"
)
METRICS = {
    "average_performance": Metric("AP", "mean score of all tasks at the end"),
    "forgetting": Metric("FGT", "what old tasks lost on average since they were learnt", rises=False),
    "forgetting_rate": Metric("F.Ra", "what old tasks lost on average since their best score", rises=False),
    "bwt": Metric("BWT", "what old tasks gained on average since they were learnt"),
    "fwt": Metric("FWT", "mean score of tasks when learnt, less that of a model for each task"),
    "learning_accuracy": Metric("Learning accuracy", "mean score of tasks when learnt"),
    "intransigence": Metric("Intransigence", "what tasks, when learnt, lack of joint training’s score", rises=False),
    "zero_shot_transfer": Metric("Zero-shot", _ZERO_SHOT),
    "area": Metric("Area", "mean, over the stream, of the mean score of the tasks seen"),
}
"""The metrics by their names in the tables, in the order in which a report tells them."""


def metric(name: str) -> Metric:
    """What is known of a metric by its name in the tables; its name in words where nothing is."""
    return METRICS[name] if name in METRICS else Metric(name.replace("_", " "), "")


def ordered(names: Iterable[str]) -> list[str]:
    """The metrics' names in the order in which a report tells them, unknown ones last."""
    there = [str(name) for name in names]
    return [name for name in METRICS if name in there] + list(dict.fromkeys(n for n in there if n not in METRICS))


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` runs with its 95 % interval, NaN where there is none."""

    n: int
    mean: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals have a number in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Difference:
    """How much more of a metric a method has than another, with interval and p, NaN where there are none."""

    method: str
    against: str
    n: int
    value: float
    low: float
    high: float
    p: float
    overlaps: bool

    def turned(self) -> Difference:
        """The same of the other method against this one."""
        return Difference(self.against, self.method, self.n, -self.value, -self.high, -self.low, self.p, self.overlaps)

    @property
    def sure(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def estimates(summary: pd.DataFrame, setting: str) -> dict[str, dict[str, Estimate]]:
    """The means by metric (its name in the table) and method."""
    found: dict[str, dict[str, Estimate]] = {}
    for row in summary[summary["scenario"] == setting].to_dict("records"):
        one = Estimate(int(row["n"]), *(_float(row[key]) for key in ("mean", "ci_low", "ci_high")))
        if math.isfinite(one.mean):
            found.setdefault(str(row["metric"]), {})[str(row["method"])] = one
    return {name: found[name] for name in ordered(found)}


def differences(table: pd.DataFrame, setting: str) -> dict[str, list[Difference]]:
    """The differences by metric (its name in the table), in the table's order."""
    if table.empty:
        return {}
    found: dict[str, list[Difference]] = {}
    test = tested(table)
    for row in table[table["scenario"] == setting].to_dict("records"):
        value, low, high, p = (_float(row[key]) for key in ("difference", "ci_low", "ci_high", test))
        zero = bool(pd.notna(row["overlaps"]) and row["overlaps"])
        one = Difference(str(row["method"]), str(row["against"]), int(row["n"]), value, low, high, p, zero)
        found.setdefault(str(row["metric"]), []).append(one)
    return {name: found[name] for name in ordered(found)}


TESTS = {"t_test_holm": "p, t-test, Holm", "t_test": "p, t-test", "p": "p"}
"""The columns that may hold the p-value, the first one being told, and their titles."""


def tested(table: pd.DataFrame) -> str:
    """The column that holds the p-value, by `TESTS`; UserError where there is none."""
    for name in TESTS:
        if name in table:
            return name
    raise UserError(f"differences: expected a column {' or '.join(TESTS)}, got {', '.join(map(str, table.columns))}")


def _float(value: object) -> float:
    return float(value) if pd.notna(value) else math.nan  # type: ignore[arg-type]


def final(summary: pd.DataFrame, setting: str, name: str = "average_performance") -> dict[str, Estimate]:
    """The means of a metric by method; empty where there are none."""
    return estimates(summary, setting).get(name, {})


def ranked(methods: Sequence[str], scores: Mapping[str, Estimate]) -> list[str]:
    """The methods by that metric, the highest first; those without it last, in their order."""
    return sorted(methods, key=lambda name: -scores[name].mean if name in scores else math.inf)


def level(methods: Sequence[str], scores: Mapping[str, Estimate]) -> list[str]:
    """Those of the methods whose mean is printed as that of the first one is, in the order of the scores."""
    told = format_fixed(scores[methods[0]].mean)
    return [name for name in scores if name in methods and format_fixed(scores[name].mean) == told]


def format_fixed(value: float, places: int = 2) -> str:
    """The number with so many decimals; "–" for NaN."""
    if not math.isfinite(value):
        return "–"
    text = f"{abs(value):,.{places}f}"
    return f"−{text}" if value < 0 and text.strip("0.,") else text


def shown(one: Estimate | None) -> str:
    """The mean with half of its interval, as in "90.92 ± 0.41"; both ends where the interval lies unevenly."""
    if one is None:
        return "–"
    if not one.sure:
        return format_fixed(one.mean)
    up, down = one.high - one.mean, one.mean - one.low
    if abs(up - down) > 1e-6 * max(1.0, abs(up)):
        return f"{format_fixed(one.mean)} ({spanned(one.low, one.high)})"
    return f"{format_fixed(one.mean)} ± {format_fixed(up)}"


def spanned(low: float, high: float) -> str:
    """An interval, as in "90.51 to 91.33"."""
    return f"{format_fixed(low)} to {format_fixed(high)}"
