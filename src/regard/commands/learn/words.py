"""What a report on continual learning says in words and key figures; every sentence is computed from the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.metrics import REFERENCES, Difference, Estimate, format_fixed
from regard.commands.learn.tables import SETTINGS, Tables
from regard.report import labels
from regard.report.key_figure import KeyFigure
from regard.report.words import format_duration, format_signed, metadata_number


def title(matrix: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """The stream's name in the record, else in the matrix."""
    return str(labels.section(record, "stream").get("name") or matrix["stream"].iloc[0])


def ledes(tables: Tables, record: Mapping[str, Any]) -> list[str]:
    """What was learnt with what, then for each setting who kept most and whether the intervals overlap."""
    matrix = tables["matrix"]
    return [_run(matrix, record), *(_found(tables, setting) for setting in learn_tables.settings(matrix))]


def _run(matrix: pd.DataFrame, record: Mapping[str, Any]) -> str:
    runs, orders = len(matrix[learn_tables.RUN].drop_duplicates()), [str(one) for one in matrix["order"].unique()]
    parts = [count(learn_tables.count_tasks(matrix), "task"), count(matrix["method"].nunique(), "method")]
    parts += [count(matrix["seed"].nunique(), "seed"), count(runs, "run")]
    parts.append(f"order {orders[0]}" if len(orders) == 1 else f"{len(orders)} orders")
    protocol = labels.section(record, "stream").get("protocol")
    parts += [str(labels.section(record, "model")["name"])] if labels.section(record, "model").get("name") else []
    parts += [f"protocol {protocol}"] if protocol else []
    return " · ".join(parts)


def _found(tables: Tables, setting: str) -> str:
    """Who ends highest and who is next, what paired runs say of it, who forgets, and what is the bound."""
    scores = learn_metrics.final(tables["summary"], setting)
    rivals = [name for name in learn_metrics.ranked(list(scores), scores) if name not in REFERENCES]
    if not rivals:
        return ""
    told = [_most(rivals, scores), *_paired(tables, setting, rivals), *_rest(tables, setting, rivals)]
    return f"{_HOW[setting]}: {' '.join(told)}"


_HOW = {"til": "With the task known (TIL)", "cil": "Among the classes of all tasks so far (CIL)"}


def _most(rivals: Sequence[str], scores: Mapping[str, Estimate]) -> str:
    best, level = scores[rivals[0]], learn_metrics.level(rivals, scores)
    if len(rivals) == 1:
        return f"{rivals[0]} ends at AP {learn_metrics.shown(best)}."
    following = "".join(
        f", before {name} with {learn_metrics.shown(scores[name])}" for name in rivals[len(level) :][:1]
    )
    if len(level) > 1:
        return f"{listed(level)} end with the same AP, {format_fixed(best.mean)}{following}."
    return f"{rivals[0]} keeps most, AP {learn_metrics.shown(best)}{following}; {between(best, scores[rivals[1]])}."


def listed(names: Sequence[str], most: int = 4) -> str:
    """The names as in "a, b and c"; beyond so many the number of the others."""
    rest = len(names) - most
    shown = [*names[:most], f"{rest} more"] if rest > 0 else list(names)
    return " and ".join([*([", ".join(shown[:-1])] if shown[:-1] else []), shown[-1]])


def between(one: Estimate, other: Estimate) -> str:
    """Whether two intervals overlap, said plainly."""
    if not (one.sure and other.sure):
        return "there are no intervals, so it may be chance"
    return "the 95 % intervals overlap" if one.overlaps(other) else "the 95 % intervals do not overlap"


def _paired(tables: Tables, setting: str, rivals: Sequence[str]) -> list[str]:
    """What the best method has run by run more than the next one; than the first, if the table has no more.

    Nothing where several share the highest AP.
    """
    if len(learn_metrics.level(rivals, learn_metrics.final(tables["summary"], setting))) > 1:
        return []
    every = learn_metrics.differences(learn_tables.table(tables, "differences"), setting).get("average_performance", [])
    others = dict.fromkeys([*rivals[1:2], learn_tables.methods(tables["matrix"])[0]])
    found = [_between(every, rivals[0], other) for other in others]
    return [_difference(one) for one in found if one is not None and one.sure][:1]


