"""The folder in which a long run keeps what it needs to go on: locked, marked, checked, and never anybody else's."""

import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from regard.errors import UserError
from regard.runs.distributed import raise_on_all_ranks
from regard.runs.integrity import is_sealed, seal
from regard.runs.journal import Journal
from regard.runs.output_dir import read_json, readable_errors
from regard.runs.posix import fcntl
from regard.runs.rank import is_main_process
from regard.runs.run_lock import one_run

MARK, LOCK, JOURNAL = "work.json", ".lock", "journal.jsonl"
UNFINISHED = ".unfinished-"  # how the name of something begins while it is being written
UNFINISHED_MARK = f"{UNFINISHED}{MARK}"
"""The only unfinished entry of a run that stands at the top of its work folder, where the user may have others."""
PREVIOUS, MOVING = ".regard-previous", ".regard-moving"
"""Where the run before this one waits until this one has something to go on with, and while it is moved there."""
LOG_MARK = ".regard-logs"
"""What shows that a folder of trackers' files is of a run, which may delete it."""
SCHEMA_VERSION = 1
_HASH = re.compile("[0-9a-f]{64}")


@dataclass
class WorkDir:
    """The work folder of one run, locked while `open_work_dir` lasts; see there for the fields."""

    folder: Path
    command: str
    parts: tuple[str, ...]
    resume: bool
    products: tuple[str, ...] = ()
    journal_alone: bool = True
    _journal: Journal | None = field(default=None, repr=False)
    _is_new: bool = field(default=False, repr=False)

    @property
    def journal(self) -> Journal:
        """The finished parts of the run, once it has started."""
        assert self._journal is not None, "the run has not started"
        return self._journal

    def start(
        self, identity: Mapping[str, Any], reasons: Mapping[str, str] | None = None, newer: Sequence[str] = ()
    ) -> None:
        """Begin, or go on, as a run of this identity: what its numbers depend on.

        A run that begins sets an earlier one aside. It comes back if this one ends without anything to go on with.
        `reasons` are sentences for differences of which names and values say little, see `check_same_identity`.
        `newer` are names of the identity that are not compared with a run of before they were known.
        Raises UserError if the run to go on with has another identity, or its files are damaged.
        """
        with raise_on_all_ranks(), readable_errors(self.folder):
            if is_main_process():
                self._begin(json.loads(json.dumps(identity)), reasons or {}, newer)
        self.resume = self.resume and (self.folder / MARK).exists()
        self._journal = Journal(self.folder / JOURNAL, writable=is_main_process())

    def _begin(self, identity: dict[str, Any], reasons: Mapping[str, str], newer: Sequence[str]) -> None:
        mark = _read_mark(self.folder)
        self.resume = self.resume and mark is not None
        if mark is not None and self.resume:
            unknown = set(newer) - mark["identity"].keys()
            known = {name: value for name, value in identity.items() if name not in unknown}
            check_same_identity(mark["identity"], known, reasons)
            if not (self.folder / JOURNAL).exists():
                raise UserError(f"cannot resume: {self.folder / JOURNAL} is missing. Start again with --overwrite.")
        elif mark is not None:
            self._set_aside(mark)
        self._clear_unfinished()
        self._write_mark(identity)
        self._is_new = not self.resume

    def undo(self) -> None:
        """Delete what this call began, unless there is something to go on with. What an earlier run left stays."""
        self.settle()
        if self._is_new and not self.can_resume():
            self._delete_run()
        if _read_mark(self.folder) is None:
            (self.folder / LOCK).unlink(missing_ok=True)

    def can_resume(self) -> bool:
        """Return whether the run has left an entry in its journal, or one of the `parts`."""
        return _has_progress(self.folder, self.parts)

    def clear(self) -> None:
        """Delete what the run has made, and the folder if nothing else is in it."""
        self._delete_run()
        _delete(self.folder / PREVIOUS)
        (self.folder / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def settle(self) -> None:
        """Delete the run that was set aside if this one can go on; else delete this one, and put that one back."""
        _move_entries(self.folder / MOVING, self.folder)
        previous = self.folder / PREVIOUS
        if not previous.is_dir():
            return
        if self.can_resume():
            _delete(previous)
            return
        self._delete_run()
        _move_entries(previous, self.folder)

    def _set_aside(self, mark: Mapping[str, Any]) -> None:
        """Move the run of a mark into `PREVIOUS`, which appears when it is complete."""
        moving = self.folder / MOVING
        moving.mkdir()
        for path in self._entries(mark):
            path.rename(moving / path.name)
        moving.rename(self.folder / PREVIOUS)

    def _delete_run(self) -> None:
        """Delete what a run has made, if there is one."""
        mark = _read_mark(self.folder)
        if mark is not None:
            for path in self._entries(mark):
                _delete(path)
        self._clear_unfinished()

    def _entries(self, mark: Mapping[str, Any]) -> list[Path]:
        """Return the entries of the run of a mark, the mark last."""
        return list(dict.fromkeys(path for name in (*mark["parts"], JOURNAL, MARK) for path in self.folder.glob(name)))

    def _write_mark(self, identity: Mapping[str, Any]) -> None:
        parts = [*self.parts, *self.products]
        about = {"command": self.command, "parts": parts, "journal_alone": self.journal_alone}
        mark = {"schema_version": SCHEMA_VERSION, **about, "identity": identity}
        path = self.folder / UNFINISHED_MARK
        path.write_text(json.dumps(seal(mark), indent=1) + "\n", encoding="utf-8")
        path.replace(self.folder / MARK)

    def _clear_unfinished(self) -> None:
        """Delete what a process left that was killed while it wrote."""
        for pattern in (UNFINISHED_MARK, *(f"{part}/**/{UNFINISHED}*" for part in (*self.parts, *self.products))):
            for path in list(self.folder.glob(pattern)):
                _delete(path)


@contextlib.contextmanager
def open_work_dir(
    folder: str | Path | None,
    *,
    command: str,
    parts: Sequence[str],
    products: Sequence[str] = (),
    journal_alone: bool = True,
    resume: bool = False,
    keep: bool = False,
) -> Iterator[WorkDir]:
    """Lock the work folder of a run while the block lasts; nothing in it is deleted before `WorkDir.start`.

    At the end what the run has made is deleted, unless `keep`. After an exception it stays if the run can go on with
    it. Otherwise it goes, and an earlier run that `start` has set aside comes back.

    `folder` need not exist; None is for a temporary one. `parts` are names, or patterns, of the entries that the run
    makes there and can go on with, `products` of the others; `journal_alone`: it needs none of them beside its journal.
    With `resume` it goes on with what an earlier one has left, if anything. Runs of other threads wait until this one
    has ended. Raises UserError if the folder holds something else, or another process works in it.
    """
    if folder is None:
        if resume:
            raise UserError("resume: expected the folder of the run to go on with, work_dir=…; got none")
        with one_run(), tempfile.TemporaryDirectory(prefix=f"regard-{command}-") as temporary:
            yield WorkDir(Path(temporary), command, tuple(parts), False, tuple(products), journal_alone)
        return
    work = WorkDir(Path(folder), command, tuple(parts), resume, tuple(products), journal_alone)
    with one_run(), contextlib.ExitStack() as stack:
        with raise_on_all_ranks(), readable_errors(work.folder):
            check_work_dir(work.folder, command)
            path = work.folder.absolute()
            new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
            stack.enter_context(lock_dir(work.folder, command))
            if is_main_process():
                work.settle()  # what a process left that was killed
                check_work_dir(work.folder, command)
        try:
            yield work
        except BaseException:
            if is_main_process():
                with readable_errors(work.folder):
                    work.undo()
                _remove_empty(new_folders)
            raise
        if is_main_process():
            with readable_errors(work.folder):
                _delete(work.folder / PREVIOUS)
                if not keep:
                    work.clear()
                    _remove_empty(new_folders)


def find_log_dir(folder: str | Path | None, *, resume: bool) -> Path | None:
    """Return where trackers of a run write files: OUT.logs beside the work folder OUT.work, which does not last.

    The folder is made, and marked. What an earlier run has logged there is deleted, unless this one goes on with it.
    None without a work folder. Raises UserError if the folder holds files of another origin.
    """
    if folder is None:
        return None
    work = Path(folder).absolute()
    logs = work.with_name(f"{work.name.removesuffix('.work')}.logs")
    with raise_on_all_ranks(), readable_errors(logs):
        if is_main_process():
            is_free = not logs.exists() or (logs.is_dir() and not any(logs.iterdir()))
            if not is_free and not (logs / LOG_MARK).exists():
                raise UserError(f"trackers: expected a new folder, or that of an earlier run; {logs} holds other files")
            if not is_free and not resume:
                shutil.rmtree(logs)
            logs.mkdir(parents=True, exist_ok=True)
            (logs / LOG_MARK).touch()
    return logs


def clear_work_dir(folder: Path, command: str, parts: Sequence[str]) -> None:
    """Delete what a finished run has kept in its work folder. No other process waits for this one any more."""
    with readable_errors(folder), lock_dir(folder, command):
        check_work_dir(folder, command)
        work = WorkDir(folder, command, tuple(parts), resume=False)
        work.settle()
        work.clear()


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the innermost first, up to one in which something stands."""
    with contextlib.suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def check_work_dir(folder: Path, command: str) -> None:
    """Check that a folder is new, empty, or the work folder of a run of this command. Raises UserError."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"work folder: expected a folder, {folder} is a file")
    if not folder.is_dir() or all(path.name in (LOCK, UNFINISHED_MARK) for path in folder.iterdir()):
        return
    if not any((folder / name / MARK).exists() for name in ("", PREVIOUS, MOVING)):
        raise UserError(f"work folder: expected a new folder or that of an earlier run; {folder} holds other files")
    mark = _read_mark(folder)
    if mark is not None and mark["command"] != command:
        expected = f"a new folder or that of a run of `regard {command}`"
        raise UserError(f"work folder: expected {expected}; {folder} is of `regard {mark['command']}`")


def can_resume(folder: Path, parts: Sequence[str]) -> bool:
    """Return whether a run has left something in its work folder to go on with; see `open_work_dir` for `parts`."""
    return _has_progress(folder, parts) or any((folder / name).is_dir() for name in (PREVIOUS, MOVING))


def _has_progress(folder: Path, parts: Sequence[str]) -> bool:
    mark, journal = folder / MARK, folder / JOURNAL
    if not mark.is_file():
        return False
    if read_json(mark).get("journal_alone", True) and journal.is_file() and b"\n" in journal.read_bytes():
        return True
    entries = [path for part in parts for path in folder.glob(part)]
    files = [(entry, path) for entry in entries for path in (entry, *entry.rglob("*")) if path.is_file()]
    return any(UNFINISHED not in path.relative_to(entry).as_posix() for entry, path in files)


def check_same_identity(
    before: Mapping[str, Any], now: Mapping[str, Any], reasons: Mapping[str, str] | None = None
) -> None:
    """Check that a run goes on as what it was begun as. Raises UserError, which names the first difference.

    Two ways to write a path (./x and x) are none: what is read from it has a hash in the identity. `reasons` has, by
    name, what is said of a difference in place of its values, where no other difference is found.
    """
    was, is_now, reasons = _flatten(before), _flatten(now), reasons or {}
    for name in sorted({*was, *is_now}, key=lambda name: (name in reasons, name)):
        values = was.get(name), is_now.get(name)
        if _without_spelling(values[0]) != _without_spelling(values[1]):
            change = "was {} when the run started and is {} now".format(*map(_shorten, values))
            if all(isinstance(value, str) and _HASH.fullmatch(value) for value in values):
                change = "has changed since the run started: its SHA-256 is another"
            if name in reasons:
                raise UserError(f"cannot resume: {reasons[name]}. Start again with --overwrite.")
            raise UserError(f"cannot resume: {name} {change}. Restore it, or start again with --overwrite.")


@contextlib.contextmanager
def lock_dir(folder: Path, command: str) -> Iterator[None]:
    """Hold the lock of a folder, which is made, in the main process. Raises UserError, which names its holder.

    A disk that has no room for the holder's name is locked all the same, so that a finished run can be cleared on it.
    """
    if not is_main_process():
        yield
        return
    with _lock_file(folder) as file:
        started = datetime.datetime.now().isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "started": started}
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps(holder).encode())
        yield


