"""`regard learn` end to end, interrupted and taken up again, and what it refuses: code 2, one line, nothing kept."""

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from regard import LearnResult
from regard.cli import parser
from regard.commands.learn import cli as command
from regard.commands.learn.config import SCALES
from regard.commands.learn.one_run import PROTOCOLS
from regard.commands.learn.run import TASK_END, Progress
from regard.continual.run_state import ProgressEvent
from regard.runs.progress import PlainProgress
from tests.commands.learn.marks import READS_ENGLISH
from tests.data.test_derived_streams import DIFFERENCE, published

pytestmark = READS_ENGLISH

MODULE = importlib.import_module("regard.commands.learn.base_model")
"""The module: as an attribute of the package that name is its function."""
Regard = Callable[..., Any]
SMALL = (
    *(
        "--num-epochs",
        1,
        "--num-probing-epochs",
        1,
        "--learning-rate",
        "5e-3",
        "--probing-learning-rate",
        "5e-2",
        "--batch-size",
        4,
    ),
    *("--length", 10, "--diagnostic-samples", 0),
)
FOLDER = ["cost.parquet", "diagnostics.parquet", "gate.parquet", "general.parquet", "interference.parquet"]
FOLDER += ["matrix.parquet", "models", "pseudo.parquet", "report.html", "results.json"]


@pytest.fixture
def line(words: Path) -> tuple[Any, ...]:
    """A small run of two methods."""
    named = (words / "words.jsonl", "--model", words / "model", "--method", "finetune,prescale")
    return ("learn", *named, *SMALL)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def test_a_run_writes_its_folder_and_says_so(regard: Regard, line: tuple[Any, ...], tmp_path: Path) -> None:
    options = ("--seeds", "39,123", "--order", "2-0-1", "--set", "scaling=uniform", "--out", "run")
    ended = regard(*line, *options)
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FOLDER
    assert "Written to run: cost.parquet, diagnostics.parquet" in ended.out
    assert "report.html" in ended.out
    assert not (tmp_path / "run.work").exists()
    found = LearnResult.load(tmp_path / "run")
    assert found.metadata["command_line"].startswith("regard learn ")
    assert found.metadata["command_line"].endswith("--order 2-0-1 --set scaling=uniform --out run")
    told = [(run["method"], run["seed"], run["order"]) for run in found.metadata["runs"]]
    methods = ("finetune", "prescale scaling=uniform")
    assert told == [(method, seed, "2-0-1") for seed in (39, 123) for method in methods]
    assert set(found.accuracy_matrix["method"]) == set(methods)
    assert found.models is not None
    assert len(list(found.models.iterdir())) == 4


@pytest.mark.exhaustive
def test_off_a_terminal_each_finished_task_is_a_line(regard: Regard, line: tuple[Any, ...], tmp_path: Path) -> None:
    ended = regard(*line, "--seeds", "1", "--order", "paper", "--no-save-models", "--out", "run")
    assert ended.code == 0, ended.err
    tasks = ("task 1 of 3, cat-dog", "task 2 of 3, red-blue-green", "task 3 of 3, run-sit")
    runs = ("run 1 of 2, finetune, seed 1", "run 2 of 2, prescale, seed 1")
    lines = [text.partition(", learnt; ")[0] for text in ended.err.splitlines()]
    assert lines == [f"{run}: {task}" for run in runs for task in tasks]
    assert ended.err.endswith("; 0:00:00 left (6 of 6)\n")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [one for one in FOLDER if one != "models"]


# -- protocols ----------------------------------------------------------------------------------------------------


@pytest.fixture
def leaking(words: Path, tmp_path: Path) -> tuple[Any, ...]:
    """A run of one method on two tasks whose published splits share rows."""
    named = ("long-sequence", "--data", published(tmp_path / "leak"), "--missing-tasks", "skip")
    sizes = ("--max-eval-samples", 4, "--samples-per-class", 4)
    return ("learn", *named, "--model", words / "model", "--method", "finetune", *SMALL, "--no-save-models", *sizes)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("protocol", ["clean", "paper"])
def test_what_the_protocols_differ_in_is_told_once_and_recorded(
    protocol: str, regard: Regard, leaking: tuple[Any, ...], tmp_path: Path
) -> None:
    ended = regard(*leaking, "--protocol", protocol, "--seeds", "1,2", "--out", "run")
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    assert lines[0].startswith("protocols: rows of the files that are test rows as well: 11 of dev, 1 of train; 1 of 2")
    assert lines[1].startswith("  --protocol paper: 81 train, 21 dev and 20 test rows")
    assert lines[2].startswith("  --protocol clean: 76 train, 14 dev and 20 test rows; 2 dropped")
    assert all(line.startswith("run ") for line in lines[3:])
    assert len(lines) == 3 + 4
    found = record(tmp_path / "run")["stream"]["protocols"]
    assert {name: one["dev_in_test"] for name, one in found.items()} == {"imdb": 1, "sst2": 10}
    assert (found["sst2"]["paper"]["train"], found["sst2"]["clean"]["train"]) == (41, 36)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<h3>Protocols</h3>" in page
    assert "identical files" in page


