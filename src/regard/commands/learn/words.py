"""Sentences and key figures of a report on continual learning, computed from its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.metrics import REFERENCES, Difference, Estimate, format_fixed
from regard.commands.learn.tables import SCENARIOS, Tables
from regard.report import labels
from regard.report.key_figure import KeyFigure
from regard.report.words import format_duration, format_signed, metadata_number

_SCENARIO_PHRASES = {"til": "With the task known (TIL)", "cil": "Among the classes of all tasks so far (CIL)"}
SCORE_NAMES = {"accuracy": "Accuracy", "rouge-l": "Rouge-L", "exact-match": "Exact match"}
MAX_WARNINGS = 4
"""Warnings of runs that a report repeats, at most."""


def stream_name(matrix: pd.DataFrame, metadata: Mapping[str, Any]) -> str:
    """Return the stream's name from the metadata, else from the matrix."""
    return str(labels.section(metadata, "stream").get("name") or matrix["stream"].iloc[0])


def write_ledes(tables: Tables, metadata: Mapping[str, Any]) -> list[str]:
    """Write what was trained, then the outcome of each scenario."""
    matrix = tables["matrix"]
    outcomes = [_write_outcome(tables, scenario) for scenario in learn_tables.find_scenarios(matrix)]
    return [_write_run(matrix, metadata), *outcomes]


def _write_run(matrix: pd.DataFrame, metadata: Mapping[str, Any]) -> str:
    num_runs = len(matrix[learn_tables.RUN_KEYS].drop_duplicates())
    orders = [str(order) for order in matrix["order"].unique()]
    parts = [pluralize(learn_tables.count_tasks(matrix), "task"), pluralize(matrix["method"].nunique(), "method")]
    parts += [pluralize(matrix["seed"].nunique(), "seed"), pluralize(num_runs, "run")]
    parts.append(f"order {orders[0]}" if len(orders) == 1 else f"{len(orders)} orders")
    model = labels.section(metadata, "model").get("name")
    protocol = labels.section(metadata, "stream").get("protocol")
    parts += [str(model)] if model else []
    parts += [f"protocol {protocol}"] if protocol else []
    return " · ".join(parts)


def _write_outcome(tables: Tables, scenario: str) -> str:
    """Compare the methods in one scenario: AP, paired difference, forgetting, upper bound."""
    scores = learn_metrics.final_estimates(tables["summary"], scenario)
    competitors = _rank_competitors(scores)
    if not competitors:
        return ""
    difference = _find_paired_difference(tables, scenario, competitors)
    sentences = [_write_ranking(competitors, scores), *([_write_difference(difference)] if difference else [])]
    sentences += _write_forgetting(tables, scenario, competitors)
    return f"{_SCENARIO_PHRASES[scenario]}: {' '.join(sentences)}"


def _rank_competitors(scores: Mapping[str, Estimate]) -> list[str]:
    """Rank the methods that learn task after task, highest mean first."""
    return [method for method in learn_metrics.rank_methods(list(scores), scores) if method not in REFERENCES]


def _write_ranking(competitors: Sequence[str], scores: Mapping[str, Estimate]) -> str:
    best, ties = scores[competitors[0]], learn_metrics.find_ties(competitors, scores)
    if len(competitors) == 1:
        return f"{competitors[0]} ends at AP {learn_metrics.format_estimate(best)}."
    next_best = "".join(
        f", before {method} with {learn_metrics.format_estimate(scores[method])}"
        for method in competitors[len(ties) :][:1]
    )
    if len(ties) > 1:
        return f"{join_names(ties)} end with the same AP, {format_fixed(best.mean)}{next_best}."
    overlap = describe_overlap(best, scores[competitors[1]])
    return f"{competitors[0]} has the highest AP, {learn_metrics.format_estimate(best)}{next_best}; {overlap}."


def join_names(names: Sequence[str], max_names: int = 4) -> str:
    """Join names as in "a, b and c"; names beyond `max_names` are counted."""
    rest = len(names) - max_names
    parts = [*names[:max_names], f"{rest} more"] if rest > 0 else list(names)
    return " and ".join([*([", ".join(parts[:-1])] if parts[:-1] else []), parts[-1]])


def describe_overlap(estimate: Estimate, other: Estimate) -> str:
    """Say whether two 95 % intervals overlap."""
    if not (estimate.has_interval and other.has_interval):
        return "there are no intervals, so this may be chance"
    return "the 95 % intervals overlap" if estimate.overlaps(other) else "the 95 % intervals do not overlap"


