"""What a sweep keeps of its trials: `sweep.json`, whole after every event, and a file of fields for each trial."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.data.files import hash_path
from regard.errors import UserError
from regard.runs.integrity import is_sealed, seal, sha256_of_json
from regard.runs.output_dir import SWEEP, read_json, write_file
from regard.runs.work_dir import LOCK

TRIALS = "trials"
SCHEMA_VERSION = 1


def check_sweep_dir(folder: Path) -> None:
    """Check that a folder is new, empty, or that of a sweep. Raises UserError."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: expected a folder, {folder} is a file")
    if not folder.exists() or (folder / SWEEP).exists():
        return
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if name != LOCK and not name.startswith(f".{SWEEP}-")]
    if foreign:
        raise UserError(f"--out: {folder} holds something else than a sweep ({foreign[0]}, but no {SWEEP})")


def trial_key(command: str, fields: Mapping[str, Any]) -> str:
    """Return a short hash of a trial's fields, the same on every machine."""
    return sha256_of_json([command, fields])[:12]


@dataclass
class SweepState:
    """The trials in a folder by their keys, in the order they were added.

    `vary` and `command_line` are those of the last sweep in the folder. `trials` has how far each trial is: key, seed,
    state, attempts and the last error. `fields` has all fields of each trial, `data` the hash of what a path held that
    trials read.
    """

    folder: Path
    command: str
    vary: tuple[str, ...] = ()
    command_line: str = ""
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, command: str) -> SweepState:
        """Return the state that an earlier sweep left in a folder, or an empty one.

        Raises UserError if the folder is of a sweep of another command, or the state is damaged.
        """
        path, state = folder / SWEEP, cls(folder, command)
        if not path.exists():
            return state
        record = read_json(path)
        if not is_sealed(record) or record["schema_version"] != SCHEMA_VERSION:
            raise UserError(f"--out: {path} is damaged or of another version; choose another folder")
        if record["command"] != command:
            raise UserError(f"--out: {folder} holds a sweep of {record['command']}, expected one of {command}")
        state.vary, state.command_line = tuple(record["vary"]), record["command_line"]
        state.data = dict(record.get("data", {}))
        for trial in record["trials"]:
            file = state.path(trial["key"])
            fields = read_json(file)
            if trial_key(command, fields) != trial["key"]:
                raise UserError(f"--out: {file} is missing or damaged; restore it, or choose another folder")
            state.fields[trial["key"]] = fields
            state.trials[trial["key"]] = {name: value for name, value in trial.items() if name != "values"}
        return state

    def path(self, key: str) -> Path:
        """Return the file of a trial's fields."""
        return self.folder / TRIALS / f"{key}.json"

    def add(self, trials: Mapping[str, Mapping[str, Any]], vary: Sequence[str], command_line: str) -> None:
        """Add trials by their fields, and forget those of earlier sweeps that are not finished, but not their files."""
        self.write()  # which marks the folder as that of a sweep
        for key in list(self.trials):
            if self.trials[key]["state"] != "finished" and key not in trials:
                del self.trials[key], self.fields[key]
        for key, fields in trials.items():
            if key not in self.trials:
                write_file(self.path(key), json.dumps(fields, indent=1) + "\n")
                self.trials[key] = {"key": key, "seed": fields["seed"], "state": "waiting", "attempts": 0, "error": ""}
                self.fields[key] = dict(fields)
        self.vary, self.command_line = tuple(vary), command_line
        self.write()

    def add_data(self, paths: Iterable[str]) -> None:
        """Add the hashes of what trials read. Raises UserError for what has changed since earlier trials read it."""
        places = {path: Path(os.path.expanduser(path)) for path in paths}
        hashes = {path: hash_path(place) for path, place in places.items() if place.exists()}
        if changed := next((path for path, sha256 in hashes.items() if self.data.get(path, sha256) != sha256), None):
            raise UserError(
                f"--out: {self.folder} holds trials with {changed} as it was before; expected it unchanged, "
                "or another folder"
            )
        self.data.update(hashes)

    def update(self, key: str, **changes: Any) -> None:
        """Record what happened to a trial."""
        self.trials[key].update(changes)
        self.write()

    def end(self) -> None:
        """Record that no trial is running any more: those that were wait to go on."""
        for trial in self.trials.values():
            if trial["state"] == "running":
                trial["state"] = "waiting"
        self.write()

    def record(self) -> dict[str, Any]:
        """Return what `sweep.json` holds."""
        vary = self.varied_fields()
        first: Mapping[str, Any] = next(iter(self.fields.values()), {})
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "command_line": self.command_line,
            "vary": vary,
            "data": self.data,
            "seeds": sorted({trial["seed"] for trial in self.trials.values()}),
            "settings": {name: value for name, value in first.items() if name not in vary and name != "seed"},
            "trials": [
                {"key": key, "values": {name: self.fields[key].get(name) for name in vary}} | trial
                for key, trial in self.trials.items()
            ],
        }

    def varied_fields(self) -> dict[str, list[Any]]:
        """Return the values of the fields in `vary`, and of all others in which trials differ."""
        names = dict.fromkeys([*self.vary, *(name for fields in self.fields.values() for name in fields)])
        vary = {}
        for name in names:
            values = {json.dumps(fields.get(name)): fields.get(name) for fields in self.fields.values()}
            if name != "seed" and (name in self.vary or len(values) > 1):
                vary[name] = list(values.values())
        return vary

    def write(self) -> None:
        """Write `sweep.json`, whole or not at all."""
        write_file(self.folder / SWEEP, json.dumps(seal(self.record()), indent=1) + "\n")