@pytest.mark.exhaustive
def test_a_stream_that_leaks_nothing_says_nothing(
    regard: Regard, leaking: tuple[Any, ...], line: tuple[Any, ...], tmp_path: Path
) -> None:
    published(tmp_path / "leak", leak=False)
    for number, asked in enumerate((leaking, line)):
        ended = regard(*asked, "--out", f"run{number}")
        assert ended.code == 0, ended.err
        assert all(text.startswith("run ") for text in ended.err.splitlines())
        assert "<h3>Protocols</h3>" not in (tmp_path / f"run{number}" / "report.html").read_text(encoding="utf-8")
    assert "protocols" not in record(tmp_path / "run1")["stream"]


@pytest.mark.exhaustive
def test_a_resumed_run_records_the_same_difference(
    stopped: Callable[..., str], regard: Regard, leaking: tuple[Any, ...], tmp_path: Path
) -> None:
    assert "is kept in run.work" in stopped((*leaking, "--out", "run"), signal.SIGINT, 1, 2)
    assert regard(*leaking, "--out", "run", "--resume").code == 0
    assert regard(*leaking, "--out", "whole").code == 0
    resumed, whole = (record(tmp_path / name)["stream"] for name in ("run", "whole"))
    assert resumed == whole


def test_a_comparison_that_is_refused_is_refused_in_one_line(regard: Regard, leaking: tuple[Any, ...]) -> None:
    assert "replay_mode" in regard(*leaking, "--set", "replay_mode=merge", "--out", "run").complaint
    assert (
        "from text to text"
        in regard(*("lfpt5" if part == "finetune" else part for part in leaking), "--out", "run").complaint
    )


def test_a_run_is_not_replaced_by_the_one_that_goes_on_with_it(regard: Regard) -> None:
    line = ("learn", "new.jsonl", "--continue", "runs/old")
    assert "out: expected another folder than that of the run" in regard(*line, "--out", "runs/old").complaint


def test_it_stands_above_the_progress_on_a_terminal() -> None:
    lines: list[str] = []
    report = command.describe_progress(PlainProgress(lines.append))
    for run in (1, 2):
        report(Progress("finetune", run, run, 2, 2, ProgressEvent(1, "imdb", PROTOCOLS, 0, 0, DIFFERENCE)))
        report(progress(run, 1, TASK_END))
    note, *others = lines
    assert note.count("11 of dev") == 1
    assert len(note.splitlines()) == 3
    assert [line.partition(",")[0] for line in others] == ["run 1 of 2", "run 2 of 2"]


# -- how far it is ------------------------------------------------------------------------------------------------


def progress(run: int, position: int, stage: str) -> Progress:
    return Progress("ewc", 7, run, 2, 3, ProgressEvent(position, "sports", stage, 4, 8 if stage != TASK_END else 0, {}))


def test_the_time_that_is_left_is_as_tasks_took_so_far() -> None:
    """Half a minute a task: of six tasks two were done by an earlier command, and two are by now."""
    times = iter([100.0, 110.0, 130.0, 160.0])
    told: list[str] = []
    report = command.describe_progress(lambda event: told.append(event.phase), lambda: next(times))
    for event in (progress(1, 3, "head"), progress(1, 3, "all"), progress(1, 3, "head")):
        report(event)
    assert told[-1] == "run 1 of 2, ewc, seed 7: task 3 of 3, sports, head 4/8"
    report(progress(1, 3, TASK_END))
    # 10 s for the one, three are left
    assert told[-1] == "run 1 of 2, ewc, seed 7: task 3 of 3, sports, learnt; 0:00:30 left"
    report(progress(2, 1, TASK_END))
    assert told[-1].endswith("learnt; 0:00:30 left")  # 30 s for two, two are left
    report(progress(2, 2, "head"))
    assert told[-1].endswith("head 4/8; 0:01:00 left")  # 60 s for two


@pytest.mark.exhaustive
def test_a_run_folder_is_a_course_with_its_seeds(regard: Regard, line: tuple[Any, ...], tmp_path: Path) -> None:
    assert regard(*line, "--seeds", "39,123", "--out", "one").code == 0
    ended = regard("learn", "--config", "one", "--method", "finetune", "--out", "two")
    assert ended.code == 0, ended.err
    one, two = (record(tmp_path / name) for name in ("one", "two"))
    assert [(run["method"], run["seed"]) for run in two["runs"]] == [("finetune", 39), ("finetune", 123)]
    assert {name for name in one["config"] if one["config"][name] != two["config"][name]} == {"method"}
    first, second = (LearnResult.load(tmp_path / name).accuracy_matrix for name in ("one", "two"))
    kept = first[first["method"] == "finetune"].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, second)


