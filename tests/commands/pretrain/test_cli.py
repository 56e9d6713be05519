"""`regard pretrain` end to end, and what it refuses: exit code 2, one line, nothing on disk."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors import SafetensorError

from regard.commands.pretrain.result import PretrainResult
from regard.models import RegardForCausalLM

Regard = Callable[..., Any]
SMALL = (
    *("--num-layers", 1, "--hidden-size", 16, "--num-heads", 2, "--intermediate-size", 16, "--length", 16),
    *("--vocab-size", 270, "--batch-size", 4, "--max-steps", 4, "--warmup-steps", 1),
    *("--eval-steps", 2, "--sink-samples", 4, "--eval-samples", 4),
)
FOLDER = ["history.parquet", "model", "report.html", "results.json", "sinks.parquet"]


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    draw = random.Random(0)
    path = tmp_path / "prose.txt"
    path.write_text("\n".join(" ".join(draw.choices(["sink", "first", "the", "token"], k=12)) for _ in range(150)))
    return path


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))


def test_a_run_writes_its_folder_and_says_so(regard: Regard, prose: Path, tmp_path: Path) -> None:
    ended = regard("pretrain", "nano", *SMALL, "--data", prose, "--attention", "sigmoid", "--out", "run")
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FOLDER
    assert "Written to run: history.parquet, model, report.html" in ended.out
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["config"]["attention"] == "sigmoid"
    assert record["config"]["data"] == [str(prose)]
    assert pd.read_parquet(tmp_path / "run" / "history.parquet")["step"].iloc[-1] == 4
    assert not (tmp_path / "run.work").exists()


def test_a_run_that_diverges_before_its_first_checkpoint_leaves_nothing(
    regard: Regard, prose: Path, tmp_path: Path
) -> None:
    """There is nothing to go on with: its journal alone has the sinks of the untrained model."""
    line = ("pretrain", "nano", *SMALL, "--data", prose, "--out", "run")
    ended = regard(*line, "--learning-rate", 1e30)
    assert ended.code == 2
    assert "there is no saved state" in ended.complaint
    assert not (tmp_path / "run.work").exists()
    assert regard(*line).code == 0


def test_the_file_that_a_run_has_written_is_a_recipe(regard: Regard, prose: Path, tmp_path: Path) -> None:
    assert regard("pretrain", *SMALL, "--data", prose, "--out", "one").code == 0
    ended = regard("pretrain", "--config", "one/results.json", "--seed", 1, "--out", "two")
    assert ended.code == 0, ended.err
    one, two = (json.loads((tmp_path / name / "results.json").read_text())["config"] for name in ("one", "two"))
    assert {name for name in one if one[name] != two[name]} == {"seed"}


@pytest.mark.parametrize(
    "options, said",
    [
        (("huge",), "preset: expected one of pico, nano, 1m, 60m, 1b, got 'huge'"),
        (("--attention", "foo"), "attention: expected one of softmax, sigmoid"),
        (("--attention", "sigmoid", "--backend", "fused"), "backend=fused cannot compute weighting=sigmoid"),
        (("--max-steps", "many"), "max-steps: expected a whole number of at least 1, got 'many'"),
        (("--random-tokens", "5"), "random-tokens: expected A:B or none, got '5'"),
        (("--window", "0"), "window: expected a whole number of at least 1 or none, got 0"),
        (("--data", "none.txt"), "there is no none.txt"),
        (("--config", "none.json"), "config: cannot read none.json"),
        (("--tokenizer", "nowhere"), "tokenizer"),
        (("--length", "100000"), "expected"),
        (("nano", "--config", "x.json"), "expected a preset's name or a file"),
        (("--resume", "--out", "prose.txt"), "is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_gets_one_line(
    regard: Regard, prose: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    small = SMALL if "--max-steps" not in options and "--length" not in options else SMALL[:10]
    named = [options[0]] if options and not options[0].startswith("--") else []
    data = () if "--data" in options else ("--data", prose)
    ended = regard("pretrain", *named, *small, *data, *options[len(named) :])
    assert said in ended.complaint
    assert ended.complaint.startswith("regard pretrain: ")
    assert not list(tmp_path.glob("runs/*/results.json"))


@pytest.mark.exhaustive
def test_a_broken_off_run_is_not_written_over_unasked(
    regard: Regard, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("pretrain", *SMALL, "--data", prose, "--out", "run")
    with monkeypatch.context() as patched:
        patched.setattr(PretrainResult, "save", interrupt)
        assert "Continue with the same command and --resume" in regard(*options).complaint
    assert "Continue it with --resume, or start again with --overwrite" in regard(*options).complaint
    assert regard(*options, "--overwrite").code == 0
    assert "run exists; choose another folder, or give --overwrite" in regard(*options).complaint
    assert regard(*options, "--overwrite").code == 0


def interrupt(*_args: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_a_work_folder_of_something_else_is_refused_and_stays(regard: Regard, prose: Path, tmp_path: Path) -> None:
    (tmp_path / "run.work" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run.work" / "checkpoints" / "mine.txt").write_text("mine")
    for option in ((), ("--resume",), ("--overwrite",)):
        assert "holds other files" in regard("pretrain", *SMALL, "--data", prose, "--out", "run", *option).complaint
    assert (tmp_path / "run.work" / "checkpoints" / "mine.txt").read_text() == "mine"


def test_a_refused_run_leaves_nothing_in_the_way_of_the_next(regard: Regard, prose: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "empty" in regard("pretrain", *SMALL, "--data", "empty.txt", "--out", "run").complaint
    assert not (tmp_path / "run.work").exists()
    assert regard("pretrain", *SMALL, "--data", prose, "--out", "run").code == 0


@pytest.mark.exhaustive
def test_a_vocabulary_that_is_too_small_for_a_tokenizer_is_refused(regard: Regard, prose: Path, tmp_path: Path) -> None:
    assert regard("pretrain", *SMALL, "--data", prose, "--out", "run").code == 0
    other = [*SMALL[:10], *SMALL[12:], "--data", prose, "--tokenizer", "run/model"]
    complaint = regard("pretrain", *other, "--vocab-size", 260, "--out", "small").complaint
    assert "expected ids under the model's vocabulary of 260, got ids up to 269" in complaint
    assert regard("pretrain", *other, "--out", "own").code == 0
    record = json.loads((tmp_path / "own" / "results.json").read_text())
    assert record["model"]["vocabulary"] == 270
    assert record["config"]["vocab_size"] is None


def test_a_full_disk_at_the_end_is_one_line(
    regard: Regard, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(RegardForCausalLM, "save_pretrained", full)
        options = ("pretrain", *SMALL, "--save-steps", 2, "--data", prose, "--out", "run")
        assert "No space left on device" in regard(*options).complaint
    assert not (tmp_path / "run").exists()
    assert regard(*options, "--resume").code == 0
