"""Run a command for every combination of some fields and every seed, each in a process of its own, none twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from regard.commands.sweep.commands import LearnCommand, PretrainCommand
from regard.commands.sweep.figures import draw_means, tabulate_means
from regard.commands.sweep.means import Comparison
from regard.commands.sweep.page import sweep_page
from regard.commands.sweep.state import TRIALS, SweepState, check_sweep_dir, trial_key
from regard.commands.sweep.words import write_ledes, write_title
from regard.continual.method import suggest_name
from regard.errors import UserError, check_choice, describe_value
from regard.runs.command import Command
from regard.runs.config import Config
from regard.runs.display import Display
from regard.runs.launchers import Job, JobEvent, Launcher, make_launcher, run_jobs
from regard.runs.output_dir import PAGE, write_file
from regard.runs.progress import OnProgress, ProgressEvent, shown_in_notebook
from regard.runs.selection import select_rows
from regard.runs.work_dir import lock_dir
from regard.training.placement import check_trackers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = "trials.parquet"
FieldsOf = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns the fields of a trial, but for its seed, from those that vary."""
COMMANDS: dict[str, Callable[[], Command]] = {"pretrain": PretrainCommand, "learn": LearnCommand}
"""The commands that a sweep can repeat."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: `fields` are all of the configuration, `values` those that the sweep varies."""

    key: str
    values: Mapping[str, Any]
    seed: int
    fields: Mapping[str, Any]
    folder: Path

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in {**self.values, "seed": self.seed}.items())


@dataclass(frozen=True)
class SweepProgress:
    """Something that happened to a trial, and how many of the sweep's trials are finished by now."""

    event: JobEvent
    trial: Trial
    finished: int
    trials: int


@dataclass(frozen=True, repr=False)
class SweepResult(Display):
    """Result of a sweep: the finished trials as a table, the record (`sweep.json`), errors of the others by key."""

    folder: Path
    table: pd.DataFrame
    metadata: dict[str, Any]
    failed: dict[str, str]

    def frame(self, **equal: Any) -> pd.DataFrame:
        """Return the finished trials, by column: `result.frame(seed=0)`; None is null. Warns if there are none."""
        return select_rows(self.table, equal)

    def headline(self) -> str:
        return " ".join([write_title(self._comparison), *write_ledes(self._comparison)[:1]])

    def overview(self) -> pd.DataFrame:
        """Return mean ± standard error over seeds of each metric, by combination."""
        return tabulate_means(self._comparison)

    def plot(self, metric: str | None = None) -> Figure:
        """Draw a metric (None: the first) of each combination: mean over seeds with its 95 % interval.

        Raises UserError for a metric that no trial has.
        """
        return draw_means(self._comparison, metric)

    @property
    def _comparison(self) -> Comparison:
        return Comparison.of(self.table, self.metadata)


def describe_progress(on_progress: OnProgress) -> Callable[[SweepProgress], None]:
    """Return a callback that reports how many trials are finished; those that failed become notes."""

    def report(progress: SweepProgress) -> None:
        event = progress.event
        note = f"{progress.trial}: {event.kind} ({event.error})" if event.error else ""
        on_progress(ProgressEvent(phase="trials", step=progress.finished, steps=progress.trials, note=note))

    return report


