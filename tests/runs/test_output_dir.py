"""An output folder is written whole or not at all, and replaces nothing but what its own kind has written."""

import json
import resource
import stat
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from regard.errors import UserError
from regard.runs import integrity
from regard.runs.integrity import sha256_of_files
from regard.runs.output_dir import PAGE, RESULTS, atomic_folder, check_output_dir


def write(folder: Path, *names: str, overwrite: bool = False, marker: str = RESULTS, listed: bool = True) -> None:
    """Write a folder as a run does, with a list of its files or without."""
    with atomic_folder(folder, overwrite=overwrite, command="test", marker=marker) as path:
        for name in names:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text("new", encoding="utf-8")
        files = {"files": sha256_of_files(path)} if listed else {}
        (path / marker).write_text(json.dumps({"command": "test", **files}), encoding="utf-8")


def read(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RESULTS)
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_a_run_replaces_what_an_earlier_one_has_written(tmp_path: Path) -> None:
    write(tmp_path / "run", "a", "model/b")
    with pytest.raises(UserError, match="exists; choose another folder, or give --overwrite"):
        write(tmp_path / "run", "c")
    write(tmp_path / "run", "c", overwrite=True)
    assert read(tmp_path / "run") == {"c": "new"}


@pytest.mark.parametrize("name", ["notes.txt", "model/notes.txt", "c"])
def test_a_file_of_the_user_in_the_folder_of_a_run_is_not_lost(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    write(folder, "a", "model/b")
    (folder / name).write_text("ten years of work", encoding="utf-8")
    before = read(folder)
    with pytest.raises(UserError, match=f"holds {name}, which was not written with results.json and would be lost"):
        check_output_dir(folder, overwrite=True, command="test")
    with pytest.raises(UserError, match=f"holds {name}"):
        write(folder, "c", overwrite=True)
    assert read(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_that_came_while_the_run_was_at_work_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write(folder, "a")

    def replace() -> None:
        with atomic_folder(folder, overwrite=True, command="test"):
            (folder / "notes.txt").write_text("mine", encoding="utf-8")

    with pytest.raises(UserError, match=r"holds notes.txt"):
        replace()
    assert read(folder) == {"a": "new", "notes.txt": "mine"}


def test_results_of_another_program_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text('{"accuracy": 0.9}', encoding="utf-8")
    with pytest.raises(UserError, match=r"is none, by its results.json; it is not overwritten"):
        check_output_dir(tmp_path, overwrite=True, command="test")


def test_a_folder_that_came_while_the_run_was_at_work_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def begin() -> None:
        with atomic_folder(folder, overwrite=False, command="test"):
            write(folder, "other")

    with pytest.raises(UserError, match="exists"):
        begin()
    assert read(folder) == {"other": "new"}


def test_without_a_list_what_is_not_written_again_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write(folder, "weights", marker="lineage.json", listed=False)
    write(folder, "weights", marker="lineage.json", listed=False, overwrite=True)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds notes.txt, which was not written with lineage.json"):
        write(folder, "weights", marker="lineage.json", listed=False, overwrite=True)
    assert "notes.txt" in read(folder)


def test_a_link_to_a_folder_is_not_lost(tmp_path: Path) -> None:
    write(tmp_path / "run", "a")
    (tmp_path / "data").mkdir()
    (tmp_path / "run" / "data").symlink_to(tmp_path / "data")
    with pytest.raises(UserError, match=r"holds data, which was not written with results.json"):
        write(tmp_path / "run", "a", overwrite=True)
    assert (tmp_path / "run" / "data").is_symlink()


def test_a_file_that_was_changed_since_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write(folder, PAGE, "model/weights")
    (folder / PAGE).write_text("made again", encoding="utf-8")
    write(folder, PAGE, "model/weights", overwrite=True)
    (folder / "model" / "weights").write_text("trained further", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds model/weights, which was changed after results.json was written"):
        write(folder, PAGE, "model/weights", overwrite=True)
    assert read(folder)["model/weights"] == "trained further"


def test_an_earlier_run_is_hashed_once_before_and_once_after_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", "a")
    hashed = []
    sha256_of_file = integrity.sha256_of_file
    monkeypatch.setattr(integrity, "sha256_of_file", lambda path: hashed.append(path) or sha256_of_file(path))
    with atomic_folder(tmp_path / "run", overwrite=True, command="test"):
        pass
    assert hashed == [tmp_path / "run" / "a"] * 2


@pytest.mark.parametrize("name", ["one", "one/run"])
def test_a_link_that_leads_to_itself_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(UserError, match="is a link that leads to itself"):
        check_output_dir(tmp_path / name, overwrite=True)


def test_a_folder_below_one_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="--out: cannot write run: No such file or directory"):
        check_output_dir("run", overwrite=False)


def test_a_mount_point_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"is a mount point .* Choose a folder below it"):
        check_output_dir("/", overwrite=True, command="test")


def test_folders_with_long_names_do_not_take_each_others_leftovers(tmp_path: Path) -> None:
    names = ["n" * 100 + "-a", "n" * 100 + "-b"]
    parts = []
    for name in names:
        with atomic_folder(tmp_path / name, overwrite=False) as path:
            parts.append(path.name.split("-new-")[0])
    assert parts[0] != parts[1]


def test_a_folder_keeps_its_mode_when_it_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "run", "a")
    (tmp_path / "run").chmod(0o770)
    write(tmp_path / "run", "a", overwrite=True)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o770


def test_a_path_that_is_no_text_is_refused_ahead(tmp_path: Path) -> None:
    """Libraries that write tables raise on it, at the end of a run."""
    with pytest.raises(UserError, match=r"--out: expected a path in UTF-8, got '.*udcff'"):
        check_output_dir(tmp_path / "run\udcff", overwrite=False)


def test_a_tokenizer_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """Its package raises a bare Exception, which ended in a traceback."""
    tokenizer, before = Tokenizer(WordLevel({"a": 0}, unk_token="a")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with (
            pytest.raises(UserError, match=r"cannot write .*run: File too large .*; nothing was written"),
            atomic_folder(tmp_path / "run", overwrite=False, command="test") as path,
        ):
            tokenizer.save(str(path / "tokenizer.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(Exception, match="a fault of our own"),
        atomic_folder(tmp_path / "run", overwrite=False, command="test"),
    ):
        raise Exception("a fault of our own")
