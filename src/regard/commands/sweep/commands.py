"""What a sweep needs to know of a verb: its settings, how it is run, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.errors import UserError
from regard.runs.config import Config
from regard.runs.output_dir import RESULTS

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

HISTORY = "history.parquet"


@dataclass(frozen=True)
class Field:
    """A setting: what a text means (raises UserError), and how the command line takes it."""

    parse: Callable[[str], Any]
    help: str = ""
    kind: Literal["value", "flag", "many"] = "value"


@dataclass(frozen=True)
class Command:
    """A verb that trials run.

    `base` gives the settings of a named starting point (None: the default one) or of a file; `complete` all settings
    from some, in terms of JSON, or raises UserError; `command` what python is to run, given a file of settings and the
    folder to write, going on with what is there; `finished` whether a folder holds the whole run of such settings;
    `row` its final numbers; `history` its curves; `page` and `summary` what compares them, given the table of trials
    and the record of the sweep. `options` are options of its command that are no settings, as paths of folders.
    """

    name: str
    fields: Mapping[str, Field]
    base: Callable[[str | None, Path | None], dict[str, Any]]
    complete: Callable[[Mapping[str, Any]], dict[str, Any]]
    command: Callable[[Path, Path], list[str]]
    finished: Callable[[Path, Mapping[str, Any]], bool]
    row: Callable[[Path], dict[str, Any]]
    history: Callable[[Path], pd.DataFrame]
    page: Callable[[pd.DataFrame, dict[str, Any], Mapping[str, pd.DataFrame]], str]
    summary: Callable[[pd.DataFrame, Mapping[str, Any]], RenderableType]
    names: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def whole(verb: str, folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a folder holds a finished run of the command with this configuration."""
    try:
        record = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("command") == verb and record.get("config") == dict(settings)


def fields_of(config: type[Config]) -> dict[str, Field]:
    """Return the fields of a configuration as settings of a sweep."""
    kinds: dict[str, Literal["value", "flag", "many"]] = {
        name: "many" if option.declared["repeated"] else "flag" if option.kind is bool else "value"
        for name, option in config.options().items()
    }
    return {
        name: Field(partial(config.parse_field, name), option.help, kinds[name])
        for name, option in config.options().items()
    }


def finals(folder: Path) -> dict[str, Any]:
    """The final numbers of a run, the step at which sinks emerged, and what it cost."""
    record = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    emergence, cost = record.get("emergence", {}), record.get("cost", {})
    return {
        **{name: value for name, value in record["final"].items() if isinstance(value, (int, float)) or value is None},
        "emergence_step": emergence.get("step"),
        **{name: cost.get(name) for name in ("seconds", "tokens_per_second")},
    }


def history(folder: Path) -> pd.DataFrame:
    """The curves of a run."""
    import pandas as pd

    return pd.read_parquet(folder / HISTORY)


def pretraining() -> Command:
    """`regard pretrain`."""
    from regard.commands.pretrain import config as recipes
    from regard.commands.sweep.page import sweep_page
    from regard.commands.sweep.terminal import sweep_summary
    from regard.data.corpus_sources import Source, check_source

    def base(name: str | None, file: Path | None) -> dict[str, Any]:
        return (recipes.PretrainConfig.from_file(file) if file else recipes.preset_config(name or "nano")).to_dict()

    def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
        for source in settings["data"]:
            check_source(Source.parse(source))
        return recipes.PretrainConfig.from_dict(settings).to_dict()

    return Command(
        name="pretrain",
        fields=fields_of(recipes.PretrainConfig),
        base=base,
        complete=complete,
        command=lambda file, folder: [
            *("-m", "regard", "pretrain", "--config", str(file), "--out", str(folder), "--resume", "--overwrite")
        ],
        finished=partial(whole, "pretrain"),
        row=finals,
        history=history,
        page=sweep_page,
        summary=sweep_summary,
        names=tuple(recipes.PRESETS),
        options={"cache": "where packed text is kept (default: $REGARD_CACHE, else ~/.cache/regard)"},
    )


def learning() -> Command:
    """`regard learn`, one method a trial; what each task has changed of the model is not kept."""
    from regard.commands.learn import config as courses
    from regard.commands.sweep.page import sweep_page
    from regard.commands.sweep.terminal import sweep_summary
    from regard.data.stream_catalog import STREAMS

    def base(name: str | None, file: Path | None) -> dict[str, Any]:
        return courses.LearnConfig.from_file(file).explicit_fields() if file else {"stream": name} if name else {}

    readable = cache(courses.LearnConfig.read)

    def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
        course = courses.LearnConfig.from_dict(settings)
        if len(courses.split_methods(course)) > 1:
            raise UserError(f"method: expected one in each trial, got {course.method}; vary method={course.method}")
        if course.stream not in STREAMS:
            readable(replace(course, method="finetune", set=()))
        return course.to_dict()

    return Command(
        name="learn",
        fields=fields_of(courses.LearnConfig),
        base=base,
        complete=complete,
        command=lambda file, folder: [
            *("-m", "regard", "learn", "--config", str(file), "--out", str(folder)),
            *("--resume", "--overwrite", "--no-save-models"),
        ],
        finished=partial(whole, "learn"),
        row=measures,
        history=averages,
        page=sweep_page,
        summary=sweep_summary,
        names=tuple(STREAMS),
    )


def measures(folder: Path) -> dict[str, Any]:
    """The measures of a run of learning, as `average_performance_til`, and what it cost."""
    from regard.commands.learn.result import LearnResult

    run = LearnResult.load(folder)
    found = run.metrics.dropna(subset="value")
    return {
        **{f"{row.metric}_{row.scenario}": float(row.value) for row in found.itertuples()},
        "seconds": run.metadata["cost"]["seconds"],
    }


def averages(folder: Path) -> pd.DataFrame:
    """The mean score of the tasks learnt so far, by `tasks` (how many): `average_performance_til`, `…_cil`."""
    from regard.commands.learn.result import LearnResult

    scores = LearnResult.load(folder).accuracy_matrix
    seen = scores[scores["task_index"] <= scores["after_task"]]
    means = seen.groupby(["after_task", "scenario"])["score"].mean().unstack()
    return means.add_prefix("average_performance_").rename_axis("tasks").reset_index()


COMMANDS: dict[str, Callable[[], Command]] = {"pretrain": pretraining, "learn": learning}