def _between(every: Sequence[Difference], best: str, other: str) -> Difference | None:
    """The difference between two methods, the best one's less the other's, whichever way the table has it."""
    for one in every:
        if (one.method, one.against) == (best, other):
            return one
        if (one.method, one.against) == (other, best):
            return one.turned()
    return None


def _difference(one: Difference) -> str:
    """How much more one method has than another run by run, and whether the interval holds 0."""
    span = f"95 % interval {format_signed(one.low, 2)} to {format_signed(one.high, 2)}"
    zero = "which holds 0" if one.overlaps else "which does not hold 0"
    return f"Run by run that is {format_signed(one.value, 2)} points against {one.against} ({span}, {zero})."


def _rest(tables: Tables, setting: str, rivals: Sequence[str]) -> list[str]:
    """Who forgets most and least, and where joint training ends."""
    lost = learn_metrics.final(tables["summary"], setting, "forgetting")
    scores = learn_metrics.final(tables["summary"], setting)
    ours = learn_metrics.ranked([name for name in rivals if name in lost], lost)
    told = _extremes(ours, lost)
    told += (
        [f"joint, {REFERENCES['joint']}, reaches AP {format_fixed(scores['joint'].mean)}"] if "joint" in scores else []
    )
    return [f"{'; '.join(told)}."] if told else []


def _extremes(ours: Sequence[str], lost: Mapping[str, Estimate]) -> list[str]:
    """Who of the methods, those that forget more first, forgets least and most; that they are level if all are."""
    if not ours:
        return []
    most, least = learn_metrics.level(ours, lost), learn_metrics.level(ours[::-1], lost)
    if len(most) == len(ours):
        return [
            f"{listed(most)} {_forgets(most)} {'the same, ' if most[1:] else ''}"
            f"{format_fixed(lost[most[0]].mean)} points"
        ]
    return [
        f"{listed(names)} {_forgets(names)} {how}, {format_fixed(lost[names[0]].mean)} points"
        f"{' each' if names[1:] else ''}"
        for names, how in ((least, "least"), (most, "most"))
    ]


def _forgets(names: Sequence[str]) -> str:
    return "forget" if names[1:] else "forgets"


def warnings(tables: Tables, record: Mapping[str, Any]) -> list[str]:
    """What keeps the numbers from being complete, sure or clean, one sentence each."""
    matrix, notes = tables["matrix"], []
    left = learn_tables.unfinished(matrix)
    if left:
        which = ", ".join(f"{method} with seed {seed} ({after})" for method, seed, after in left[:3])
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        notes.append(f"{count(len(left), 'run')} without a score after the last task (tasks learnt): {which}{more}.")
    runs = matrix[learn_tables.RUN].drop_duplicates().groupby("method", sort=False).size()
    if runs.max() == 1:
        notes.append("One run of each method: there are no intervals, and differences may be chance.")
    pairs = matrix.groupby("method", sort=False)[["seed", "order"]].apply(
        lambda rows: frozenset(map(tuple, rows.values))
    )
    if pairs.nunique() > 1:
        notes.append("The methods were not run with the same seeds and orders.")
    if labels.section(record, "stream").get("protocol") == "paper":
        notes.append("Protocol paper: rows in two splits are kept and dev is the split scored: scores may be too high.")
    return [*notes, *_of_runs(record)]


def _of_runs(record: Mapping[str, Any]) -> list[str]:
    """What the runs themselves warn of, each with its method and seed; the first few of many."""
    runs = [one for one in record.get("runs") or [] if isinstance(one, Mapping)]
    told = [
        f"{one.get('method')}, seed {one.get('seed')}: {warning}"
        for one in runs
        for warning in one.get("warnings") or []
    ]
    more = [f"{count(len(told) - WARNED, 'warning')} more in results.json."] if len(told) > WARNED else []
    return [*told[:WARNED], *more]


WARNED = 4
"""The most warnings of runs that a report repeats."""