def _find_paired_difference(tables: Tables, scenario: str, competitors: Sequence[str]) -> Difference | None:
    """Find the difference of AP between the best method and the next one, else the first one; None at a tie."""
    if len(learn_metrics.find_ties(competitors, learn_metrics.final_estimates(tables["summary"], scenario))) > 1:
        return None
    table = learn_tables.get_table(tables, "differences")
    differences = learn_metrics.make_differences(table, scenario).get("average_performance", [])
    best = competitors[0]
    for other in (*competitors[1:2], learn_tables.method_names(tables["matrix"])[0]):
        for difference in differences:
            if {difference.method, difference.against} == {best, other} and difference.has_interval:
                return difference if difference.method == best else difference.reverse()
    return None


def _write_difference(difference: Difference) -> str:
    interval = f"{format_signed(difference.ci_low, 2)} to {format_signed(difference.ci_high, 2)}"
    zero = "which contains 0" if difference.overlaps else "which does not contain 0"
    value = format_signed(difference.value, 2)
    return (
        f"Paired by run, the difference to {difference.against} is {value} points (95 % interval {interval}, {zero})."
    )


def _write_forgetting(tables: Tables, scenario: str, competitors: Sequence[str]) -> list[str]:
    """Say which methods forget most and least, and the AP of joint training."""
    forgetting = learn_metrics.final_estimates(tables["summary"], scenario, "forgetting")
    scores = learn_metrics.final_estimates(tables["summary"], scenario)
    methods = learn_metrics.rank_methods([name for name in competitors if name in forgetting], forgetting)
    clauses = _compare_forgetting(methods, forgetting)
    if "joint" in scores:
        clauses.append(f"joint, {REFERENCES['joint']}, reaches AP {format_fixed(scores['joint'].mean)}")
    return [f"{'; '.join(clauses)}."] if clauses else []


def _compare_forgetting(methods: Sequence[str], forgetting: Mapping[str, Estimate]) -> list[str]:
    """Name the methods that forget least and most; `methods` starts with the one that forgets most."""
    if not methods:
        return []
    most = learn_metrics.find_ties(methods, forgetting)
    least = learn_metrics.find_ties(methods[::-1], forgetting)
    if len(most) == len(methods):
        same = "the same, " if most[1:] else ""
        return [f"{join_names(most)} {_forget(most)} {same}{format_fixed(forgetting[most[0]].mean)} points"]
    return [
        f"{join_names(names)} {_forget(names)} {extreme}, {format_fixed(forgetting[names[0]].mean)} points"
        f"{' each' if names[1:] else ''}"
        for names, extreme in ((least, "least"), (most, "most"))
    ]


def _forget(names: Sequence[str]) -> str:
    return "forget" if names[1:] else "forgets"


def write_warnings(tables: Tables, metadata: Mapping[str, Any]) -> list[str]:
    """Write one sentence for everything that makes the numbers incomplete, uncertain or biased."""
    matrix, notes = tables["matrix"], []
    unfinished = learn_tables.find_unfinished_runs(matrix)
    if unfinished:
        names = ", ".join(f"{method} with seed {seed} ({after})" for method, seed, after in unfinished[:3])
        more = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
        runs = pluralize(len(unfinished), "run")
        notes.append(f"{runs} without a score after the last task (tasks trained): {names}{more}.")
    if _max_runs(matrix) == 1:
        notes.append("One run of each method: there are no intervals, and differences may be chance.")
    pairs = matrix.groupby("method", sort=False)[["seed", "order"]].apply(
        lambda rows: frozenset(map(tuple, rows.values))
    )
    if pairs.nunique() > 1:
        notes.append("The methods were not run with the same seeds and orders.")
    if labels.section(metadata, "stream").get("protocol") == "paper":
        notes.append("Protocol paper: splits may share rows, and dev may be the test split: scores may be too high.")
    return [*notes, *_collect_run_warnings(metadata)]


def _max_runs(matrix: pd.DataFrame) -> int:
    return int(matrix[learn_tables.RUN_KEYS].drop_duplicates().groupby("method").size().max())


def _collect_run_warnings(metadata: Mapping[str, Any]) -> list[str]:
    """Collect the warnings in the metadata of the runs, at most `MAX_WARNINGS`."""
    warnings = [
        f"{run.get('method')}, seed {run.get('seed')}: {warning}"
        for run in metadata.get("runs") or []
        if isinstance(run, Mapping)
        for warning in run.get("warnings") or []
    ]
    rest = len(warnings) - MAX_WARNINGS
    return [*warnings[:MAX_WARNINGS], *([f"{pluralize(rest, 'warning')} more in results.json."] if rest > 0 else [])]


