"""A verb whose runs are a few milliseconds, and fail, hang or wait as their settings say."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from regard.commands.sweep.commands import Command, Field, whole
from regard.errors import UserError

# Notes the process of each begin and each end beside the folder; fails so many times; waits for a file, or for so long.
TRIAL = """
import json, os, signal, sys, time
from pathlib import Path
file, folder = map(Path, sys.argv[1:3])
said = json.loads(file.read_text())
begun, ended, kept = (folder.with_suffix(end) for end in (".begun", ".ended", ".kept"))
# Before it says that it has begun: whoever waits for that may send the signal at once.
signal.signal(signal.SIGTERM, signal.SIG_IGN if said["deaf"] else signal.default_int_handler)
try:
    with begun.open("a") as note:
        note.write(f"{os.getpid()}\\n")
    if len(begun.read_text().splitlines()) <= said["failures"]:
        print("a warning\\nthe disk is full\\n", file=sys.stderr)
        sys.exit(2)
    time.sleep(said["seconds"])
    while said["gate"] and not Path(said["gate"]).exists():
        time.sleep(0.02)
except KeyboardInterrupt:
    kept.write_text("x")
    sys.exit(2)
with ended.open("a") as note:
    note.write(f"{os.getpid()}\\n")
folder.mkdir(exist_ok=True)
record = {"command": "fake", "config": said, "final": {"valid_loss": said["rate"] + said["seed"]}}
(folder / "new.json").write_text(json.dumps(record))
(folder / "new.json").rename(folder / "results.json")
"""
DEFAULTS: dict[str, Any] = {
    **{"name": "softmax", "rate": 0.0, "width": None, "failures": 0, "seconds": 0.0, "gate": "", "deaf": False},
    "seed": 0,
}
NAMES = ("softmax", "sigmoid", "elu")


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {**DEFAULTS, **settings}
    if found["name"] not in NAMES:
        raise UserError(f"name: expected one of {', '.join(NAMES)}, got {found['name']!r}")
    return found


def _width(text: str) -> int | None:
    return None if text == "none" else int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"rate: expected a number, got {text!r}") from None


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text]


PARSERS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "rate": _number,
    "width": _width,
    "failures": int,
    "seconds": float,
    "gate": str,
    "deaf": _truth,
    "seed": int,
}


def _row(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["final"]


def _page(table: pd.DataFrame, record: Mapping[str, Any], histories: Mapping[str, pd.DataFrame]) -> str:
    return f"<p>{len(table)} of {len(record['trials'])} with {len(histories)}</p>"


FAKE = Command(
    name="fake",
    fields={name: Field(parse, kind="flag" if name == "deaf" else "value") for name, parse in PARSERS.items()},
    base=lambda name, file: {} if name is None else {"rate": {"low": 0.5, "high": 2.0}[name]},
    complete=_complete,
    command=lambda file, folder: ["-c", TRIAL, str(file), str(folder)],
    finished=partial(whole, "fake"),
    row=_row,
    history=lambda folder: pd.DataFrame({"step": [0], "loss": [1.0]}),
    page=_page,
    summary=lambda table, record: f"{len(table)} rows, best {table['valid_loss'].min() if len(table) else None}",
    names=("low", "high"),
    options={"store": "where things are kept"},
)


def counted(folder: Path, what: str) -> dict[str, int]:
    """How often each trial has begun (`begun`) or ended well (`ended`), by its key."""
    return {path.stem: len(path.read_text().splitlines()) for path in (folder / "trials").glob(f"*.{what}")}


def processes(folder: Path, keys: Collection[str]) -> set[int]:
    """The last process of each of these trials."""
    return {int((folder / "trials" / f"{key}.begun").read_text().split()[-1]) for key in keys}


def alive(process: int) -> bool:
    """Whether a process of this machine is at work."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(true: Callable[[], bool], seconds: float = 600) -> None:
    """Wait for something to become true: for longer than any machine takes, however busy."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