@contextlib.contextmanager
def _lock_file(folder: Path) -> Iterator[IO[str]]:
    """Hold the lock file of a folder; if its last holder has deleted it meanwhile, that of a new one."""
    path, is_locked = folder / LOCK, False
    while not is_locked:
        with readable_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"{folder} is in use by {_holder(file)}. Wait for it, or stop it."
                raise UserError(f"work folder: {message}") from error
            except OSError as error:
                raise UserError(f"work folder: cannot lock {path}: {error.strerror or error}") from error
            is_locked = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
            if is_locked:
                yield file


def _holder(file: IO[str]) -> str:
    """Name the process that holds a lock, from what it has written there."""
    try:
        file.seek(0)
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']} (regard {holder['command']}, since {holder['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the mark of a run in a folder, None where there is none. Raises UserError for a damaged one."""
    path = folder / MARK
    if not path.is_file():
        return None
    mark = read_json(path)
    if not is_sealed(mark) or mark.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"work folder: {path} is damaged or of another version. Delete {folder}, or choose another.")
    return mark


def _move_entries(source: Path, target: Path) -> None:
    """Move what is in a folder, a run's mark last, and delete the folder. Nothing happens where there is none."""
    if source.is_dir():
        for path in sorted(source.iterdir(), key=lambda path: path.name == MARK):
            path.rename(target / path.name)
        source.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries, and of lists of them, by their names with dots between."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and part for part in value):
        value = {str(index): part for index, part in enumerate(value)}
    if not isinstance(value, Mapping):
        return {name: value}
    parts = [_flatten(inner, f"{name}.{_without_spelling(part)}".strip(".")) for part, inner in value.items()]
    return {key: leaf for leaves in parts for key, leaf in leaves.items()}


def _without_spelling(value: Any) -> Any:
    """Return a text, or those of a list, as the shortest way to write the path that it may be."""
    if isinstance(value, list):
        return [_without_spelling(part) for part in value]
    return os.path.normpath(value) if isinstance(value, str) and value else value


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
