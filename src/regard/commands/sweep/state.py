"""What a sweep keeps of its trials (sweep.json, and a file of settings a trial), whole after every event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.runs.output_dir import write_file

STATE, TRIALS, LOCK = "sweep.json", "trials", ".lock"


def check_folder(folder: Path) -> None:
    """Nothing, or a UserError: there is something, and it is no sweep."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: expected a folder, {folder} is a file")
    if not folder.exists() or (folder / STATE).exists():
        return
    strange = sorted(one.name for one in folder.iterdir() if one.name not in (TRIALS, LOCK))
    if strange:
        raise UserError(f"--out: {folder} holds something else than a sweep ({strange[0]}, but no {STATE})")


def trial_entry(key: str, seed: int) -> dict[str, Any]:
    """What sweep.json says of a trial that has not begun."""
    return {"key": key, "seed": seed, "state": "waiting", "attempts": 0, "error": ""}


@dataclass
class State:
    """The trials in a folder by key, in the order they were added: how far each is, and its settings.

    `fields` are those that the last sweep in this folder was told to vary; `command` began it.
    """

    folder: Path
    verb: str
    fields: tuple[str, ...] = ()
    command: str = ""
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, verb: str) -> State:
        """The state that an earlier sweep left in the folder, or an empty one. Raises UserError."""
        check_folder(folder)
        path, state = folder / STATE, cls(folder, verb)
        if not path.exists():
            return state
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            verb_there, state.fields = said["verb"], tuple(said["vary"])
            known = {one["key"]: {name: one[name] for name in trial_entry("", 0)} for one in said["trials"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--out: {path} cannot be read; choose another folder") from error
        if verb_there != verb:
            raise UserError(f"--out: {folder} holds a sweep of {verb_there}, expected one of {verb}")
        for key, one in known.items():
            if settings := _read(state.path(key)):
                state.trials[key], state.settings[key] = one, settings
        return state

    def path(self, key: str) -> Path:
        """The file of a trial's settings."""
        return self.folder / TRIALS / f"{key}.json"

    def add(self, trial: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Another trial, unless it is there."""
        key = trial["key"]
        if key not in self.trials:
            write_file(self.path(key), json.dumps(settings, indent=1) + "\n")
            self.trials[key], self.settings[key] = dict(trial), dict(settings)

    def drop(self, key: str) -> None:
        """A trial is told of no more; its files stay, and are taken up if it is added again."""
        del self.trials[key], self.settings[key]

    def note(self, key: str, **news: Any) -> None:
        """Keep what happened to a trial."""
        self.trials[key].update(news)
        self.write()

    def settle(self) -> None:
        """Nothing is at work any more: what was is waiting to go on."""
        for one in self.trials.values():
            if one["state"] == "running":
                one["state"] = "waiting"
        self.write()

    def record(self) -> dict[str, Any]:
        """What sweep.json says."""
        vary = varied_fields(self)
        trials = [
            {"key": key, "values": {name: self.settings[key].get(name) for name in vary}} | one
            for key, one in self.trials.items()
        ]
        return {
            "verb": self.verb,
            **({"command": self.command} if self.command else {}),
            "vary": vary,
            "seeds": sorted({one["seed"] for one in self.trials.values()}),
            "settings": self._common(vary),
            "trials": trials,
        }

    def _common(self, vary: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that all trials share."""
        first: dict[str, Any] = next(iter(self.settings.values()), {})
        return {name: value for name, value in first.items() if name not in vary and name != "seed"}

    def write(self) -> None:
        """Put sweep.json on disk, whole."""
        write_file(self.folder / STATE, json.dumps(self.record(), indent=1) + "\n")


def varied_fields(state: State) -> dict[str, list[Any]]:
    """The fields that vary, with their values: those that were asked for, and any other in which trials differ."""
    names = dict.fromkeys([*state.fields, *(name for one in state.settings.values() for name in one)])
    values = {name: _different(one.get(name) for one in state.settings.values()) for name in names if name != "seed"}
    return {name: found for name, found in values.items() if name in state.fields or len(found) > 1}


def _different(values: Any) -> list[Any]:
    """The values, each once, in the order they appear."""
    return list({json.dumps(value): value for value in values}.values())


def _read(path: Path) -> dict[str, Any] | None:
    """A trial's settings; None where its file is gone."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found
