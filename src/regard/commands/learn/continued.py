"""A finished run of `regard learn` that another goes on with, by a task or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from regard.commands.learn.config import AS_GIVEN, HOW_MODELS_ARE_SAVED, LearnConfig
from regard.commands.learn.heads import HEAD
from regard.commands.learn.identity import BEYOND, TOKENIZER
from regard.commands.learn.one_run import Run
from regard.commands.learn.recorded import parse_setting, write_setting
from regard.commands.learn.references import LORA
from regard.commands.learn.result import MODELS, LearnResult
from regard.continual.earlier_tasks import KEPT, EarlierTasks
from regard.continual.methods import method_named
from regard.continual.models import LINEAGE
from regard.continual.run_state import TABLES
from regard.data.stream import Stream
from regard.data.stream_catalog import STREAMS
from regard.errors import UserError, warn_user
from regard.models.pretrained import Loaded
from regard.runs.config import read_results
from regard.runs.integrity import SEAL
from regard.runs.output_dir import read_json

CONTINUED = "continued"
"""Key in the metadata: the runs that this one went on with, the first first."""


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run with its folder."""

    folder: Path
    result: LearnResult

    @classmethod
    def load(cls, folder: str | Path) -> FinishedRun:
        """Read the folder. Raises UserError if it has no finished run of `regard learn`."""
        return cls(Path(folder), LearnResult.load(folder))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(int(run["seed"]) for run in self.result.metadata["runs"]))

    def configure(self, stream: Any, method: Any, seeds: Any, arguments: Mapping[str, Any]) -> LearnConfig:
        """Return the run's configuration with the new tasks behind its stream. Raises UserError for other changes."""
        runs = self.result.metadata["runs"]
        config = _without_unread(LearnConfig.from_dict(self.result.metadata["config"]))
        metrics = {task["metric"] for task in self.result.metadata["stream"]["tasks"] if task.get("metric")}
        side = runs[0].get("truncation_side", "right")  # which runs had that do not name it
        if metrics and side != config.side:
            config = config.replace(truncation_side=side)
        for name, value in {"method": method, "seeds": seeds}.items():
            if value is not None:
                raise UserError(f"{name}: expected none with a run to go on with, which has its own")
        changes = {name: value for name, value in arguments.items() if name not in ("stream", "method", "model")}
        if isinstance(arguments.get("model"), str):  # perhaps at another place; `check_model` compares the weights
            changes["model"] = arguments["model"]
        for name, value in changes.items():
            if name not in {"model", *LearnConfig.resumable} and value != getattr(config, name):
                problem = f"expected that of {self.folder}, which is gone on with, got {value!r}"
                raise UserError(f"{name.replace('_', '-')}: {problem}")
        if isinstance(stream, Stream):
            return config.replace(**changes, stream=stream.name, order=AS_GIVEN)
        if config.order == AS_GIVEN:
            raise UserError(f"stream: expected all tasks as one Stream, as {self.folder} was over a Stream")
        if config.metric == "auto" and len(metrics) == 1 and not STREAMS.keys() & set(config.parts):
            changes["metric"] = metrics.pop()  # by which the earlier tasks were scored
        return config.replace(**changes, stream=f"{config.stream},{stream}")

    def check_model(self, loaded: Loaded, tokenizer: str) -> None:
        """Check that the model is that of the run, and by its hash the tokenizer. Raises UserError."""
        model = self.result.metadata["model"]
        if model["sha256"] != loaded.sha256:
            expected = f"{model['name']} with weights {str(model['sha256'])[:12]}"
            got = f"{loaded.name} with {str(loaded.sha256)[:12]}"
            raise UserError(f"continue: expected the model that the run began with, {expected}; got {got}")
        if model.get(TOKENIZER, tokenizer) != tokenizer:
            warn_user(
                f"continue: the tokenizer of {loaded.name} is another than {self.folder} began with, or was read by "
                "another version of its library: texts may have other tokens"
            )

    def check_beyond(self, now: Mapping[str, str]) -> None:
        """Check that what is measured beyond the stream, by its hashes, is as it was. Raises UserError."""
        before = self.result.metadata.get(BEYOND, {})
        if changed := sorted(path for path in before if before[path] != now.get(path)):
            raise UserError(f"continue: expected {changed[0]} as {self.folder} read it, it has changed; restore it")

    def go_on(self, run: Run) -> Run:
        """Return a run as the finished one was begun: its length, head, learning rate, adapters, and its tasks.

        Settings that have other defaults by now are as they were; one that there was not has its default, or what was
        done before it (`MethodConfig.before`). Raises
        UserError if the method has another setting all the same, by its file or by what was given.
        """
        chosen, method = self.choices(run.config), run.config.make_method()
        config = replace(run.config, length=chosen["length"], head=chosen.get(HEAD) or "method")
        if method.own_learning_rate(config.budget()) is None:  # else it is one of the settings
            config = replace(config, learning_rate=chosen["learning_rate"], search_learning_rates=None)
        given = {parse_setting(item)[0] for item in config.set}
        other = self._changed_settings(config, chosen["settings"])
        if adopted := [write_setting(name, before) for name, before in other.items() if name not in given]:
            config = replace(config, set=(*config.set, *adopted))
        for name, before in self._changed_settings(config, chosen["settings"]).items():
            after = getattr(config.make_method().config, name, None)
            raise UserError(f"continue: {name} of {run.config.label} was {before} in {self.folder}, it is {after} now")
        fitted_tasks = len(self.record()[0]["tasks"]) if chosen["fitted"] else 0  # those of the first run
        changes = {"fitted_tasks": fitted_tasks, "lora": chosen.get(LORA), "search": chosen["search"]}
        return replace(run, config=config, earlier=self.earlier_tasks(config), **changes)

    def _changed_settings(self, config: LearnConfig, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a method reads and had otherwise, with the values that they had."""
        settings = config.make_method().config
        now, defaults = settings.as_recorded(), type(settings)().as_recorded()
        before = settings.completed(before)
        had = {name: before.get(name, defaults.get(name)) for name in {**now, **before}}
        unread = settings.unread(now)
        return {name: value for name, value in had.items() if name not in unread and value != now.get(name)}

    def choices(self, config: LearnConfig) -> Mapping[str, Any]:
        """Return what the run chose for the method and seed of a configuration. Raises UserError if it has no such run.

        Settings in the method's name do not count: a version gave some to methods that do not read them.
        """
        for run in self.result.metadata["runs"]:
            if f"{run['method']} ".startswith(f"{config.method} ") and int(run["seed"]) == config.seed:
                return run
        raise UserError(f"continue: {self.folder} has no run of {config.method} with seed {config.seed}")

    def earlier_tasks(self, config: LearnConfig) -> EarlierTasks | None:
        """Return the tasks of one run, None for `joint`, which begins anew. Raises UserError if nothing was kept."""
        if method_named(config.method).evaluation_scope == "end":
            return None
        if not method_named(config.method).can_continue:
            raise UserError(
                f"continue: {config.method} keeps values for each class of a run, and cannot go on with more"
            )
        if method_named(config.method).plans_ahead:
            problem = f"{config.method} treats each task by how many there are, and cannot go on with more"
            raise UserError(f"continue: {problem}; learn all tasks from the start")
        run = self.choices(config)
        folder = self.folder / MODELS / run["key"]
        if not (folder / KEPT).is_file():
            way = HOW_MODELS_ARE_SAVED.format(run=self.folder)
            raise UserError(f"continue: {self.folder} has no models of {run['key']} {way} learns again, and keeps them")
        lineage = read_json(folder / LINEAGE)
        if not lineage.keys() >= {"tasks", "method"}:
            raise UserError(f"continue: {folder / LINEAGE} is missing or damaged")
        source = method_named(config.method).source_sha256
        if lineage["method"].get("source", source) != source:
            raise UserError(f"continue: the file of {config.method} is not the one of {self.folder}; restore it")
        frames = {file: getattr(self.result, name) for name, file in self.result.tables.items()}
        return EarlierTasks(folder, {name: _rows_of(frames[name], run) for name in TABLES})

    def record(self) -> list[dict[str, Any]]:
        """Return the runs gone on with: when each was made, by which version, of which tasks."""
        metadata = read_results(self.folder, "learn")
        names = [task["name"] for task in metadata["stream"]["tasks"]]
        own = {"created": metadata["created"], "version": metadata["version"], "tasks": names, SEAL: metadata[SEAL]}
        return [*metadata.get(CONTINUED, []), own]


def _without_unread(config: LearnConfig) -> LearnConfig:
    """Leave out settings that no method reads beside the others, which earlier versions took."""
    read, items = set[str](), dict(map(parse_setting, config.set))
    for name in config.method.split(","):
        known = method_named(name.strip()).Config
        own = {key: items[key] for key in items.keys() & {setting.name for setting in fields(known)}}
        read |= own.keys() - known.unread(own)
    return config.replace(set=tuple(item for item in config.set if parse_setting(item)[0] in read))


def _rows_of(table: pd.DataFrame, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a run in a table, without the columns that are of the run."""
    rows = table[(table["method"] == run["method"]) & (table["seed"] == run["seed"])]
    records = rows.drop(columns=["stream", "method", "seed", "order"]).to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in record.items()} for record in records]
