"""A work folder deletes only its own, is locked, and knows the run that it belongs to."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from regard.errors import UserError
from regard.runs.work_dir import (
    JOURNAL,
    LOCK,
    MARK,
    MOVING,
    can_resume,
    check_same_identity,
    clear_work_dir,
    lock_dir,
    open_work_dir,
)
from tests.commands.sweep.sweeping import until
from tests.processes import run_python, started

PARTS = ("states",)
ROOT = Path(__file__).parents[2]


def run(folder: Path, *, resume: bool = False, identity: int = 1, fails: bool = True) -> list[str]:
    """Add an entry to a run's journal, and stop as a run that was interrupted."""
    try:
        with open_work_dir(folder, command="test", parts=PARTS, resume=resume) as work:
            work.start({"seed": identity})
            work.journal.add(f"entry {len(work.journal)}", 1)
            (folder / "states").mkdir(exist_ok=True)
            (folder / "states" / "a").write_text("a")
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_name_of_a_folder_above_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / ".unfinished-thesis" / "work"
    with open_work_dir(folder, command="pretrain", parts=("checkpoints",), keep=True) as work:
        work.start({"a": 1})
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "state").touch()
        assert work.can_resume()


def test_a_finished_run_leaves_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "a" / "b", fails=False) == []
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("alone", [True, False])
def test_whether_a_journal_alone_is_something_to_go_on_with(alone: bool, tmp_path: Path) -> None:
    folder = tmp_path / "w"
    with (
        contextlib.suppress(KeyboardInterrupt),
        open_work_dir(folder, command="test", parts=PARTS, journal_alone=alone) as work,
    ):
        work.start({"seed": 1})
        work.journal.add("entry", 1)
        assert work.can_resume() == alone
        raise KeyboardInterrupt
    assert can_resume(folder, PARTS) == folder.exists() == alone


def test_an_interrupted_run_stays_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    assert run(folder) == [LOCK, JOURNAL, "states", MARK]
    assert can_resume(folder, PARTS)
    with open_work_dir(folder, command="test", parts=PARTS, resume=True, keep=True) as work:
        work.start({"seed": 1})
        assert work.resume
        assert "entry 0" in work.journal
    with open_work_dir(folder, command="test", parts=PARTS, resume=False) as work:
        assert "entry 0" in (folder / JOURNAL).read_text()  # nothing is deleted before the run has started
        work.start({"seed": 1})
        assert len(work.journal) == 0
        assert not (folder / "states").exists()


def test_a_refused_call_deletes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    run(folder)
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refused() -> None:
        with open_work_dir(folder, command="test", parts=PARTS):
            raise UserError("a mistake")

    with pytest.raises(UserError, match="a mistake"):
        refused()
    after = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {**after, LOCK: b""} == {**before, LOCK: b""}


def begin(folder: Path) -> None:
    """Start a run in a folder of another, and end it before it has anything to go on with."""
    with open_work_dir(folder, command="test", parts=PARTS) as work:
        work.start({"seed": 2})
        (work.folder / "states").mkdir()
        raise UserError("a mistake")


def begin_killed(folder: Path) -> None:
    """Do the same in a process that is killed."""
    program = f"""
import os
from pathlib import Path
from regard.runs.work_dir import open_work_dir
with open_work_dir(Path({str(folder)!r}), command="test", parts={PARTS}) as work:
    work.start({{"seed": 2}})
    (work.folder / "states").mkdir()
    os._exit(0)
"""
    assert not run_python(["-c", program], {**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode


@pytest.mark.sample(1)
@pytest.mark.parametrize("killed", [False, True])
def test_an_earlier_run_comes_back_if_the_next_one_did_nothing(tmp_path: Path, killed: bool) -> None:
    folder = tmp_path / "w"
    run(folder)
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}
    if killed:
        begin_killed(folder)
    else:
        with pytest.raises(UserError, match="a mistake"):
            begin(folder)
    assert can_resume(folder, PARTS)
    with open_work_dir(folder, command="test", parts=PARTS, resume=True, keep=True):
        pass
    assert {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK
    } == before
    assert run(folder, resume=True) == [LOCK, JOURNAL, "states", MARK]


def test_a_run_that_was_killed_while_it_was_set_aside_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    run(folder)
    (folder / MOVING).mkdir()
    (folder / "states").rename(folder / MOVING / "states")
    assert can_resume(folder, PARTS)
    assert run(folder, resume=True) == [LOCK, JOURNAL, "states", MARK]
    assert (folder / "states" / "a").read_text() == "a"


def test_an_earlier_run_goes_once_the_next_one_has_something(tmp_path: Path) -> None:
    run(tmp_path / "w")
    assert run(tmp_path / "w", identity=2) == [LOCK, JOURNAL, "states", MARK]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    (tmp_path / "states").mkdir()
    with (
        pytest.raises(UserError, match="holds other files"),
        open_work_dir(tmp_path, command="test", parts=PARTS, resume=resume),
    ):
        pytest.fail("entered")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states", "thesis.txt"]


def test_files_of_somebody_else_survive_beside_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    run(folder)
    (folder / "notes.txt").write_text("mine")
    run(folder)
    assert run(folder, fails=False) == ["notes.txt"]


def test_the_folder_of_another_command_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "w")
    with (
        pytest.raises(UserError, match="is of `regard test`"),
        open_work_dir(tmp_path / "w", command="other", parts=PARTS),
    ):
        pytest.fail("entered")


