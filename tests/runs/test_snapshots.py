"""States of a run: whole or not at all, checked when read, the last two kept."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.errors import UserError
from regard.runs.snapshots import MANIFEST, Snapshots


def writing(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "data.txt").write_text(text) and None


def saved(folder: Path, *indices: int) -> Snapshots:
    snapshots = Snapshots(folder)
    for index in indices:
        snapshots.save(index, writing(f"state {index}"), {"index": index})
    return snapshots


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 1, 5, 9)
    assert [snapshots.index_of(path) for path in snapshots.paths()] == [5, 9]
    path, record = snapshots.latest() or (None, None)
    assert (path, record) == (snapshots.path(9), {"index": 9})
    assert (snapshots.path(9) / "data.txt").read_text() == "state 9"


def test_states_after_the_one_that_is_written_are_of_a_run_that_was_left(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 1, 5, 9, 3)
    assert [snapshots.index_of(path) for path in snapshots.paths()] == [3]


@pytest.mark.parametrize("name", ["data.txt", MANIFEST])
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
def test_a_damaged_state_is_passed_over_with_a_warning(tmp_path: Path, name: str, damage: str) -> None:
    snapshots = saved(tmp_path, 1, 2)
    path = snapshots.path(2) / name
    if damage == "deleted":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(bytes(raw))
    with pytest.warns(UserWarning, match="is damaged"):
        latest = snapshots.latest()
    assert latest == (snapshots.path(1), {"index": 1})


def test_a_state_under_the_name_of_another_is_passed_over(tmp_path: Path) -> None:
    states = saved(tmp_path, 1, 2)
    states.path(2).rename(states.path(9))
    with pytest.warns(UserWarning, match="of the state of step 2"):
        latest = states.latest()
    assert latest is not None
    assert latest[0] == states.path(1)


def test_where_all_are_damaged_the_run_is_refused(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 1, 2)
    for path in snapshots.paths():
        (path / "data.txt").unlink()
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(UserError, match="each of the 2 states"):
        snapshots.latest()


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert Snapshots(tmp_path / "none").latest() is None


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "data.txt").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"No space left on device; the last good state is .*step-00000001"):
        snapshots.save(2, full, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_a_killed_process_left_goes_with_the_next_state(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-abc").mkdir()
    saved(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
