"""What every command line does around a run."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from regard.errors import UserError
from regard.runs import distributed
from regard.runs.command_line import print_summary, run_command
from regard.runs.output_dir import atomic_folder
from regard.runs.work_dir import open_work_dir


@dataclass(frozen=True)
class Saved:
    """A result that saves one file."""

    metadata: dict[str, Any] = field(default_factory=dict)

    def save(self, out: Path, *, overwrite: bool) -> None:
        out.mkdir()
        (out / "results.json").write_text(str(self.metadata["command_line"]))

    def summary(self) -> str:
        return "done"


def test_the_end_waits_for_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(work_dir: Path, on_progress: Any) -> Saved:
        with open_work_dir(work_dir, command="measure", parts=("states",), keep=True) as work:
            work.start({"seed": 1})
            work.journal.add("entry", 1)
        # From here the others leave: a collective call would wait for them without end.
        monkeypatch.setattr(distributed, "world_size", lambda: 2)
        monkeypatch.setattr(distributed, "all_gather_bytes", lambda raw: pytest.fail("waits for processes that left"))
        return Saved()

    args = argparse.Namespace(overwrite=False, resume=False, line="regard test")
    run_command(args, "measure", tmp_path / "out", run, parts=("states",))
    assert (tmp_path / "out" / "results.json").read_text() == "regard test"
    assert not (tmp_path / "out.work").exists()
    assert "done" in capsys.readouterr().out


@dataclass(frozen=True)
class Written(Saved):
    """A result that is written whole, as those of commands are."""

    def save(self, out: Path, *, overwrite: bool) -> None:
        with atomic_folder(out, overwrite=overwrite, command="measure", option="folder") as folder:
            (folder / "results.json").write_text('{"command": "measure"}')


def test_a_run_that_comes_second_is_told_of_the_first(tmp_path: Path) -> None:
    """It was told to give overwrite=True, an argument of Python, and nothing of what had happened."""

    def run(work_dir: Path, on_progress: Any) -> Written:
        Written().save(tmp_path / "out", overwrite=False)
        return Written()

    args = argparse.Namespace(overwrite=False, resume=False, line="regard test")
    with pytest.raises(UserError, match=r"^--out: another run wrote .*out while this one ran.*give --overwrite$"):
        run_command(args, "measure", tmp_path / "out", run)


def test_a_variable_of_a_script_is_no_rank_of_a_process_that_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With RANK=8, as scripts name the rank of LoRA, a run ended well, wrote nothing, and said nothing."""
    monkeypatch.setenv("RANK", "8")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = argparse.Namespace(overwrite=False, resume=False, line="regard test")
    run_command(args, "measure", tmp_path / "out", lambda *given: Saved())
    assert (tmp_path / "out" / "results.json").read_text() == "regard test"
    assert "done" in capsys.readouterr().out


def test_a_folder_with_brackets_is_named_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run[a]").mkdir()
    (tmp_path / "run[a]" / "x").touch()
    print_summary(Text(""), tmp_path / "run[a]")
    assert f"Written to {tmp_path / 'run[a]'}: x" in capsys.readouterr().out