@shown_in_notebook(describe_progress)
def sweep(
    command: Literal["pretrain", "learn"] | Command,
    vary: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    config: Mapping[str, Any] | Config | FieldsOf | None = None,
    seeds: Sequence[int] | None = None,
    num_seeds: int = 3,
    launcher: Literal["local", "ray"] = "local",
    address: str | None = None,
    workers: int | None = None,
    gpus: int | None = None,
    retries: int = 2,
    arguments: Sequence[str] = (),
    command_line: str = "",
    on_progress: Callable[[SweepProgress], None] | None = None,
) -> SweepResult:
    """Run a command for every combination of the values in `vary` and every seed, and write a page that compares them.

    After an interruption the same call goes on.

    Args:
        command: What each trial runs.
        vary: Values of fields of the command's configuration, by their names.
        out: Folder to write, new or of an earlier sweep. Trials that are finished there are not run again; those of
            other fields stay beside the new ones.
        config: The fields that do not vary, or a function that returns those of a trial from the ones that do.
        seeds: Seeds of each combination. None for `num_seeds` of them, from 0.
        num_seeds: How many seeds there are if they are not listed.
        launcher: Where trials run: on this machine, or on a Ray cluster.
        address: The cluster; None for one of this machine.
        workers: Trials at once; they share the cores. None for one a core, or one a GPU.
        gpus: GPUs of a trial. None for one where there are some, and none on Ray.
        retries: How often a trial that failed is tried again, from its last checkpoint; one that was refused is not.
        arguments: Further arguments of each trial's command.
        command_line: What is recorded as the command that began the sweep.
        on_progress: Called as trials start, finish and fail.

    Returns:
        The table of all finished trials in the folder. Trials that failed do not stop the others.

    Raises:
        UserError: A combination cannot be, or the folder holds something else; nothing was run.
    """
    command = command if isinstance(command, Command) else find_command(command)
    folder = Path(out).resolve()
    fields = config.to_dict() if isinstance(config, Config) else config or {}
    trials = make_trials(command, vary, folder=folder, fields=fields, seeds=_list_seeds(seeds, num_seeds))
    if retries < 0:
        raise UserError(f"retries: expected at least 0, got {retries}")
    engine = make_launcher(launcher, address=address, workers=workers, gpus=gpus)
    if launcher == "local":
        left = [trial.fields for trial in trials if not command.is_finished(trial.folder, trial.fields)]
        check_trackers([name for fields_left in left for name in fields_left.get("trackers") or ()], folder)
        command.check_models(left)
    check_sweep_dir(folder)
    with lock_dir(folder, "sweep"):
        state = SweepState.open(folder, command.name)
        state.add_data(dict.fromkeys(path for trial in trials for path in command.data_paths(trial.fields)))
        state.add({trial.key: trial.fields for trial in trials}, tuple(vary), command_line)
        failed = _run_trials(command, trials, state, engine, retries, arguments, on_progress)
        return _collect(command, state, failed)


def find_command(name: str) -> Command:
    """Return a command by its name. Raises UserError."""
    check_choice("sweep", name, COMMANDS)
    return COMMANDS[name]()


def check_varied_field(command: Command, name: str) -> None:
    """Check that a sweep can vary a field. Raises UserError."""
    if name == "seed":
        raise UserError("vary: seeds are given by --seeds, as 0,7")
    if name not in command.config.field_names():
        names = sorted(command.config.field_names())
        raise UserError(f"vary: there is no field {name}{suggest_name(name, names)}; allowed are {', '.join(names)}")


def make_trials(
    command: Command,
    vary: Mapping[str, Sequence[Any]],
    *,
    folder: Path,
    fields: Mapping[str, Any] | FieldsOf,
    seeds: Sequence[int],
) -> list[Trial]:
    """Return every combination of the values with every seed, each once. Raises UserError for one that cannot be."""
    for name, values in vary.items():
        check_varied_field(command, name)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UserError(f"vary: expected a list of values of {name}, got {describe_value(values)}")
        if not values:
            raise UserError(f"vary: expected at least one value of {name}, got none")
    if not vary:
        raise UserError("vary: expected at least one field, as attention=softmax,sigmoid; got none")
    trials: dict[str, Trial] = {}
    for combination, seed in itertools.product(itertools.product(*vary.values()), seeds):
        varied = dict(zip(vary, combination, strict=True))
        complete = _complete(command, fields, varied, seed)
        complete = {**{name: command.config.options()[name].default for name in vary}, **complete}
        key = trial_key(command.name, complete)
        shown = {name: complete[name] for name in vary}
        trials.setdefault(key, Trial(key, shown, seed, complete, folder / TRIALS / key))
    return list(trials.values())


