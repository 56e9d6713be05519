"""A journal keeps what was added, and notices every change of what it kept."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.runs.journal import Journal


def filled(path: Path, count: int = 3) -> Journal:
    journal = Journal(path)
    for number in range(count):
        journal.add(f"entry {number}", {"value": number / 7})
    return journal


def test_entries_come_back_exactly(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    again = Journal(tmp_path / "j")
    assert "entry 2" in again
    assert "entry 3" not in again
    assert again["entry 1"] == {"value": 1 / 7}
    assert len(again) == 3


@pytest.mark.parametrize("damage", ["changed", "removed", "swapped"])
def test_a_damaged_entry_is_noticed(tmp_path: Path, damage: str) -> None:
    filled(tmp_path / "j")
    lines = (tmp_path / "j").read_text().splitlines(keepends=True)
    if damage == "changed":
        lines[1] = lines[1].replace("entry 1", "entry 9")
    elif damage == "removed":
        del lines[1]
    else:
        lines[0], lines[1] = lines[1], lines[0]
    (tmp_path / "j").write_text("".join(lines))
    with pytest.raises(UserError, match=r"entry .* is damaged"):
        Journal(tmp_path / "j")


@settings(max_examples=40, deadline=None)
@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_flipped_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, place: int, flip: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    filled(path)
    raw = bytearray(path.read_bytes())
    before = {f"entry {number}": {"value": number / 7} for number in range(3)}
    raw[place % len(raw)] ^= flip
    path.write_bytes(bytes(raw))
    try:
        again = Journal(path)
    except UserError:
        return
    entries = {name: again[name] for name in before if name in again}
    assert entries == {name: before[name] for name in entries}
    assert len(again) == len(entries)  # at most the end is missing, as after a crash


def test_a_line_that_a_crash_cut_off_does_not_count(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with (tmp_path / "j").open("a") as file:
        file.write('{"name": "entry 3", "val')
    again = Journal(tmp_path / "j")
    assert len(again) == 3
    again.add("entry 3", 1)
    assert Journal(tmp_path / "j")["entry 3"] == 1


def test_a_line_that_a_crash_cut_off_goes_without_a_new_copy_of_the_others(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole + b'{"name": "entry 3", "val')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file can be written, as on a full disk
    try:
        Journal(tmp_path / "j")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "j").read_bytes() == whole


def test_a_whole_entry_counts_without_its_line_end(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-1])
    assert len(Journal(tmp_path / "j", writable=False)) == 3
    assert len(Journal(tmp_path / "j")) == 3
    assert (tmp_path / "j").read_bytes() == whole


def test_a_byte_that_is_no_text_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[5] ^= 0x80
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(UserError, match=r"entry 1 .* is damaged"):
        Journal(tmp_path / "j")


def test_an_added_value_is_what_comes_back_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    assert journal.add("a", {1: (2, 3)}) == {"1": [2, 3]} == journal["a"]
    assert Journal(tmp_path / "j")["a"] == journal["a"]


def test_a_journal_that_lost_entries_is_told_from_one_that_has_them(tmp_path: Path) -> None:
    head = filled(tmp_path / "j").head
    filled(tmp_path / "j2", 4).check_contains(head)
    with pytest.raises(UserError, match="had 3 entries"):
        filled(tmp_path / "j3", 2).check_contains(head)
    with pytest.raises(UserError, match="had 3 entries"):
        Journal(tmp_path / "gone").check_contains(json.loads(json.dumps(head)))


def test_one_that_only_follows_writes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", writable=False)
    assert journal.add("a", 1) == 1
    assert journal["a"] == 1
    assert not (tmp_path / "j").exists()


def test_seconds_go_on_where_a_run_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("regard.runs.journal.time", SimpleNamespace(perf_counter=lambda: now[0]))
    path = tmp_path / "journal.jsonl"
    for earlier in (0, 100):
        journal = Journal(path)
        now[0] += 100
        journal.add(f"after {earlier}", 1)
        now[0] += 5  # lost with a process that is killed
        assert journal.seconds == earlier + 105
        now[0] += 1000
