"""The files that data are read from, and their hashes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from regard.errors import UserError

_CHUNK = 1 << 20


def list_files(folder: Path, suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files in a folder and below, sorted; with `suffixes` those that end in one, in any case.

    Files that are hidden, or in hidden folders, are left out: editors keep copies there (`.ipynb_checkpoints`).
    """
    files = (path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    return sorted(file for file in files if not suffixes or file.suffix.lower() in suffixes)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def find_files(paths: Sequence[str | Path], suffixes: Sequence[str], *, option: str, noun: str) -> list[Path]:
    """Return files, and those in folders that end in a suffix. Raises UserError."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = list_files(path, suffixes)
            if not inside:
                raise UserError(f"{option}: the folder {path} has no {noun} ({', '.join(suffixes)})")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{option}: expected a file or a folder of {noun}s, got {path}, which does not exist")
    if not files:
        raise UserError(f"{option}: expected at least one file or folder, got none")
    return files


def hash_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of all files, one behind the other."""
    digest = hashlib.sha256()
    for file in files:
        add_file(digest, file)
    return digest.hexdigest()


def add_file(digest: hashlib._Hash, file: Path) -> None:
    """Add the content of a file to a digest, a part at a time."""
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the files that `list_files` finds in a folder."""
    if path.is_file():
        return hash_files([path])
    contents = {file.relative_to(path).as_posix(): hash_files([file]) for file in list_files(path)}
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def describe_file(path: Path) -> str:
    """Return a path and what tells its content from another, for the record of data that a seed draws from it."""
    return f"{path}, sha256 {hash_path(path)[:12]}"


def without_hash(source: str) -> str:
    """Return a source without the hash of `describe_file`."""
    return re.sub(r", sha256 [0-9a-f]{12}(?=,|$)", "", source)
