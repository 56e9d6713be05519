"""Folders and files that are written whole or not at all, and take the place of nothing but their own kind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import safetensors

from regard.errors import UserError

RESULTS = "results.json"
"""What the folder of a run has."""
OPTION = "--out"
"""How a place to write to is asked for on the command line."""


def check_output_dir(
    folder: str | Path, *, overwrite: bool, verb: str | None = None, sign: str = RESULTS, asked: str = OPTION
) -> None:
    """Nothing, or a UserError: the folder is in use and may not be written over, or it cannot be made.

    Only what has the file `sign` is ours to write over, and where it is to be a run of a `verb`, no run of another one.
    `asked`: the name under which the user gave it.
    """
    folder = Path(folder)
    with _reachable(folder, asked):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{asked}: expected a folder, {folder} is a file")
        _check_writable(folder, asked)
        if not folder.exists() or not any(folder.iterdir()):
            return
        if not (folder / sign).is_file():
            what = "a run" if sign == RESULTS else "what is written here"
            raise UserError(f"{asked}: {folder} holds something else than {what} (no {sign}); it is not overwritten")
        other = None if verb is None else command_of(folder / sign)
        if other not in (None, verb):
            raise UserError(
                f"{asked}: expected a new folder or a run of `regard {verb}`, {folder} is one of `regard {other}`; "
                "it is not overwritten"
            )
        if not overwrite:
            raise UserError(f"{asked}: {folder} exists; choose another folder, or give {_overwriting(asked)}")


def command_of(record: Path) -> str | None:
    """The verb whose run has this record; None if it does not say."""
    try:
        told = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    verb = told.get("verb") if isinstance(told, dict) else None
    return verb if isinstance(verb, str) else None


def check_output_file(path: str | Path, *, overwrite: bool) -> None:
    """Nothing, or a UserError: the file is there and may not be written over, or it cannot be made."""
    path = Path(path)
    with _reachable(path, OPTION):
        if path.is_dir():
            raise UserError(f"{OPTION}: expected a file, {path} is a folder")
        _check_writable(path, OPTION)
        if path.exists() and not overwrite:
            raise UserError(f"{OPTION}: {path} exists; choose another name, or give --overwrite")


@contextlib.contextmanager
def _reachable(path: Path, asked: str) -> Iterator[None]:
    """Turns what the system raises over a path into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{asked}: cannot write {path}: {error.strerror or error}") from error


def _overwriting(asked: str) -> str:
    """How writing over something is allowed, where the place was asked for in this way."""
    return "--overwrite" if asked.startswith("-") else "overwrite=True"


def _check_writable(path: Path, asked: str) -> None:
    """Nothing, or a UserError: no entry can be made where this one would stand."""
    above = path.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise UserError(f"{asked}: cannot write {path}, {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{asked}: cannot write {path}, no permission to write in {above}")


@contextlib.contextmanager
def atomic_folder(
    folder: str | Path, *, overwrite: bool, verb: str | None = None, sign: str = RESULTS, asked: str = OPTION
) -> Iterator[Path]:
    """A folder beside `folder` to write to, which takes its name at the end, or vanishes if anything goes wrong."""
    folder = Path(folder).resolve()
    check_output_dir(folder, overwrite=overwrite, verb=verb, sign=sign, asked=asked)
    place = _beside(folder, "new")
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        place.mkdir(parents=True)
        yield place
        _take_name(place, folder)
    except (OSError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"cannot write {folder}: {why}; nothing was written") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()  # which fails where the folder stands in it by now


def write_file(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    path = Path(path).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as place:
            (Path(place) / path.name).write_text(text, encoding="utf-8")
            (Path(place) / path.name).replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; nothing was written") from error


def _beside(folder: Path, what: str) -> Path:
    """A hidden name next to the folder, for one that is made with the permissions folders ordinarily get."""
    return folder.with_name(f".{folder.name[:100]}-{what}-{secrets.token_hex(4)}")


def _take_name(place: Path, folder: Path) -> None:
    """Rename, with what had the name before kept until then, and put back if that is interrupted."""
    old = _beside(folder, "old")
    try:
        if folder.exists():
            folder.rename(old)
        place.rename(folder)
    finally:
        if old.exists() and folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(folder)