def test_another_identity_does_not_go_on(tmp_path: Path) -> None:
    run(tmp_path / "w")
    with pytest.raises(UserError, match="seed was 1 when the run started and is 2 now"):
        run(tmp_path / "w", resume=True, identity=2)
    assert can_resume(tmp_path / "w", PARTS)


def test_names_that_came_later_are_compared_where_they_are_known(tmp_path: Path) -> None:
    run(tmp_path / "w")

    def resume(identity: dict[str, Any]) -> None:
        with open_work_dir(tmp_path / "w", command="test", parts=PARTS, resume=True, keep=True) as work:
            work.start(identity, newer=("files",))

    resume({"seed": 1, "files": {"a": 1}})
    with pytest.raises(UserError, match=r"files\.a was 1 when the run started and is 2 now"):
        resume({"seed": 1, "files": {"a": 2}})
    with pytest.raises(UserError, match=r"files\.a was 1 when the run started and is null now"):
        resume({"seed": 1})


@pytest.mark.parametrize("now", [[{}], [{}, {"train": "a"}], [{}, {}, {}]])
def test_parts_of_which_nothing_is_known_are_counted(now: list[dict[str, str]]) -> None:
    """Tasks without hashes: however many, they were the same."""
    with pytest.raises(UserError, match="cannot resume: tasks"):
        check_same_identity({"tasks": [{}, {}]}, {"tasks": now})


@pytest.mark.parametrize(
    "before, now, told",
    [
        ({"seed": 1, "head": "full"}, {"seed": 1}, 'head was "full" when the run started and is null now'),
        ({"seed": 1}, {"seed": 1, "head": "full"}, 'head was null when the run started and is "full" now'),
        ({"data": {"rows": 5}}, {"data": {"rows": 6}}, "data.rows was 5 when the run started and is 6 now"),
        ({"tasks": [{"n": 1}, {"n": 2}]}, {"tasks": [{"n": 1}, {"n": 3}]}, "tasks.1.n was 2 when the run started"),
        ({"tasks": [{"train": "ab" * 32}]}, {"tasks": [{"train": "cd" * 32}]}, "tasks.0.train has changed since"),
    ],
)
def test_the_first_difference_is_named_whichever_side_has_it(
    before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as raised:
        check_same_identity(before, now)
    assert str(raised.value).startswith(f"cannot resume: {told}")
    check_same_identity(before, before)
    check_same_identity(now, now)


@pytest.mark.parametrize("name", [MARK, JOURNAL])
def test_a_damaged_index_is_noticed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "w"
    run(folder)
    (folder / name).write_text((folder / name).read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match="damaged"):
        run(folder, resume=True)


def test_a_missing_journal_is_noticed(tmp_path: Path) -> None:
    run(tmp_path / "w")
    (tmp_path / "w" / JOURNAL).unlink()
    with pytest.raises(UserError, match="is missing"):
        run(tmp_path / "w", resume=True)


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    run(folder)
    (folder / ".unfinished-work.json").write_text("{")
    (folder / "states" / "deep").mkdir()
    (folder / "states" / "deep" / ".unfinished-x").mkdir()
    run(folder, resume=True)
    assert not list(folder.rglob(".unfinished-*"))


def test_an_unfinished_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    folder, notes = tmp_path / "w", tmp_path / "w" / ".unfinished-thesis.txt"
    folder.mkdir()
    notes.write_text("ten years of work")
    with pytest.raises(UserError, match="holds other files"):
        run(folder)
    notes.rename(tmp_path / notes.name)
    run(folder)
    (tmp_path / notes.name).rename(notes)
    run(folder, resume=True)
    run(folder)
    assert run(folder, fails=False) == [notes.name]


@pytest.mark.parametrize("target", ["states", MARK])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    folder = tmp_path / "w"
    run(folder)
    rename = Path.rename

    def refuse(path: Path, new: Path) -> Path:
        if path.name == target:
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match=rf"cannot write {folder}: Permission denied"):
        run(folder)
    monkeypatch.undo()
    assert run(folder, resume=True) == [LOCK, JOURNAL, "states", MARK]
    assert (folder / JOURNAL).read_text().count("\n") == 2


