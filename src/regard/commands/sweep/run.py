"""Every combination of some settings, times seeds: each a run of a verb in a process of its own, none run twice."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands.sweep.commands import COMMANDS, Command
from regard.commands.sweep.state import LOCK, TRIALS, State, check_folder, trial_entry, varied_fields
from regard.errors import UserError, check_choice
from regard.runs.launchers import Job, JobEvent, Launcher, Local, Ray, run_jobs
from regard.runs.output_dir import write_file
from regard.runs.result import PAGE

if TYPE_CHECKING:
    import pandas as pd

TABLE = "trials.parquet"
ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: `settings` are all of the verb's fields, `values` those that the sweep varies."""

    key: str
    values: Mapping[str, Any]
    seed: int
    settings: Mapping[str, Any]
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


@dataclass(frozen=True)
class SweepResult:
    """What a sweep left: the finished trials as a table, the record (sweep.json), the errors of the others by key."""

    folder: Path
    table: pd.DataFrame
    metadata: dict[str, Any]
    failed: dict[str, str]


def sweep(
    verb: str | Command,
    vary: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    settings: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    num_seeds: int = 3,
    launcher: str = "local",
    address: str | None = None,
    workers: int | None = None,
    gpus: int | None = None,
    retries: int = 2,
    options: Sequence[str] = (),
    command: str = "",
    on_event: Callable[[SweepProgress], None] = lambda told: None,
) -> SweepResult:
    """The trials of every combination of the values in `vary` and every seed, run, with a page that compares them.

    `settings` are those of the verb that do not vary. A trial that fails is tried again `retries` times, and goes on
    from its last checkpoint; the others go on if it fails for good. `out` may hold an earlier sweep: its finished
    trials are not run again where their settings are asked for, and stay beside the new ones where they are not.
    Without `seeds` there are `num_seeds`, from 0.

    `launcher` is where trials run: "local" (`workers` processes, which share the cores; one a GPU where `gpus` is 1,
    which is the default where there are GPUs) or "ray" (`address` of a cluster; `gpus` GPUs a trial). `options` are
    given to the command of each trial as they are; `command` is noted in the record as what began the sweep. Raises
    UserError before anything runs if a combination cannot be, and KeyboardInterrupt when interrupted: the same call
    then goes on.
    """
    verb = _verb(verb)
    folder = Path(out).resolve()
    trials = combinations(verb, vary, folder=folder, settings=settings or {}, seeds=_seeds(seeds, num_seeds))
    if retries < 0:
        raise UserError(f"retries: expected at least 0, got {retries}")
    engine = engine_named(launcher, address=address, workers=workers, gpus=gpus)
    check_folder(folder)
    with _alone(folder):
        state = State.open(folder, verb.name)
        _add(state, trials, tuple(vary), command)
        jobs = {trial.key: _job(verb, trial, options) for trial in trials}
        failed = _run(verb, trials, jobs, state, engine, retries, on_event)
        return _collected(verb, state, failed)


def combinations(
    verb: Command,
    vary: Mapping[str, Sequence[Any]],
    *,
    folder: Path,
    settings: Mapping[str, Any],
    seeds: Sequence[int],
) -> list[Trial]:
    """Every combination of the values with every seed, each once. Raises UserError for one that cannot be."""
    for name, values in vary.items():
        if name == "seed":
            raise UserError("vary: seeds are given by --seeds, as 0,7")
        if name not in verb.fields:
            raise UserError(f"vary: there is no field {name}; allowed are {', '.join(sorted(verb.fields))}")
        if not values:
            raise UserError(f"vary: expected at least one value of {name}, got none")
    if not vary:
        raise UserError("vary: expected at least one field, as attention=softmax,sigmoid; got none")
    found: dict[str, Trial] = {}
    for values, seed in itertools.product(itertools.product(*vary.values()), seeds):
        chosen = dict(zip(vary, values, strict=True))
        whole = _complete(verb, {**settings, **chosen, "seed": seed}, chosen)
        key = _key(verb.name, whole)
        found.setdefault(key, Trial(key, {name: whole[name] for name in vary}, seed, whole, folder / TRIALS / key))
    return list(found.values())


def engine_named(
    launcher: str, *, address: str | None = None, workers: int | None = None, gpus: int | None = None
) -> Launcher:
    """Where trials run. Raises UserError."""
    check_choice("launcher", launcher, ENGINES)
    if gpus is not None and gpus < 0:
        raise UserError(f"gpus: expected at least 0, got {gpus}")
    if launcher == "ray":
        return Ray(address=address, workers=workers, gpus=gpus or 0)
    if address is not None:
        raise UserError("address: local trials need none; choose ray")
    if gpus is not None and gpus > 1:
        raise UserError(f"gpus: expected 0 or 1 for local trials, got {gpus}")
    devices = () if gpus == 0 else _devices()
    if gpus and not devices:
        raise UserError("gpus: there is none on this machine")
    return Local(workers=workers, devices=devices)