def test_another_scale_gives_what_it_has_to_a_course_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "course.json").write_text(json.dumps({"stream": "ag-split", "num_epochs": 2, "samples_per_class": 60}))
    args = parser().parse_args(["learn", "--config", str(tmp_path / "course.json"), "--seeds", "7", "--scale", "paper"])
    course, seeds = command.parse_config(args)
    assert seeds == [7]
    assert (course.stream, course.num_epochs, course.samples_per_class, course.learning_rate) == (
        "ag-split",
        2,
        None,
        2e-5,
    )


# -- interrupted --------------------------------------------------------------------------------------------------


def stopping(number: signal.Signals, run: int, position: int) -> Any:
    """Progress that sends this process a signal while a task is being learnt."""

    def describe(_: Any) -> Callable[[Progress], None]:
        def report(progress: Progress) -> None:
            if (progress.run, progress.event.task_index) == (run, position) and progress.event.phase != TASK_END:
                os.kill(os.getpid(), number)

        return report

    return describe


@pytest.fixture
def stopped(
    regard: Regard, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[tuple[Any, ...], signal.Signals, int, int], str]]:
    """Runs a line until it is interrupted at the task of the run: its complaint."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(line: tuple[Any, ...], number: signal.Signals, at_run: int, position: int) -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with monkeypatch.context() as patched:
            patched.setattr(command, "describe_progress", stopping(number, at_run, position))
            return str(regard(*line).complaint)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "number,run,position",
    [(signal.SIGTERM, 1, 3), (signal.SIGINT, 2, 1)],
    ids=["asked to end within the first run", "interrupted when the second had begun"],
)
def test_an_interrupted_run_goes_on_to_the_same_numbers(
    number: signal.Signals,
    run: int,
    position: int,
    stopped: Callable[..., str],
    regard: Regard,
    line: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    line = (*line, "--seeds", "5", "--out", "run")
    assert stopped(line, number, run, position) == (
        "regard learn: interrupted; what was done is kept in run.work. Continue with the same command and --resume."
    )
    assert not (tmp_path / "run").exists()
    assert "Continue it with --resume, or start again with --overwrite." in regard(*line).complaint
    ended = regard(*line, "--resume")
    assert ended.code == 0, ended.err
    assert len(ended.err.splitlines()) == 6 - (3 * (run - 1) + position - 1)
    assert not (tmp_path / "run.work").exists()
    assert regard(*line, "--overwrite", "--out", "whole").code == 0
    resumed, whole = (LearnResult.load(tmp_path / name) for name in ("run", "whole"))
    pd.testing.assert_frame_equal(resumed.accuracy_matrix, whole.accuracy_matrix)
    assert resumed.models is not None
    assert len(list(resumed.models.glob("*/after-*.safetensors"))) == 6


def test_interrupted_before_anything_was_learnt_nothing_is_kept(
    regard: Regard, line: tuple[Any, ...], words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("regard.commands.learn.one_run"), "make_learner", interrupted)
    complaint = regard(*line, "--out", "run").complaint
    assert complaint == "regard learn: interrupted; nothing was written"
    assert os.listdir(tmp_path) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options,said",
    [
        (
            ("--num-epochs", 2),
            "cannot resume: config.num_epochs was 1 when the run started and is 2 now.",
        ),
        (
            ("stdlib-split", "--samples-per-class", 4),
            "cannot resume: config.samples_per_class was 60 when the run started and is 4 now.",
        ),
    ],
    ids=["num_epochs", "stream"],
)
def test_a_run_goes_on_only_with_what_began_it(
    options: tuple[object, ...],
    said: str,
    stopped: Callable[..., str],
    regard: Regard,
    line: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    assert "is kept in run.work" in stopped((*line, "--out", "run"), signal.SIGINT, 1, 2)
    kept = sorted(tmp_path.rglob("*"))
    other = (line[0], options[0], *line[2:], *options[1:]) if options[0] == "stdlib-split" else (*line, *options)
    assert said in regard(*other, "--out", "run", "--resume").complaint
    assert sorted(tmp_path.rglob("*")) == kept


@pytest.mark.exhaustive
def test_rows_that_were_changed_meanwhile_are_not_mixed_with_what_was_learnt(
    stopped: Callable[..., str], regard: Regard, line: tuple[Any, ...], words: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    shutil.copy(words / "words.jsonl", own)
    line = (line[0], own, *line[2:], "--out", "run")
    assert "is kept in run.work" in stopped(line, signal.SIGINT, 2, 1)
    own.write_text(own.read_text().replace("the", "a"))
    complaint = regard(*line, "--resume").complaint
    assert "cannot resume: tasks.cat-dog." in complaint


# -- mistakes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is found only once the model is being loaded is found too late."""

    def too_late(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded first")

    monkeypatch.setattr(MODULE, "load", too_late)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "options,said",
    [
        (("nowhere",), "stream: expected one of yahoo-split, db-split"),
        (("--method", "oblivion"), "method: expected one of finetune, probe"),
        (("--method", "finetune,finetune"), "method: expected names apart by commas, each once"),
        (("--method", "finetune", "--set", "scaling=sink"), "set: finetune has no settings, got scaling"),
        (("--method", "stap"), "method: there is no 'stap', did you mean 'sapt'?"),
        (("none.jsonl",), "stream: expected a file, there is no none.jsonl"),
        (("--method", "prescale", "--set", "scaling"), "set: expected NAME=VALUE, got 'scaling'"),
        (("--seeds", "few"), "--seeds: expected a number, got 'few'"),
        (("--seeds", "1,,2"), "--seeds: expected a number, got ''"),
        (("--seeds", "3,3"), "at least one and each once, got [3, 3]"),
        (("--seeds", "-1"), "seed: expected a whole number of at least 0"),
        (("--order", "0-1"), "order: expected each number from 0 to 6 once, got 0-1"),
        (("--order", "backwards"), "order: expected paper, random or numbers"),
        (("--scale", "huge"), f"scale: expected one of {', '.join(SCALES)}, got 'huge'"),
        (("--protocol", "dirty"), "protocol: expected one of clean, paper, got 'dirty'"),
        (("--num-epochs", "many"), "epochs: expected a whole number of at least 1 or none, got 'many'"),
        (("--batch-size", 0), "batch-size: expected a whole number of at least 1 or none, got 0"),
        (("--search-learning-rates", "1e-3,fast"), "search-learning-rates: expected learning rates apart by commas"),
        (("db-split", "--data", "nowhere"), "nowhere"),
        (("--config", "none.json"), "config: cannot read none.json"),
        (("--config", "pretrained.json"), "config: expected a run of learn in pretrained.json, got one of pretrain"),
        (("--out", "/"), "--out: expected a folder that can be made"),
        (("--out", "pretrained.json"), "--out: expected a folder, pretrained.json is a file"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_mistake_gets_one_line(options: tuple[object, ...], said: str, regard: Regard, tmp_path: Path) -> None:
    (tmp_path / "pretrained.json").write_text('{"command": "pretrain", "config": {}}')
    ended = regard("learn", *options)
    assert ended.complaint.startswith("regard learn: ")
    assert said in ended.complaint
    assert os.listdir(tmp_path) == ["pretrained.json"]


def test_a_file_of_ones_own_does_not_lie_in_the_folder_of_published_files(
    regard: Regard, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    complaint = regard("learn", words / "words.jsonl", "--model", "nowhere", "--out", "run").complaint
    assert "model: " in complaint
    assert os.listdir(tmp_path) == []


def test_a_refused_run_leaves_nothing_and_touches_no_folder_of_others(
    regard: Regard, line: tuple[Any, ...], tmp_path: Path
) -> None:
    (tmp_path / "run.work").mkdir()
    (tmp_path / "run.work" / "thesis.tex").write_text("precious")
    for options in ((), ("--overwrite",), ("--resume",)):
        assert "run.work holds other files" in regard(*line, "--out", "run", *options).complaint
    assert "lora-rank" in regard(*line, "--lora-rank", 0, "--out", "run", "--overwrite").complaint
    assert [path.name for path in (tmp_path / "run.work").iterdir()] == ["thesis.tex"]
    assert "model: " in regard(*line, "--model", "nowhere", "--out", "other", "--overwrite").complaint
    assert os.listdir(tmp_path) == ["run.work"]


@pytest.mark.exhaustive
def test_a_run_that_is_finished_is_not_gone_on_with(regard: Regard, line: tuple[Any, ...], tmp_path: Path) -> None:
    line = (*line, "--out", "run")
    assert regard(*line, "--resume").code == 0  # or begins
    assert "run exists; choose another folder, or give --overwrite" in regard(*line).complaint
    assert regard(*line, "--resume").complaint == (
        "regard learn: --resume: the run in run is finished. Choose another folder with --out, or start again with "
        "--overwrite."
    )
    assert regard(*line, "--resume", "--overwrite").code == 0
    assert os.listdir(tmp_path) == ["run"]


def test_a_run_is_not_written_over_unasked(regard: Regard, line: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    for allowed in ((), ("--overwrite",)):
        assert "holds something else than a run" in regard(*line, "--out", "run", *allowed).complaint
    assert os.listdir(tmp_path) == ["run"]
