"""What an interrupted run has left is not lost by a mistake, and is not trusted unread."""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.commands.learn import cli as learn_cli
from regard.commands.learn.result import LearnResult
from regard.commands.learn.run import Progress
from regard.commands.pretrain.result import PretrainResult
from regard.errors import UserError
from regard.runs.progress import ProgressEvent
from regard.runs.work_dir import JOURNAL, LOCK

Regard = Callable[..., Any]
Line = tuple[Any, ...]


def interrupt(*_args: object, **_options: object) -> None:
    raise KeyboardInterrupt


def refuse(*_args: object, **_options: object) -> None:
    raise UserError("it cannot be")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """A run of four steps, with a checkpoint after two."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    (tmp_path / "prose.txt").write_text(
        "\n".join(" ".join(draw.choices(["sink", "first", "the", "token"], k=12)) for _ in range(150))
    )
    return (
        *("pretrain", "nano", "--num-layers", 1, "--hidden-size", 16, "--num-heads", 2, "--intermediate-size", 16),
        *("--length", 16, "--vocab-size", 270, "--batch-size", 4, "--max-steps", 4, "--warmup-steps", 1),
        *("--eval-steps", 2, "--sink-samples", 4, "--eval-samples", 4, "--save-steps", 2),
        *("--data", "prose.txt", "--out", "run"),
    )


@pytest.fixture
def interrupted(pretraining: Line, regard: Regard, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The line of a pretraining that was interrupted, and can go on."""
    with monkeypatch.context() as patched:
        patched.setattr(PretrainResult, "save", interrupt)
        assert "Continue with the same command and --resume" in regard(*pretraining).complaint
    return pretraining


@pytest.fixture
def interrupted_learning(regard: Regard, words: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The line of learning that was interrupted in its second task."""
    few = ("--num-epochs", 1, "--batch-size", 4, "--length", 10, "--diagnostic-samples", 0, "--method", "finetune")
    line = ("learn", words / "words.jsonl", "--model", words / "model", *few, "--out", "run")

    def stopping(_: object) -> Callable[[Progress], None]:
        def look(progress: Progress) -> None:
            if progress.event.task_index == 3:
                raise KeyboardInterrupt

        return look

    with monkeypatch.context() as patched:
        patched.setattr(learn_cli, "describe_progress", stopping)
        assert "Continue with the same command and --resume" in regard(*line).complaint
    return line


def test_a_wrong_tracker_does_not_lose_the_run_before(interrupted: Line, regard: Regard, tmp_path: Path) -> None:
    before = contents(tmp_path / "run.work")
    assert len(before) > 2
    for option in ("--overwrite", "--resume"):
        assert "trackers: expected" in regard(*interrupted, option, "--trackers", "nowhere").complaint
        assert contents(tmp_path / "run.work") == before
        assert not (tmp_path / "run.logs").exists()
    assert regard(*interrupted, "--resume").code == 0


def test_a_refusal_after_learning_has_started_does_not_lose_the_run_before(
    interrupted_learning: Line, regard: Regard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = contents(tmp_path / "run.work")
    monkeypatch.setattr("regard.commands.learn.run.run_method", refuse)
    assert regard(*interrupted_learning, "--overwrite").complaint == "regard learn: it cannot be"
    assert contents(tmp_path / "run.work") == before


def test_a_failed_save_does_not_lose_the_run(
    pretraining: Line, regard: Regard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("pandas.DataFrame.to_parquet", refuse)
        assert regard(*pretraining).complaint == "regard pretrain: it cannot be"
    assert not (tmp_path / "run").exists()
    assert regard(*pretraining, "--resume").code == 0


def test_a_flipped_weight_in_a_state_is_noticed(interrupted_learning: Line, regard: Regard, tmp_path: Path) -> None:
    states = sorted((tmp_path / "run.work" / "states").rglob("*.safetensors"))
    assert states
    for path in states:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    before = contents(tmp_path / "run.work")
    with pytest.warns(UserWarning, match="is damaged"):
        complaint = regard(*interrupted_learning, "--resume").complaint
    assert "cannot resume: each of the" in complaint
    assert contents(tmp_path / "run.work") == before


def test_a_missing_journal_is_noticed(interrupted: Line, regard: Regard, tmp_path: Path) -> None:
    (tmp_path / "run.work" / JOURNAL).unlink()
    before = contents(tmp_path / "run.work")
    complaint = regard(*interrupted, "--resume").complaint
    assert complaint.endswith(f"{JOURNAL} is missing. Start again with --overwrite.")
    assert contents(tmp_path / "run.work") == before


def test_a_shortened_journal_is_noticed(interrupted: Line, regard: Regard, tmp_path: Path) -> None:
    path = tmp_path / "run.work" / JOURNAL
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert "now lacks some of them" in regard(*interrupted, "--resume").complaint


def test_a_second_living_run_is_refused_with_the_process_of_the_first(
    pretraining: Line, regard: Regard, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[str] = []

    @contextlib.contextmanager
    def run_again() -> Iterator[Callable[[ProgressEvent], None]]:
        def look(event: ProgressEvent) -> None:
            if event.phase == "training" and not complaints:
                complaints.append("")
                complaints[0] = regard(*pretraining, "--resume").complaint

        yield look

    monkeypatch.setattr("regard.runs.command_line.show_progress", run_again)
    assert regard(*pretraining).code == 0
    assert f"run.work is in use by process {os.getpid()} on " in complaints[0]
    assert json.loads(Path("run/results.json").read_text())["command"] == "pretrain"


def test_a_file_of_the_user_in_the_folder_of_a_run_is_not_lost(
    interrupted_learning: Line, regard: Regard, tmp_path: Path
) -> None:
    assert regard(*interrupted_learning, "--resume").code == 0
    (tmp_path / "run" / "models" / "notes.txt").write_text("mine")
    complaint = regard(*interrupted_learning, "--overwrite").complaint
    assert "run holds models/notes.txt, which was not written with results.json" in complaint
    assert LearnResult.load(tmp_path / "run").metadata["command"] == "learn"
    assert not (tmp_path / "run.work").exists()
