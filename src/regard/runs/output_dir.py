"""Folders and files that are written whole or not at all, and take the place of nothing but their own kind."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors

from regard.errors import UserError, check_utf8, describe_error, is_of_rust
from regard.runs.integrity import find_damaged_files

RESULTS = "results.json"  # the file by which a folder is known to be that of a run
SWEEP = "sweep.json"  # the same of a sweep
PAGE = "report.html"  # the page that every run leaves; nothing is read from it again
OPTION = "--out"  # the option by which the user names a place to write to, unless a caller says otherwise


class FolderExists(UserError):
    """A folder holds a run already, and nobody has allowed to replace it."""


@contextlib.contextmanager
def readable_errors(target: object, *, option: str = "", note: str = "") -> Iterator[None]:
    """Turn what the system raises while a target is written into one line for the user, which ends with a note."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, safetensors.SafetensorError)) and not is_of_rust(error):
            raise
        reason = getattr(error, "strerror", None) or describe_error(error)
        message = f"cannot write {target}: {reason}"
        raise UserError(f"{option}: {message}" if option else f"{message}; {note}" if note else message) from error


def check_output_dir(
    folder: str | Path,
    *,
    overwrite: bool,
    command: str | None = None,
    marker: str = RESULTS,
    option: str = OPTION,
    replacement: Path | None = None,
) -> None:
    """Check that a folder can be written: it can be made, or replaced without the loss of a file. Raises UserError.

    With `overwrite` it may replace an earlier one of the same `command` that has the `marker`, the file by which a
    folder is known to be of Regard's making. `option` is how messages name the folder. The files of `replacement`, the
    finished folder that takes its place, may be lost where the marker lists none.
    """
    folder = Path(folder)
    with readable_errors(folder, option=option):
        path = os.path.realpath(folder)
        if any(map(os.path.islink, (path, *map(str, Path(path).parents)))):
            raise UserError(f"{option}: expected a folder, {folder} is a link that leads to itself")
        check_utf8(path, f"{option}: expected a path")
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{option}: expected a folder, {folder} is a file")
        if os.path.ismount(path):
            raise UserError(f"{option}: {folder} is a mount point and cannot be replaced. Choose a folder below it.")
        _check_writable(folder, option)
        if not folder.exists() or not any(folder.iterdir()):
            return
        if not (folder / marker).is_file():
            kind = "a run" if marker == RESULTS else "what is written here"
            raise UserError(f"{option}: {folder} holds something else than {kind} (no {marker}); it is not overwritten")
        record = read_json(folder / marker)
        other = record.get("command")
        if command not in (None, other):
            kind = f"one of `regard {other}`" if other else f"none, by its {marker}"
            expected = f"a new folder or a run of `regard {command}`"
            raise UserError(f"{option}: expected {expected}, {folder} is {kind}; it is not overwritten")
        if not overwrite:
            allowing = "--overwrite" if option.startswith("-") else "overwrite=True"
            raise FolderExists(f"{option}: {folder} exists; choose another folder, or give {allowing}")
        checksums = record.get("files")
        if isinstance(checksums, dict):
            _check_all_own(folder, set(checksums), checksums, marker, option)
        elif replacement is not None:
            _check_all_own(folder, _list_files(replacement), {}, marker, option)


def _check_all_own(folder: Path, names: set[str], checksums: Mapping[str, str], marker: str, option: str) -> None:
    """Check that a folder holds only the files of these names, unchanged where there is a checksum."""
    files = _list_files(folder)
    foreign = sorted(files - names - {marker})
    if foreign:
        reason = f"which was not written with {marker} and would be lost. Move it, or choose another folder."
        raise UserError(f"{option}: {folder} holds {foreign[0]}, {reason}")
    expected = {name: sha256 for name, sha256 in checksums.items() if name in files - {PAGE}}
    changed = find_damaged_files(folder, expected)
    if changed:
        reason = f"which was changed after {marker} was written and would be lost. Move it, or choose another folder."
        raise UserError(f"{option}: {folder} holds {changed[0]}, {reason}")