def _list_seeds(seeds: Sequence[int] | None, num_seeds: int) -> list[int]:
    if num_seeds < 1:
        raise UserError(f"num-seeds: expected at least 1, got {num_seeds}")
    unique = list(range(num_seeds)) if seeds is None else list(dict.fromkeys(seeds))
    if not unique or min(unique) < 0:
        raise UserError(f"seeds: expected at least one, none below 0, got {', '.join(map(str, unique)) or 'none'}")
    return unique


def _complete(
    command: Command, fields: Mapping[str, Any] | FieldsOf, varied: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return all fields of a trial, as JSON holds them."""
    try:
        of_trial = fields(varied) if callable(fields) else {**fields, **varied}
        complete: dict[str, Any] = json.loads(json.dumps(command.complete({**of_trial, "seed": seed})))
    except UserError as error:
        values = " ".join(
            f"{name}={value if isinstance(value, str | Path) else describe_value(value)}"
            for name, value in varied.items()
        )
        raise UserError(f"{error} (of {values})") from error
    return complete


def _run_trials(
    command: Command,
    trials: Sequence[Trial],
    state: SweepState,
    engine: Launcher,
    retries: int,
    arguments: Sequence[str],
    on_progress: Callable[[SweepProgress], None] | None,
) -> dict[str, str]:
    """Run the trials that are not finished, and return the errors of those that failed for good."""
    by_key = {trial.key: trial for trial in trials}
    states = {"started": "running", "finished": "finished", "failed": "waiting", "given up": "failed"}

    def is_finished(key: str) -> bool:
        return command.is_finished(by_key[key].folder, by_key[key].fields)

    def record(event: JobEvent) -> None:
        state.update(event.key, state=states[event.kind], attempts=event.attempt, error=event.error)
        if on_progress is not None:
            finished = sum(state.trials[key]["state"] == "finished" for key in by_key)
            on_progress(SweepProgress(event, by_key[event.key], finished, len(trials)))

    jobs = []
    for key, trial in by_key.items():
        if is_finished(key):
            state.trials[key].update(state="finished", error="")
            continue
        state.trials[key].update(state="waiting", attempts=0)
        line = (*command.arguments(state.path(key), trial.folder), *arguments)
        jobs.append(Job(key, line, directory=str(Path.cwd()), log=str(trial.folder.with_name(f"{key}.log"))))
    try:
        return run_jobs(jobs, engine, finished=is_finished, retries=retries, on_event=record)
    finally:
        state.end()


def _collect(command: Command, state: SweepState, failed: dict[str, str]) -> SweepResult:
    """Write the table and the page of all finished trials in the folder."""
    folders = {key: state.folder / TRIALS / key for key in state.trials}
    finished = {key: path for key, path in folders.items() if command.is_finished(path, state.fields[key])}
    record = state.record()
    rows = [
        {"key": key, **{name: state.fields[key].get(name) for name in ("seed", *record["vary"])}}
        | command.final_metrics(path)
        for key, path in finished.items()
    ]
    table = make_table(rows, tuple(record["vary"]))
    if finished:
        write_file(state.folder / TABLE, table.to_parquet(index=False))
    page = sweep_page(table, record, {key: command.curves(path) for key, path in finished.items()})
    write_file(state.folder / PAGE, page)
    return SweepResult(state.folder, table, record, failed)


def make_table(rows: Sequence[Mapping[str, Any]], vary: Sequence[str]) -> pd.DataFrame:
    """Return a row for each trial. A field whose values are not all numbers, or not all text, becomes text."""
    table = pd.DataFrame(list(rows), columns=None if rows else ["key", "seed", *vary])
    for name in vary if rows else ():
        values = [row[name] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if not (kinds <= {int, float} or kinds in ({str}, {bool})):
            table[name] = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return table