def _devices() -> tuple[str, ...]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbered = [str(number) for number in range(torch.cuda.device_count())]
    return tuple(named.split(",")[: len(numbered)] if named else numbered)


def _verb(verb: str | Command) -> Command:
    if isinstance(verb, Command):
        return verb
    check_choice("sweep", verb, COMMANDS)
    return COMMANDS[verb]()


def _seeds(seeds: Sequence[int] | None, num_seeds: int) -> list[int]:
    """The seeds, each once; without any so many from 0."""
    if num_seeds < 1:
        raise UserError(f"num-seeds: expected at least 1, got {num_seeds}")
    found = list(range(num_seeds)) if seeds is None else list(dict.fromkeys(seeds))
    if not found or min(found) < 0:
        raise UserError(f"seeds: expected at least one, none below 0, got {', '.join(map(str, found)) or 'none'}")
    return found


def _complete(verb: Command, settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of the verb, as JSON holds them."""
    try:
        whole: dict[str, Any] = json.loads(json.dumps(verb.complete(settings)))
    except UserError as error:
        told = " ".join(f"{name}={value}" for name, value in chosen.items())
        raise UserError(f"{error} (of {told})") from error
    return whole


def _key(verb: str, settings: Mapping[str, Any]) -> str:
    """A short hash of the settings, the same on every machine."""
    return hashlib.sha256(json.dumps([verb, settings], sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While it lasts no other sweep works in the folder, which is made. Raises UserError."""
    try:
        (folder / TRIALS).mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise UserError(f"--out: cannot write {folder}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out: another sweep is at work in {folder}") from None
        yield


def _add(state: State, trials: Sequence[Trial], vary: Sequence[str], command: str) -> None:
    """Put the trials into the record, beside those that earlier sweeps in this folder have finished."""
    asked = {trial.key for trial in trials}
    for key in [key for key, one in state.trials.items() if one["state"] != "finished" and key not in asked]:
        state.drop(key)
    for trial in trials:
        state.add(trial_entry(trial.key, trial.seed), trial.settings)
    state.fields, state.command = tuple(vary), command
    state.write()


def _run(
    verb: Command,
    trials: Sequence[Trial],
    jobs: Mapping[str, Job],
    state: State,
    engine: Launcher,
    retries: int,
    on_event: Callable[[SweepProgress], None],
) -> dict[str, str]:
    """The errors of the trials that failed for good, once all have ended."""
    by_key = {trial.key: trial for trial in trials}

    def is_finished(key: str) -> bool:
        return verb.finished(by_key[key].folder, by_key[key].settings)

    def note(event: JobEvent) -> None:
        kept = {"started": "running", "finished": "finished", "failed": "waiting", "given up": "failed"}
        state.note(event.key, state=kept[event.kind], attempts=event.attempt, error=event.error)
        done = sum(state.trials[key]["state"] == "finished" for key in by_key)
        on_event(SweepProgress(event, by_key[event.key], done, len(trials)))

    for key in by_key:
        state.trials[key].update(
            {"state": "finished", "error": ""} if is_finished(key) else {"state": "waiting", "attempts": 0}
        )
    left = [job for key, job in jobs.items() if state.trials[key]["state"] == "waiting"]
    try:
        return run_jobs(left, engine, finished=is_finished, retries=retries, on_event=note)
    finally:
        state.settle()


def _job(verb: Command, trial: Trial, options: Sequence[str]) -> Job:
    """The trial as a process: what python is to run, and where it may complain."""
    settings, log = trial.folder.with_name(f"{trial.key}.json"), trial.folder.with_name(f"{trial.key}.log")
    command = (*verb.command(settings, trial.folder), *options)
    return Job(trial.key, command, directory=str(Path.cwd()), log=str(log))


def _collected(verb: Command, state: State, failed: dict[str, str]) -> SweepResult:
    """Table, record and page of all finished trials in the folder, written."""
    folders = {key: state.folder / TRIALS / key for key in state.trials}
    finished = [key for key in folders if verb.finished(folders[key], state.settings[key])]
    fields = tuple(varied_fields(state))
    rows = [
        {"key": key, "seed": state.settings[key]["seed"]}
        | {name: state.settings[key][name] for name in fields}
        | verb.row(folders[key])
        for key in finished
    ]
    table, record = _table(rows, fields), state.record()
    if finished:
        _write_table(state.folder / TABLE, table)
    write_file(state.folder / PAGE, verb.page(table, record, {key: verb.history(folders[key]) for key in finished}))
    return SweepResult(state.folder, table, record, failed)


def _table(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> pd.DataFrame:
    """One row a trial; a varied field whose values are not all numbers, or not all text, becomes text."""
    import pandas as pd

    table = pd.DataFrame(list(rows), columns=None if rows else ["key", "seed", *fields])
    for name in fields if rows else ():
        values = [row[name] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if not (kinds <= {int, float} or kinds in ({str}, {bool})):
            table[name] = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return table


def _write_table(path: Path, table: pd.DataFrame) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}")
    try:
        table.to_parquet(beside, index=False)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}; the trials are kept") from error
