"""A sweep as a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep import words
from regard.commands.sweep.means import Combination
from regard.report import labels
from regard.report.terminal import WIDTH, plain, summary
from regard.report.words import format_value

SEEDS, CELL = 8, 18
COLUMNS = (
    "valid_loss",
    "sink_rate",
    "alpha_first",
    "average_performance_til",
    "forgetting_til",
    "average_performance_cil",
)


def sweep_summary(trials: pd.DataFrame, record: Mapping[str, Any]) -> Group:
    """What matters most, for a terminal of 80 columns: means by combination, what differs, trials without a result.

    Raises UserError where there is no trial, a column is missing, or a trial stands twice.
    """
    sweep_means.check_trials(trials, record)
    found, metrics = sweep_means.combinations(trials, record), sweep_means.metrics(trials)
    first, *others = words.ledes(found, metrics, record, trials)
    blocks = [_means(found, metrics), _unfinished(trials, record)]
    return summary(words.title(record), [first], blocks, [*others, *words.warnings(found, trials, record)])


def _means(found: Sequence[Combination], metrics: Mapping[str, tuple[str, str]]) -> list[str]:
    """A line for each combination; the last metrics give way to long names."""
    shown = [metric for metric in COLUMNS if metric in metrics]
    longest = max(len(plain(one.name)) for one in found)
    while len(shown) > 1 and longest > _room(shown):
        shown.pop()
    if not shown:
        return []
    wide = min(max(longest, len(_HEAD)), _room(shown))
    titles = "".join(f"{metrics[metric][0]:>{CELL}}" for metric in shown)
    lines = [f"{_HEAD:<{wide}}{'seeds':>{SEEDS}}{titles}"]
    for one in found:
        means = (sweep_means.shown(sweep_means.mean(one.rows, metric), metrics[metric][1]) for metric in shown)
        cells = "".join(f"{cell:>{CELL}}" for cell in means)
        lines.append(f"{_shortened(plain(one.name), wide):<{wide}}{words.seeds_of(one):>{SEEDS}}{cells}")
    return lines


_HEAD = "combination"


def _room(shown: Sequence[str]) -> int:
    return WIDTH - SEEDS - CELL * len(shown)


def _shortened(name: str, wide: int) -> str:
    """The name, its middle left away where it is too long: combinations differ at both ends."""
    return name if len(name) <= wide else f"{name[: wide // 2]}…{name[len(name) - (wide - wide // 2 - 1) :]}"


def _unfinished(trials: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    lines = []
    for one in sweep_means.unfinished(trials, record):
        name = sweep_means.name_of(labels.section(one, "values"))
        why = format_value(one.get("error") or one.get("state"))
        lines.append(plain(f"{name}, seed {format_value(one.get('seed'))}: {why}"))
    return lines
