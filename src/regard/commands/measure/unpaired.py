"""Which rows of several measurements have no counterpart, and why."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from regard.report.labels import site as site_name
from regard.runs.selection import list_some

MAX_NAMES = 8


class RowKey(NamedTuple):
    """What a row of a comparison is of; `scope` says what its value is a mean of."""

    statistic: str
    site: str
    epsilon: float | None
    scope: str
    position: int | None

    @property
    def measure(self) -> tuple[str, str]:
        """Statistic and site."""
        return self.statistic, self.site


def list_unpaired(runs: Mapping[str, Sequence[RowKey]]) -> list[str]:
    """Say which rows not every run has, one sentence for each reason: sites, statistics, thresholds, positions."""
    sites = {name: list(dict.fromkeys(key.site for key in rows)) for name, rows in runs.items()}
    shared = set.intersection(*map(set, sites.values()))
    notes = []
    if any(set(of_run) != shared for of_run in sites.values()):
        described = "; ".join(
            f"{name}: {', '.join(map(site_name, of_run)) or 'none'}" for name, of_run in sites.items()
        )
        notes.append(f"Rows of sites that not every run has are not compared ({described}).")
    measured = {name: {key.measure for key in rows if key.site in shared} for name, rows in runs.items()}
    for name, pairs in measured.items():
        if lacks := sorted({statistic for statistic, _ in set.union(*measured.values()) - pairs}):
            notes.append(f"{name} has no rows of {list_some(lacks, MAX_NAMES)}, which are not compared.")
    return [*notes, *_describe_others(runs, set.intersection(*measured.values()))]


def _describe_others(runs: Mapping[str, Sequence[RowKey]], measured: set[tuple[str, str]]) -> list[str]:
    """Return sentences on what all runs have measured, but not all at the same thresholds, positions or means."""
    keys = [{key for key in rows if key.measure in measured} for rows in runs.values()]
    others = {key for key in set[RowKey]().union(*keys) if not all(key in of_run for of_run in keys)}
    thresholds = {key.statistic for key in others if key.epsilon is not None}
    notes = []
    for statistic in sorted(thresholds):
        described = "; ".join(f"{name}: {_thresholds(statistic, rows)}" for name, rows in runs.items())
        notes.append(f"Rows of {statistic} at thresholds that not every run has are not compared ({described}).")
    if rest := sorted({key.statistic for key in others} - thresholds):
        named = list_some(rest, MAX_NAMES)
        notes.append(f"Rows of {named} are not compared: they are of other positions in the runs, or other means.")
    return notes


def _thresholds(statistic: str, rows: Iterable[RowKey]) -> str:
    values = {key.epsilon for key in rows if key.statistic == statistic and key.epsilon is not None}
    return ", ".join(f"{value:g}" for value in sorted(values))
