"""What a long run has found so far, kept until it is done, so that it can go on after being killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UserError

ENTRIES, ABOUT = "journal.jsonl", "about.json"


class Journal:
    """Named entries in a folder, each written at once and for good; a line cut off by a crash does not count.

    `about` is what the entries depend on: a journal begun under another one is refused where `resume` asks to go on,
    and begun afresh where it does not.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, Any] = {}
        told = json.loads(json.dumps(about))
        try:
            if resume and (self.folder / ABOUT).is_file():
                self._continue(told)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
                (self.folder / ABOUT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _continue(self, about: Any) -> None:
        try:
            before = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"resume: {self.folder / ABOUT} cannot be read; run without --resume") from error
        check_same(before, about)
        path = self.folder / ENTRIES
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        for line in whole:
            try:
                entry = json.loads(line)
                self._entries[entry["name"]] = entry["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"resume: {path} cannot be read ({line.strip()[:40]}); run without --resume") from error
        if len(whole) < len(lines):
            path.write_text("".join(whole), encoding="utf-8")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        """The value of an entry."""
        return self._entries[name]

    def add(self, name: str, value: Any) -> Any:
        """The value, now kept."""
        line = json.dumps({"name": name, "value": value}) + "\n"
        try:
            with (self.folder / ENTRIES).open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror or error}; what was found is kept") from error
        self._entries[name] = value
        return value

    def remove(self) -> None:
        """Delete the folder: the run is done."""
        shutil.rmtree(self.folder, ignore_errors=True)


def has_entries(folder: str | Path) -> bool:
    """Whether a journal was kept in this folder that has an entry, all of it."""
    path = Path(folder) / ENTRIES
    return path.is_file() and b"\n" in path.read_bytes()


def check_same(before: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Nothing, or a UserError that names the first setting in which a run differs from the one it is to go on with."""
    was, now = _flat(before), _flat(about)
    changed = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    if changed:
        raise UserError(
            f"resume: expected the settings of the run that was broken off; {changed[0]} was "
            f"{_short(was.get(changed[0]))} and is {_short(now.get(changed[0]))}"
        )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """What stands in dictionaries within dictionaries, by its names with dots between."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: one for part, inner in value.items() for key, one in _flat(inner, f"{name}.{part}".strip(".")).items()}


def _short(value: Any) -> str:
    told = json.dumps(value)
    return told if len(told) <= 60 else f"{told[:57]}…"
