"""What differs between runs of learn, replace or pretrain: their settings, and their main figures."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from regard.commands.compare.curves import TASK_NOTE, compare_tasks, make_curves
from regard.commands.convert.result import ConvertResult
from regard.commands.learn.result import LearnResult
from regard.commands.measure.result import MeasureResult
from regard.commands.pretrain.result import PretrainResult
from regard.commands.replace.result import ReplaceResult
from regard.report import page
from regard.report.labels import number
from regard.runs.intervals import ROUNDING, TINY, seed_difference, t_interval
from regard.runs.output_dir import RESULTS, read_json
from regard.runs.result import RunResult
from regard.runs.selection import list_some

KINDS: dict[str, type[RunResult]] = {
    kind.command: kind for kind in (MeasureResult, ReplaceResult, PretrainResult, ConvertResult, LearnResult)
}
COMPARED = ("config", "model", "data", "task", "stream", "beyond_stream", "versions", "version")
"""Sections of the metadata in which runs may differ; the others say when a run was made, and what came of it."""
MAX_SETTINGS = 60
"""Settings that are shown."""
_PLACE = "position"
"""How figures end of which no difference is meant."""
MAX_NAMES, BETWEEN = 8, "; "  # names of figures have commas
"""Figures that a note names."""
_HASH_NAME = re.compile(r"(.*)\.(?:digest|\w*sha256(?:\.\w+)?)")
"""How the path of a hash ends, perhaps with the rows that it is of; tasks may be called as they like."""
_SPLIT_SEED = re.compile(r" (drawn|held out) with seed \d+")
"""How a task's source names the seed of its parts."""
HASH = 12
"""Characters shown of a hash, which has at least thrice as many."""


def result_class(folder: Path) -> type[RunResult]:
    """Return the class of the result in a folder; that of `measure` without one, whose error names the folder."""
    path = folder / RESULTS
    command = read_json(path).get("command") if path.is_file() else None
    return KINDS.get(str(command), MeasureResult)


