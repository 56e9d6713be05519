"""A line on the lengths of texts and answers: what was fitted, and what is cut."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.commands.learn.config import LearnConfig
from regard.continual.text_lengths import FITTED_SHARE, MAX_FITTED_LENGTH, fit_length
from regard.data.stream import Stream
from regard.models.pretrained import Loaded
from regard.report.labels import pluralize
from regard.runs.selection import list_some

LENGTHS = ("length", "target_length", "truncation_side")
"""Fields of the budget that say what a text may have; the last for prompts alone."""
FITTED_TASKS = "fitted_tasks"
"""Key in a run's metadata: to how many of its first tasks the length was fitted, if not to all."""
MAX_NAMED_TASKS = 5
"""Tasks named in the line, at most."""


def choose_length(by_method: Sequence[LearnConfig], stream: Stream, loaded: Loaded) -> int:
    """Return the length of some configurations, or one that fits the stream, with room for the prompts of methods."""
    length, target_length = by_method[0].length, by_method[0].target_length
    if length is not None:
        return length
    assert target_length is not None, "filled in by the scale"
    prompt_tokens = max(config.make_method().prompt_tokens(len(stream)) for config in by_method)
    return fit_length(stream, loaded, target_length, prompt_tokens)


def describe_lengths(runs: Sequence[Mapping[str, Any]]) -> str:
    """Describe what was fitted and what is cut in one line, from the metadata of one run of each seed.

    Empty if nothing was fitted and nothing is cut.
    """
    options = {"length": "texts", "target_length": "answers"}
    return "; ".join(filter(None, (_describe_option(runs, option, unit) for option, unit in options.items())))


def _describe_option(runs: Sequence[Mapping[str, Any]], option: str, unit: str) -> str:
    rows = [row for run in runs for row in run.get("truncation", []) if row["option"] == option]
    is_fitted = option == "length" and any(run.get("fitted") for run in runs)
    if not rows and not is_fitted:
        return ""
    flag, limits = option.replace("_", "-"), sorted({int(run[option]) for run in runs})
    name = f"{flag} {limits[0]}" if len(limits) == 1 else f"{flag} {limits[0]} to {limits[-1]}"
    texts_of, way = "each task's training texts", f"--{flag} allows more"
    if is_fitted and (first := _fitted_to(runs)):
        texts_of = f"the training texts of {first}, with which the run began"
        way = f"--{flag} of a run that begins with all tasks allows more"
    if is_fitted:
        name += f", fitted to {100 * FITTED_SHARE:.0f} % of {texts_of} (at most {MAX_FITTED_LENGTH}),"
    if not rows:
        return f"{name} cuts no text"
    texts, tokens = (_percent(_share(rows, what)) for what in ("rows", "tokens"))
    part, most = (_describe_side(runs), " up to what the model takes") if option == "length" else ("", "")
    longest = max(row["longest"] for row in rows)
    return (
        f"{name} cuts {texts} of the {unit} and {tokens} of their tokens{part}: {_list_tasks(rows)}; "
        f"the longest has {longest:,} tokens, {way}{most}"
    )


def _fitted_to(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say to how many of the first tasks a length was fitted; "" for all."""
    count = max((int(run.get(FITTED_TASKS, 0)) for run in runs), default=0)
    return f"the first {pluralize(count, 'task')}" if count else ""


def _describe_side(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say where prompts are cut; "" for their ends."""
    side = next((str(run["truncation_side"]) for run in runs if "truncation_side" in run), "right")
    return {"right": "", "middle": " from the middle", "left": " from the beginning"}[side]


def _list_tasks(rows: Sequence[Mapping[str, Any]]) -> str:
    """List the tasks of which something is cut, with the share of their texts, the largest first."""
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_task.setdefault(str(row["task"]), []).append(row)
    shares = {task: _share(task_rows, "rows") for task, task_rows in by_task.items()}
    cut = sorted((task for task in shares if shares[task]), key=lambda task: -shares[task])
    return list_some([f"{task} {_percent(shares[task])}" for task in cut], MAX_NAMED_TASKS)


def _share(rows: Sequence[Mapping[str, Any]], what: str) -> float:
    return sum(row[what] for row in rows) / sum(row[f"num_{what}"] for row in rows)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.005 else "under 1 %"