def key_figures(tables: Tables, record: Mapping[str, Any]) -> list[KeyFigure]:
    """By setting the highest AP and the least FGT of methods that learn in order; then size and time."""
    matrix, figures = tables["matrix"], []
    several = len(learn_tables.settings(matrix)) > 1
    for setting in learn_tables.settings(matrix):
        where = f", {SETTINGS[setting]}" if several else ""
        for name, end in (("average_performance", "highest"), ("forgetting", "least")):
            scores = learn_metrics.final(tables["summary"], setting, name)
            order = [one for one in learn_metrics.ranked(list(scores), scores) if one not in REFERENCES]
            if order:
                title = f"{learn_metrics.metric(name).title}{where}"
                figures.append(_best(title, end, order if end == "highest" else order[::-1], scores))
    return [*figures, *_size(matrix, record), *_time(record)]


def _best(title: str, end: str, order: Sequence[str], scores: Mapping[str, Estimate]) -> KeyFigure:
    """The value at an end of the order and whose it is; of no end where all methods have it."""
    level = learn_metrics.level(order, scores)
    label = f"{title}, {end}" if len(level) < len(order) else title
    if len(level) == 1:
        return KeyFigure(label, learn_metrics.shown(scores[order[0]]), order[0])
    return KeyFigure(label, format_fixed(scores[order[0]].mean), f"the same: {listed(level)}")


def _size(matrix: pd.DataFrame, record: Mapping[str, Any]) -> list[KeyFigure]:
    every = classes(record)
    tasks = learn_tables.count_tasks(matrix)
    return [KeyFigure("Tasks", str(tasks), count(len(every), "class", "classes") if every else "")]


def classes(record: Mapping[str, Any]) -> list[str]:
    """The classes of all tasks in the record, each name once."""
    told = [one.get("labels") or [] for one in tasks(record)]
    return list(dict.fromkeys(str(label) for of_task in told for label in of_task))


def tasks(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the record tells of each task."""
    found = labels.section(record, "stream").get("tasks") or []
    return [one for one in found if isinstance(one, Mapping)]


MEASURES = {"accuracy": "Accuracy", "rouge-l": "Rouge-L", "exact-match": "Exact match"}


def measure(record: Mapping[str, Any]) -> str:
    """What tasks are scored by: accuracy, or what answers that are written are graded by."""
    found = {str(one.get("metric") or "accuracy") for one in tasks(record)} or {"accuracy"}
    return MEASURES.get(next(iter(found)), "Score") if len(found) == 1 else "Score"


def _time(record: Mapping[str, Any]) -> list[KeyFigure]:
    seconds, memory = metadata_number(record, "cost", "seconds"), metadata_number(record, "cost", "peak_memory_mib")
    if seconds is None:
        return []
    device = labels.section(record, "cost").get("device")
    parts = [f"on {device}"] if device else []
    parts += [] if memory is None else [f"peak memory {labels.number(memory, 3)} MiB"]
    return [KeyFigure("Time", format_duration(seconds), ", ".join(parts))]


def about_matrix(matrix: pd.DataFrame, scored: str, *, left_out: bool) -> str:
    """How to read the matrices, of what tasks are `scored` by."""
    places = "" if learn_tables.agree(matrix) else " Orders differ between runs, so the mean is by place in the stream."
    zero = " Faint cells: tasks not yet learnt." if len(learn_tables.learnt(matrix)) < len(matrix) else ""
    room = " To keep the page small it holds the means only; matrix.parquet has every run." if left_out else ""
    return f"{scored} in per cent: a row for each number of tasks learnt, a column for each task.{zero}{places}{room}"


def about_curves(matrix: pd.DataFrame, shown_tasks: int, drawn: int) -> str:
    """What lines and bands are."""
    several = matrix[learn_tables.RUN].drop_duplicates().groupby("method").size().max() > 1
    band = "; band: 95 % interval (Student’s t)" if matrix["method"].nunique() <= learn_tables.INKS else ""
    parts = [f"Means over runs{band}." if several else "One run of each method."]
    old = learn_tables.count_tasks(matrix) - 1
    parts += [f"{shown_tasks} of the {old} old tasks are drawn, spread evenly."] if old > shown_tasks else []
    known = matrix["method"].nunique()
    parts += [f"Only the first {drawn} of {known} methods are drawn."] if known > drawn else []
    return " ".join(parts)


def count(number: int, name: str, plural: str = "") -> str:
    """The number and the word, as in "3 tasks"."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"
