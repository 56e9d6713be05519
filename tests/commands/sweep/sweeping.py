"""A command whose runs are a few milliseconds, and fail, hang or wait as their configuration says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from regard.runs.command import Command
from regard.runs.config import Config, config_field
from regard.runs.provenance import SCHEMA_VERSION

# Notes the process of each begin and each end beside the folder; fails so many times; waits for a file, or for so long.
TRIAL = (
    f"SCHEMA_VERSION = {SCHEMA_VERSION}"
    + """
import hashlib, json, os, signal, sys, time
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
        sys.exit(1)
    time.sleep(said["seconds"])
    while said["gate"] and not Path(said["gate"]).exists():
        time.sleep(0.02)
except KeyboardInterrupt:
    kept.write_text("x")
    sys.exit(2)
with ended.open("a") as note:
    note.write(f"{os.getpid()}\\n")
folder.mkdir(exist_ok=True)
final = {"valid_loss": said["rate"] + said["seed"]}
record = {"command": "fake", "schema_version": SCHEMA_VERSION, "files": {}, "config": said, "final": final}
record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
(folder / "new.json").write_text(json.dumps(record))
(folder / "new.json").rename(folder / "results.json")
"""
)


@dataclass(frozen=True, kw_only=True)
class FakeConfig(Config):
    """What a trial does."""

    command: ClassVar[str] = "fake"
    name: str = config_field("softmax", "a name", choices=("softmax", "sigmoid", "elu"))
    rate: float = config_field(0.0, "a number")
    width: int | None = config_field(None, "a whole number")
    failures: int = config_field(0, "how often it fails", minimum=0)
    seconds: float = config_field(0.0, "how long it takes")
    gate: str = config_field("", "the file it waits for")
    deaf: bool = config_field(False, "it does not end when it is asked to")
    seed: int = config_field(0, "the seed", minimum=0)


class Fake(Command):
    """A command whose trials are the program above."""

    name = "fake"
    config = FakeConfig
    presets = ("low", "high")
    folder_options: ClassVar[Mapping[str, str]] = {"store": "where things are kept"}

    def initial_fields(self, preset: str | None, file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
        return ({} if preset is None else {"rate": {"low": 0.5, "high": 2.0}[preset]}) | dict(given)

    def arguments(self, config: Path, out: Path) -> list[str]:
        return ["-c", TRIAL, str(config), str(out)]

    def final_metrics(self, folder: Path) -> dict[str, Any]:
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))["final"]

    def curves(self, folder: Path) -> pd.DataFrame:
        return pd.DataFrame({"step": [0], "loss": [1.0]})


FAKE = Fake()


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