def make_key_figures(tables: Tables, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    """Make the highest AP and the least FGT of each scenario, then the stream's size and the time."""
    matrix, figures = tables["matrix"], []
    scenarios = learn_tables.find_scenarios(matrix)
    for scenario in scenarios:
        suffix = f", {SCENARIOS[scenario]}" if len(scenarios) > 1 else ""
        for name, extreme in (("average_performance", "highest"), ("forgetting", "least")):
            scores = learn_metrics.final_estimates(tables["summary"], scenario, name)
            methods = _rank_competitors(scores)
            if methods:
                title = f"{learn_metrics.get_metric(name).title}{suffix}"
                figures.append(_best_figure(title, extreme, methods[:: 1 if extreme == "highest" else -1], scores))
    return [*figures, _size_figure(matrix, metadata), *_time_figures(metadata)]


def _best_figure(title: str, extreme: str, methods: Sequence[str], scores: Mapping[str, Estimate]) -> KeyFigure:
    """Make the figure of the first method, or of all that tie with it."""
    ties = learn_metrics.find_ties(methods, scores)
    label = f"{title}, {extreme}" if len(ties) < len(methods) else title
    if len(ties) == 1:
        return KeyFigure(label, learn_metrics.format_estimate(scores[methods[0]]), methods[0])
    return KeyFigure(label, format_fixed(scores[methods[0]].mean), f"the same: {join_names(ties)}")


def _size_figure(matrix: pd.DataFrame, metadata: Mapping[str, Any]) -> KeyFigure:
    names = class_names(metadata)
    note = pluralize(len(names), "class", "classes") if names else ""
    return KeyFigure("Tasks", str(learn_tables.count_tasks(matrix)), note)


def class_names(metadata: Mapping[str, Any]) -> list[str]:
    """Return the classes of all tasks, each once."""
    return list(dict.fromkeys(str(label) for task in task_records(metadata) for label in task.get("labels") or []))


def task_records(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the metadata of each task."""
    tasks = labels.section(metadata, "stream").get("tasks") or []
    return [task for task in tasks if isinstance(task, Mapping)]


def score_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of the score of all tasks, "Score" where they differ."""
    metrics = {str(task.get("metric") or "accuracy") for task in task_records(metadata)} or {"accuracy"}
    return SCORE_NAMES.get(next(iter(metrics)), "Score") if len(metrics) == 1 else "Score"


def _time_figures(metadata: Mapping[str, Any]) -> list[KeyFigure]:
    seconds, memory = metadata_number(metadata, "cost", "seconds"), metadata_number(metadata, "cost", "peak_memory_mib")
    if seconds is None:
        return []
    device = labels.section(metadata, "cost").get("device")
    notes = [f"on {device}"] if device else []
    notes += [] if memory is None else [f"peak memory {labels.number(memory, 3)} MiB"]
    return [KeyFigure("Time", format_duration(seconds), ", ".join(notes))]


def describe_matrix(matrix: pd.DataFrame, score: str, *, omits_runs: bool) -> str:
    """Describe rows, columns and shading of the matrices; `score` names their unit."""
    positions = ""
    if not learn_tables.has_one_order(matrix):
        positions = " Orders differ between runs: the mean is by position in the stream."
    future = " Faint cells: tasks not yet trained." if len(learn_tables.select_trained(matrix)) < len(matrix) else ""
    means = " The page holds only means, to stay small; matrix.parquet has every run." if omits_runs else ""
    return f"{score} in per cent. Rows: tasks trained so far. Columns: the task scored.{future}{positions}{means}"


def describe_curves(matrix: pd.DataFrame, max_tasks: int, max_methods: int) -> str:
    """Describe lines and bands of the curves, and which tasks and methods they leave out."""
    num_methods, num_old_tasks = matrix["method"].nunique(), learn_tables.count_tasks(matrix) - 1
    band = "; band: 95 % interval (Student’s t)" if num_methods <= learn_tables.NUM_INKS else ""
    parts = [f"Means over runs{band}." if _max_runs(matrix) > 1 else "One run of each method."]
    if num_old_tasks > max_tasks:
        parts.append(f"{max_tasks} of the {num_old_tasks} old tasks are drawn, spread evenly.")
    if num_methods > max_methods:
        parts.append(f"Only the first {max_methods} of {num_methods} methods are drawn.")
    return " ".join(parts)


def pluralize(number: int, name: str, plural: str = "") -> str:
    """Return the number and the word, as in "3 tasks"."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"
