"""`regard measure`: what it prints, and what it leaves."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from regard.commands.measure.config import MeasureConfig
from regard.commands.measure.result import MeasureResult
from regard.runs.arguments import new_run_dir
from regard.runs.progress import ProgressEvent, show_progress

Tiny = Callable[[str], Path]
Regard = Callable[..., Any]
FEW = ("--samples", "6", "--length", "16", "--device", "cpu")


@pytest.mark.exhaustive  # test_interrupted begins a process as well
def test_a_run_in_a_process_of_its_own(tiny: Tiny, text_file: Path, apart: Regard, tmp_path: Path) -> None:
    """Nothing on standard error, a summary of at most 80 columns, and a folder with everything that it names."""
    ended = apart("measure", tiny("bert"), "--text", text_file, *FEW, "--out", "run")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in ended.out
    assert lines[-1] == "Written to run: report.html, results.json, statistics.parquet, tokens.parquet"
    shown = " ".join(ended.out.split())
    assert "6 samples of 16 tokens" in shown
    for part in (
        "Sink rate, ε = 0.3",
        "layers × heads",
        "share of strongest columns",
        "Over-smoothing by layer",
        "Hidden norm",
    ):
        assert part in shown
    assert os.listdir(tmp_path) == ["run"]
    found = MeasureResult.load(tmp_path / "run")
    rate = found.frame("sink_rate", layer=None)["value"].max()
    assert f": {rate:.1f} ± " in ended.out
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000


@pytest.mark.exhaustive
def test_standard_input(tiny: Tiny, documents: list[str], apart: Regard, regard: Regard, tmp_path: Path) -> None:
    arguments = ("measure", tiny("llama"), *FEW, "--statistics", "column_mass")
    given = " ".join(documents)
    ended = apart(*arguments, "--text", "-", "--out", "piped", given=given)
    assert (ended.code, ended.err) == (0, "")
    (tmp_path / "text.txt").write_text(given)
    assert regard(*arguments, "--text", "text.txt", "--out", "read").code == 0
    piped, read = (MeasureResult.load(tmp_path / name) for name in ("piped", "read"))
    pd.testing.assert_frame_equal(piped.table, read.table, rtol=1e-6)
    assert piped.metadata["data"]["source"] == "standard input"
    assert piped.metadata["data"]["sha256"] == read.metadata["data"]["sha256"]


def test_every_option_arrives(tiny: Tiny, regard: Regard, tmp_path: Path) -> None:
    options = {
        "--input": "random",
        "--bos": "drop",
        "--samples": "5",
        "--length": "12",
        "--epsilon": "0.2,0.4",
        "--minimum-queries": "4",
        "--statistics": "sink_rate,entropy,perturbation_spread",
        "--layer-ids": "0,2-2",
        "--batch-size": "2",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--perturb": "first",
        "--seed": "9",
        "--out": "run",
    }
    words = [word for pair in options.items() for word in pair]
    ended = regard("measure", tiny("llama"), *words, "--skip-verification")
    assert (ended.code, ended.err) == (0, "")
    found = MeasureResult.load(tmp_path / "run")
    assert found.metadata["config"] == {
        "statistics": ["sink_rate", "entropy", "perturbation_spread"],
        "input": "random",
        "bos": "drop",
        "samples": 5,
        "length": 12,
        "epsilon": [0.2, 0.4],
        "minimum_queries": 4,
        "layer_ids": [0, 2],
        "part": None,
        "positions": "all",
        "perturb": "first",
        "batch_size": 2,
        "skip_verification": True,
        "seed": 9,
    }
    assert found.metadata["model"]["dtype"] == "bfloat16"
    spread = {"perturbation_spread", "perturbation_spread_own"}
    assert set(found.table["statistic"]) == {"sink_rate", "entropy"} | spread


def test_a_new_folder_under_runs_for_each_run(
    tiny: Tiny, text_file: Path, regard: Regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert regard("measure", tiny("llama"), "--text", text_file, *FEW, "--statistics", "entropy").code == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("measure-llama-2")
    assert json.loads((made / "results.json").read_text())["model"]["name"] == str(tiny("llama"))
    assert str(new_run_dir("measure", "owner/name-7b")).startswith("runs/measure-owner-name-7b-2")
    monkeypatch.chdir(tiny("llama"))
    assert str(new_run_dir("measure", ".")).startswith("runs/measure-llama-2")


def test_random_weights_need_none(tiny: Tiny, text_file: Path, regard: Regard, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny("llama").iterdir():
        if file.suffix == ".json":
            (bare / file.name).write_bytes(file.read_bytes())
    few = (*FEW, "--text", text_file, "--statistics", "column_mass")
    assert regard("measure", bare, *few, "--random-weights", "--out", "random").code == 0
    assert MeasureResult.load(tmp_path / "random").metadata["model"]["sha256"] is None


def test_overwriting_when_asked(tiny: Tiny, text_file: Path, regard: Regard, tmp_path: Path) -> None:
    few = ("measure", tiny("llama"), "--text", text_file, *FEW, "--out", "run", "--statistics")
    assert regard(*few, "entropy").code == 0
    assert regard(*few, "row_sum").complaint == (
        "regard measure: --out: run exists; choose another folder, or give --overwrite"
    )
    assert set(MeasureResult.load(tmp_path / "run").table["statistic"]) == {"entropy"}
    assert regard(*few, "row_sum", "--overwrite").code == 0
    assert set(MeasureResult.load(tmp_path / "run").table["statistic"]) == {"row_sum"}
    assert os.listdir(tmp_path) == ["run"]


def test_progress_on_a_terminal_only(tiny: Tiny, text_file: Path, regard: Regard, monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert regard("measure", tiny("llama"), "--text", text_file, *FEW, "--batch-size", "1", "--out", "run").code == 0
    assert "measuring" in terminal.getvalue()
    assert "6/6" in terminal.getvalue()


@pytest.mark.parametrize(
    "text,expected", [("all", None), ("3", (3,)), ("0,2-4", (0, 2, 3, 4)), (" 1 , 1,0-1", (1, 0)), ("5-5", (5,))]
)
def test_layers_are_numbers_and_ranges(text: str, expected: tuple[int, ...] | None) -> None:
    assert MeasureConfig.parse_field("layer_ids", text) == expected


@pytest.mark.parametrize("shown", [True, False])
def test_only_the_first_process_shows_progress(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setenv("RANK", "0" if shown else "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda _: True))
    monkeypatch.setattr("rich.progress.Progress.start", lambda bar: started.append(bar))
    with show_progress() as on_progress:
        on_progress(ProgressEvent(phase="measuring", step=1, steps=2))
    assert len(started) == shown


def test_runs_of_two_processes_that_begin_in_one_second_have_folders_of_their_own() -> None:
    script = "from regard.runs.arguments import new_run_dir; print(new_run_dir('measure', 'minilm'))"
    for _ in range(20):  # until both have begun in one second
        started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in "ab"]
        names = [process.communicate()[0].strip() for process in started]
        if names[0].rsplit("-", 1)[0] == names[1].rsplit("-", 1)[0]:
            break
    assert names[0] != names[1]
