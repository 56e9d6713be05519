"""Complete states of a run, of which the last few are kept: each is whole or not there, and checked when read."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from regard.errors import UserError, warn_user
from regard.runs.integrity import find_damaged_files, is_sealed, seal, sha256_of_files
from regard.runs.output_dir import read_json
from regard.runs.work_dir import UNFINISHED

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Snapshots:
    """The states in a folder, each in a folder of its own that is named by its index, as `step-00000100`."""

    folder: Path
    name: str = "step"  # what an index counts
    keep: int = 2  # how many of the last states stay; with two, one that is damaged does not lose the run

    def save(self, index: int, write: Callable[[Path], None], record: Mapping[str, Any]) -> Path:
        """Write a state whole or not at all, and return its folder. Raises UserError if it cannot be written.

        `write` puts the files into a folder; `latest` returns the `record`. States of larger indices are deleted.
        """
        final = self.path(index)
        unfinished = self._unfinished_path()
        try:
            unfinished.mkdir(parents=True)
            write(unfinished)
            files = sha256_of_files(unfinished)
            manifest = {"schema_version": SCHEMA_VERSION, "index": index, "record": record, "files": files}
            (unfinished / MANIFEST).write_text(json.dumps(seal(manifest)), encoding="utf-8")
            for path in (*unfinished.rglob("*"), unfinished):
                _flush(path)
            if final.exists():
                final.rename(self._unfinished_path())
            unfinished.rename(final)
            _flush(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            state = f"the state of {self.name} {index} to {self.folder}"
            raise UserError(f"cannot write {state}: {reason}; {self.describe_latest()}") from error
        self.clear_unfinished()
        past = [path for path in self.paths() if self.index_of(path) <= index]
        for path in self.paths():
            if path not in past[-self.keep :]:  # renamed first: no half of a state is left under its name
                shutil.rmtree(path.rename(self._unfinished_path()), ignore_errors=True)
        return final

    def path(self, index: int) -> Path:
        return self.folder / f"{self.name}-{index:08d}"

    def paths(self) -> list[Path]:
        """Return the folders of all states, good or damaged, by rising index."""
        pattern = re.compile(rf"{re.escape(self.name)}-\d{{8,}}")
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in entries if pattern.fullmatch(path.name)), key=self.index_of)

    def index_of(self, path: Path) -> int:
        return int(path.name.removeprefix(f"{self.name}-"))

    def find_latest(self) -> tuple[Path, Any] | None:
        """Return folder and record of the last good state, None where there is none; damaged ones are not told."""
        read = ((path, self._read_manifest(path)) for path in reversed(self.paths()))
        return next(((path, manifest["record"]) for path, manifest in read if isinstance(manifest, dict)), None)

    def latest(self) -> tuple[Path, Any] | None:
        """Return folder and record of the last good state, None if there are no states.

        It warns of damaged ones, and raises UserError if all are.
        """
        paths = self.paths()
        for path in reversed(paths):
            manifest = self._read_manifest(path)
            if isinstance(manifest, dict):
                return path, manifest["record"]
            warn_user(f"{path} is damaged ({manifest}); the state before it is used")
        if paths:
            states = f"each of the {len(paths)} states in {self.folder}"
            raise UserError(f"cannot resume: {states} is damaged. Start again with --overwrite.")
        return None

    def describe_latest(self) -> str:
        """Return half a sentence about the last good state."""
        found = self.find_latest()
        return "there is no saved state" if found is None else f"the last good state is {found[0]}"

    def clear_unfinished(self) -> None:
        """Delete what a process left that was killed while it wrote."""
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _read_manifest(self, path: Path) -> dict[str, Any] | str:
        """Return the manifest of a good state of the index in its name, else what is wrong with it."""
        manifest = read_json(path / MANIFEST)
        if not is_sealed(manifest):
            return f"{MANIFEST}: missing, or not what was written"
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            return f"{MANIFEST} has schema version {version}, this version of Regard reads {SCHEMA_VERSION}"
        if manifest["index"] != self.index_of(path):
            return f"{MANIFEST}: of the state of {self.name} {manifest['index']}"
        damaged = find_damaged_files(path, manifest["files"])
        return f"{', '.join(damaged)}: not what was written" if damaged else manifest

    def _unfinished_path(self) -> Path:
        return self.folder / f"{UNFINISHED}{secrets.token_hex(4)}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