def compare_settings(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """Return the settings that differ, a row each with a column per run; "–" where a run has none of it.

    Tasks of a stream that not all runs have are named, without what is known of each.
    """
    by_run = _settings_by_run(runs)
    outcomes = {"model.sha256"} if all(run.command == PretrainResult.command for run in runs.values()) else set()
    names = dict.fromkeys(name for settings in by_run.values() for name in settings)
    rows = {name: {run: settings.get(name, "–") for run, settings in by_run.items()} for name in names}
    different = {name: values for name, values in rows.items() if len({*values.values()}) > 1 and name not in outcomes}
    shown = {name: values for name, values in different.items() if not _says_no_more(name, values, different)}
    return pd.DataFrame([{"setting": name, **values} for name, values in shown.items()], columns=["setting", *runs])


def _settings_by_run(runs: Mapping[str, RunResult]) -> dict[str, dict[str, str]]:
    """Return the settings of each run by their path; if not all have the same tasks, without those of single tasks."""
    tasks = {name: _task_names(run) for name, run in runs.items()}
    first, *others = map(set, tasks.values())
    partial = first.union(*others) - first.intersection(*others)
    return {
        name: ({"stream.tasks": ", ".join(tasks[name])} if partial else {})
        | {key: value for key, value in _flatten(run.metadata) if not _is_of_task(key, partial)}
        | _all_seeds(run)
        for name, run in runs.items()
    }


def _says_no_more(name: str, values: Mapping[str, str], different: Mapping[str, Any]) -> bool:
    """Return whether other settings that differ say all that this one does.

    What differs in the same part says more than its hash, and the seed more than the seed in the source of a task.
    """
    part = _part_with_hash(name)
    if part and any(other.startswith(f"{part}.") and _part_with_hash(other) is None for other in different):
        return True
    return "seed" in different and len({_SPLIT_SEED.sub("", value) for value in values.values()}) == 1


def _all_seeds(run: RunResult) -> dict[str, str]:
    """Return the seeds of a run of learning; its config has only the first."""
    seeds = dict.fromkeys(str(part["seed"]) for part in run.metadata.get("runs") or [] if "seed" in part)
    return {"seed": ", ".join(seeds)} if seeds else {}


def _part_with_hash(setting: str) -> str | None:
    """Return the part of the metadata that a hash is of, as `stream.tasks.TASK`; None where it is no hash."""
    match = _HASH_NAME.fullmatch(setting)
    return match and match[1]


def _task_names(run: RunResult) -> list[str]:
    return [task["name"] for task in run.metadata.get("stream", {}).get("tasks", [])]


def _is_of_task(setting: str, tasks: Collection[str]) -> bool:
    """Return whether a setting is one of the stream's parts by task, `stream.PART.TASK`, for one of some tasks."""
    section, _, rest = setting.partition(".")
    name = rest.partition(".")[2]
    return section == "stream" and any(name == task or name.startswith(f"{task}.") for task in tasks)


def compare_figures(runs: Mapping[str, Any]) -> pd.DataFrame:
    """Return the main figures, a row each: the mean of each run, and each run minus the first with its 95 % interval.

    Differences are of pairs of the seeds that both runs have, else of independent means (`seed_difference` says when);
    ± is half of the interval, NaN with a single seed.
    """
    figures = _figures_by_run(runs)
    keys = dict.fromkeys(key for by_name in figures.values() for key in by_name)
    first, *others = runs
    rows = []
    for key in keys:
        values = {name: figures[name].get(key, {}) for name in runs}
        row: dict[str, Any] = {"figure": key}
        row |= {name: _rounded_off(t_interval(list(of.values())).mean) for name, of in values.items()}
        for name in others:
            column = "difference" if len(others) == 1 else f"{name} − {first}"
            is_place = str(key).endswith(_PLACE)
            values_of_both = ({}, {}) if is_place else (values[name], values[first])
            value, margin = seed_difference(*values_of_both)[:2]
            largest = max(abs(row[name]), abs(row[first]))
            row[column] = _rounded_off(value, largest)
            row[f"± {name}" if len(others) > 1 else "±"] = margin
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.drop(columns=[name for name in table if str(name)[0] == "±" and table[name].isna().all()])


def _rounded_off(value: float, largest: float = 0.0) -> float:
    """Return 0 for what rounding left of equal scores, as −4e-15 points of forgetting, or of sums of so `largest`."""
    return 0.0 if abs(value) <= max(TINY, ROUNDING * largest) else value


def _figures_by_run(runs: Mapping[str, Any]) -> dict[str, dict[str, dict[Any, float]]]:
    """Return each run's main figures by name and seed.

    Names of runs of learning that have one method each, not all the same, are without it: it is a setting that differs.
    """
    figures = {name: run.figures_by_seed() for name, run in runs.items()}
    methods = {name: set(map(_first_part, of)) for name, of in figures.items()}
    is_learn = all(run.command == LearnResult.command for run in runs.values())
    if is_learn and all(len(of) == 1 for of in methods.values()) and len(set.union(*methods.values())) > 1:
        return {
            name: {figure.partition(", ")[2]: values for figure, values in of.items()} for name, of in figures.items()
        }
    return figures


def describe_difference(first: str, second: str) -> str:
    """Say which of two runs a difference is from."""
    return f"difference is {second} − {first}"


def list_notes(runs: Mapping[str, RunResult], settings: pd.DataFrame, figures: pd.DataFrame) -> list[str]:
    """Say how many settings are not shown, and what chance has to do with the figures."""
    more = len(settings) - MAX_SETTINGS
    notes = [f"{more} more settings differ; the pages of the runs have all"] if more > 0 else []
    if not len(settings):
        notes.append("no setting differs")
    if len({frozenset(_task_names(run)) for run in runs.values()}) > 1:
        notes.append("the runs are of different tasks; their figures are means over these")
    by_run = _figures_by_run(runs)
    notes += _describe_gaps(by_run)
    first, *others = map(set, by_run.values())
    if not any(first & other for other in others):
        return [*notes, "no figure is of the first run and another, so nothing is compared"]
    command = next(iter(runs.values())).command
    if command in _OF_ONE_SEED:
        return [*notes, f"figures are of one seed each{_OF_ONE_SEED[command]}"]
    margin = "; ±: half of the 95 % interval" if any(str(name)[0] == "±" for name in figures) else ""
    orders = ", with their orders of tasks," if command == LearnResult.command else ""
    paired = f"differences are of the seeds{orders} that both have, if most are"
    return [*notes, f"figures are means over seeds; {paired}{margin}"]


_OF_ONE_SEED = {
    PretrainResult.command: ": `regard sweep pretrain --num-seeds` has intervals",
    ConvertResult.command: "; the pages of the runs have intervals over held-out sequences",
}
"""Where intervals are of runs that have one seed each."""


def _describe_gaps(figures: Mapping[str, Mapping[str, Mapping[Any, float]]]) -> list[str]:
    """Say of each run which figures it shows as –: those that are no number for some seed, and those that it lacks."""
    notes, all_names = [], dict.fromkeys(name for of_run in figures.values() for name in of_run)
    for run, of_run in figures.items():
        undefined = [
            name for name, values in of_run.items() if any(not math.isfinite(value) for value in values.values())
        ]
        if undefined:
            why = "a loss that diverged, or a score that these predictions do not have, as a correlation of equal ones"
            notes.append(
                f"{run}: {list_some(undefined, MAX_NAMES, BETWEEN)} is not a finite number for at least one seed "
                f"({why})"
            )
        parts = {_first_part(name) for name in of_run}
        lacks = dict.fromkeys(
            name if _first_part(name) in parts else _first_part(name) for name in all_names if name not in of_run
        )
        if lacks:
            notes.append(f"{run} has no {list_some([*lacks], MAX_NAMES, BETWEEN)}")
    return notes


def _first_part(figure: str) -> str:
    """Return the method, or model, that a figure is of: all before the first comma."""
    return figure.partition(", ")[0]


def make_page(runs: Mapping[str, RunResult], settings: pd.DataFrame, figures: pd.DataFrame) -> str:
    """Return the comparison as one HTML file that loads nothing."""
    panels, scores = make_curves(runs), compare_tasks(runs)
    curves = [page.Section("curves", "Curves", [page.Panels(panels, "curves", fit=True)])] if panels else []
    gaps = _describe_gaps(_figures_by_run(runs))
    notes = [note for note in list_notes(runs, settings.head(MAX_SETTINGS), figures) if note not in gaps]
    notes += [describe_difference(*runs)] if len(runs) == 2 else []
    about = " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)
    sections = [
        page.Section("figures", "Main figures", [_page_table(figures)], about),
        *curves,
        *([page.Section("tasks", "Scores by task", [_page_table(scores)], TASK_NOTE)] if len(scores) else []),
        page.Section("settings", "Settings that differ", [_page_table(settings)]),
    ]
    ledes = [f"{name}: regard {run.command}, version {run.metadata.get('version')}" for name, run in runs.items()]
    return page.Page("Regard · comparison", " against ".join(runs), ledes, sections, warnings=gaps).html()


def _page_table(table: pd.DataFrame) -> page.Table:
    rows = [
        (str(name), "", [number(value) if isinstance(value, float) else str(value) for value in values])
        for name, *values in table.itertuples(index=False)
    ]
    return page.Table(rows, [str(column) for column in table.columns], str(table.columns[0]) if len(table) else "")


def _flatten(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run by their path, as texts; hashes are shortened."""
    pending = [(name, metadata[name]) for name in COMPARED if name in metadata]
    while pending:
        path, value = pending.pop(0)
        if isinstance(value, Mapping):
            pending[:0] = [(f"{path}.{name}", part) for name, part in value.items()]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            names = [str(part.get("name", index)) for index, part in enumerate(value)]
            pending[:0] = [(f"{path}.{name}", part) for name, part in zip(names, value, strict=True)]
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            is_hash = len(text) >= 3 * HASH and all(letter in "0123456789abcdef" for letter in text)
            yield path.removeprefix("config."), text[:HASH] if is_hash else text