def _list_files(folder: Path) -> set[str]:
    """Return the files in a folder and below. A link to a folder counts as a file."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; an empty one if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def check_output_file(path: str | Path, *, overwrite: bool) -> None:
    """Check that a file can be written. Raises UserError."""
    path = Path(path)
    with readable_errors(path, option=OPTION):
        if path.is_dir():
            raise UserError(f"{OPTION}: expected a file, {path} is a folder")
        _check_writable(path, OPTION)
        if path.exists() and not overwrite:
            raise UserError(f"{OPTION}: {path} exists; choose another name, or give --overwrite")


def _check_writable(path: Path, option: str) -> None:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UserError(f"{option}: cannot write {path}, {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{option}: cannot write {path}, no permission to write in {parent}, or its disk is read-only")


@contextlib.contextmanager
def atomic_folder(
    folder: str | Path, *, overwrite: bool, command: str | None = None, marker: str = RESULTS, option: str = OPTION
) -> Iterator[Path]:
    """Write a folder whole or not at all; see `check_output_dir` for the arguments. Raises UserError.

    The block writes to the folder that is yielded, beside the one that is asked for. It takes the name at the end, or
    vanishes after an exception. What an earlier process left that was killed while it wrote is deleted first.
    """
    folder = Path(folder).resolve()
    check = partial(check_output_dir, folder, overwrite=overwrite, command=command, marker=marker, option=option)
    clear_leftovers(folder)
    check()
    temporary = _beside(folder, "new")
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        with readable_errors(folder, note="nothing was written"):
            temporary.mkdir(parents=True)
            yield temporary
            if folder.exists():
                check(replacement=temporary)
            _rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in parents:
                parent.rmdir()  # fails where the folder stands in it by now


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises UserError."""
    raw = content.encode() if isinstance(content, str) else content
    path = Path(path).resolve()
    with readable_errors(path, note="nothing was written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            (Path(folder) / path.name).write_bytes(raw)
            (Path(folder) / path.name).replace(path)


def cache_dir(folder: str | Path | None = None) -> Path:
    """Return the folder of what is made once, such as packed text: this one, else $REGARD_CACHE or ~/.cache/regard.

    Raises UserError for a user without a home folder.
    """
    named = folder or os.environ.get("REGARD_CACHE")
    try:
        return Path(os.path.expanduser(named)) if named else Path.home() / ".cache" / "regard"
    except RuntimeError:
        raise UserError("cache: expected the home folder of this user, there is none; set REGARD_CACHE") from None


def clear_leftovers(folder: Path) -> None:
    """Delete what killed processes of this machine left beside a folder, or give the earlier folder its name back."""
    pattern = re.compile(rf"{re.escape(_prefix(folder))}(new|old)-{re.escape(_host())}-(\d+)-[0-9a-f]+")
    for path in list(folder.parent.iterdir()) if folder.parent.is_dir() else []:
        match = pattern.fullmatch(path.name)
        if match is None or _is_running(int(match[2])):
            continue
        if match[1] == "old" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _prefix(folder: Path) -> str:
    digest = hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:8]
    return f".{folder.name[:100]}-{digest}-"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:32] or "host"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _beside(folder: Path, purpose: str) -> Path:
    """Return a hidden name beside a folder, which says whose it is."""
    return folder.with_name(f"{_prefix(folder)}{purpose}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _rename(temporary: Path, folder: Path) -> None:
    """Give a folder its name. What had the name before is kept until then, and put back after an interruption."""
    old = _beside(folder, "old")
    try:
        if folder.exists():
            temporary.chmod(stat.S_IMODE(folder.stat().st_mode))
            folder.rename(old)
        temporary.rename(folder)
    finally:
        if old.exists() and folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(folder)