HOLDING = """
import sys, time
from regard.runs.work_dir import open_work_dir
with open_work_dir(sys.argv[1], command="test", parts=()) as work:
    work.start({})
    print("there", flush=True)
    time.sleep(300)
"""


def test_two_ways_to_write_a_path_are_one() -> None:
    before = {"config": {"model": "./x", "text": ["a/b.txt"], "seed": 1, "none": ""}, "data": {"./a/b.txt": "hash"}}
    now = {"config": {"model": "x", "text": ["./a//b.txt"], "seed": 1, "none": ""}, "data": {"a/b.txt": "hash"}}
    check_same_identity(before, now)
    check_same_identity(now, before)
    with pytest.raises(UserError, match=r"config.model was \"./x\" when the run started and is \"y\" now"):
        check_same_identity(before, {**now, "config": {**now["config"], "model": "y"}})
    with pytest.raises(UserError, match=r"data.a/b.txt was"):
        check_same_identity(before, {**now, "data": {"a/b.txt": "other"}})


def test_a_folder_at_work_is_refused_and_says_who_works_there(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with started(["-c", HOLDING, str(tmp_path / "w")], environment) as holder:
        until(lambda: (holder.folder / "out").is_file() and (holder.folder / "out").read_text() == "there\n")
        with pytest.raises(UserError, match=f"in use by process {holder.process.pid} on .*regard test"):
            run(tmp_path / "w")
        holder.send_signal(signal.SIGKILL)
        holder.process.join()
    assert LOCK in run(tmp_path / "w")  # a process that is gone holds no lock


def test_a_lock_that_its_holder_has_deleted_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def delete_first(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / "w" / LOCK).unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with (
        open_work_dir(tmp_path / "w", command="test", parts=()),
        pytest.raises(UserError, match=f"in use by process {os.getpid()}"),
    ):
        run(tmp_path / "w")


def test_a_folder_that_cannot_be_locked_is_not_said_to_be_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"cannot lock .*: No locks available"):
        run(tmp_path / "w")


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "important").write_text("important")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / LOCK).symlink_to(tmp_path / "important")
    with pytest.raises(UserError, match="cannot write"):
        run(tmp_path / "w")
    assert (tmp_path / "important").read_text() == "important"


def test_without_a_folder_there_is_nothing_to_go_on_with() -> None:
    with pytest.raises(UserError, match="resume"), open_work_dir(None, command="test", parts=(), resume=True):
        pytest.fail("entered")
    with open_work_dir(None, command="test", parts=()) as work:
        work.start({})
        folder = work.folder
        assert json.loads((folder / MARK).read_text())["command"] == "test"
    assert not folder.exists()


@pytest.mark.parametrize("journal", [None, ""])
def test_a_refused_call_leaves_what_an_earlier_run_made(journal: str | None, tmp_path: Path) -> None:
    """Also where there is nothing to go on with, such as a lost or emptied journal."""
    options: dict[str, Any] = {"command": "learn", "parts": ("states",), "products": ("models",), "keep": True}
    with open_work_dir(tmp_path / "work", **options) as work:
        work.start({"seed": 1})
        work.journal.add("run", 1)
        (tmp_path / "work" / "models").mkdir()
        (tmp_path / "work" / "models" / "delta").write_text("trained for hours")
    path = tmp_path / "work" / "journal.jsonl"
    path.unlink() if journal is None else path.write_text(journal)
    for resume in (True, False):
        with pytest.raises(UserError, match=r"a mistake|journal\.jsonl is missing"):
            _refused(tmp_path / "work", options, resume=resume, starts=resume and journal is None)
        assert (tmp_path / "work" / "models" / "delta").read_text() == "trained for hours"


def _refused(folder: Path, options: dict[str, Any], *, resume: bool, starts: bool) -> None:
    with open_work_dir(folder, resume=resume, **options) as work:
        if starts:
            work.start({"seed": 1})
        raise UserError("a mistake")


def test_a_refused_call_leaves_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with pytest.raises(UserError, match="a mistake"), open_work_dir(tmp_path / "work", command="learn", parts=()):
        raise UserError("a mistake")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_finished_run_is_cleared_on_a_full_disk(tmp_path: Path) -> None:
    """Its result was written, and the command then ended as if it were not: the lock's file had no room for a name."""
    run(tmp_path / "work")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with lock_dir(tmp_path / "work", "test"), pytest.raises(UserError, match="is in use by another process"):
            clear_work_dir(tmp_path / "work", "test", PARTS)
        clear_work_dir(tmp_path / "work", "test", PARTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "work").exists()
