"""Numbers go to trackers of Accelerate as well, and the files of trackers outlive the work folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from regard.commands.learn.run import learn
from regard.commands.sweep.commands import LearnCommand
from regard.errors import UserError
from regard.runs.work_dir import find_log_dir
from tests.commands.learn.learn_runs import FIELDS
from tests.continual.small_tasks import loaded, stream


class Filed(GeneralTracker):
    """Writes a line for each row that it is sent."""

    name = "filed"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, **options: Any) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / "rows.jsonl"

    @property
    def tracker(self) -> Path:
        return self.path

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.log({"trackers": values["trackers"]})

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, values]) + "\n")


@pytest.fixture(autouse=True)
def _filed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "filed", Filed)


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "regard" / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def test_scores_of_all_runs_are_sent_task_by_task(tmp_path: Path) -> None:
    fields = {**FIELDS, "diagnostic_samples": 0, "trackers": "filed"}
    found = learn(stream(), ["finetune", "probe"], loaded(), seeds=[1], work_dir=tmp_path / "run.work", **fields)
    first, *rows = lines(tmp_path / "run.logs")
    tasks = len(stream())
    assert first == [None, {"trackers": "['filed']"}]
    assert [step for step, _ in rows] == list(range(1, 2 * tasks + 1))
    matrix = found.accuracy_matrix
    for step, numbers in rows:
        method, after = ("finetune", "probe")[step > tasks], (step - 1) % tasks + 1
        expected = matrix[(matrix["method"] == method) & (matrix["after_task"] == after)]
        expected = expected[expected["task_index"] <= after]
        scores = {f"{method}-1/{row.scenario}/{row.task}": row.score for row in expected.itertuples()}
        assert {name: numbers[name] for name in scores} == pytest.approx(scores)
        assert numbers[f"{method}-1/til/average"] == pytest.approx(
            expected[expected["scenario"] == "til"]["score"].mean()
        )


def test_a_tracker_of_files_needs_a_folder_that_stays() -> None:
    fields = {**FIELDS, "diagnostic_samples": 0, "trackers": "filed"}
    with pytest.raises(UserError, match="trackers: filed writes files; expected a folder to keep them"):
        learn(stream(), "probe", loaded(), seeds=[1], **fields)


def test_a_tracker_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    fields = {**FIELDS, "diagnostic_samples": 0, "trackers": "nowhere"}
    with pytest.raises(UserError, match=r"trackers: expected some of .*; got nowhere"):
        learn(stream(), "probe", loaded(), seeds=[1], work_dir=tmp_path / "run.work", **fields)
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_tracker_stay_when_the_work_folder_goes(tmp_path: Path, regard: Callable[..., Any]) -> None:
    (tmp_path / "text.txt").write_text(
        "".join(f"the cat sat on the mat {row}. " for row in range(900)), encoding="utf-8"
    )
    small = ("--num-layers", 1, "--hidden-size", 16, "--num-heads", 2, "--length", 16, "--vocab-size", 270)
    small += ("--max-steps", 2, "--batch-size", 2, "--eval-samples", 2, "--sink-samples", 2, "--sink-length", 8)
    small += ("--logging-steps", 1, "--intermediate-size", 16, "--warmup-steps", 1, "--cache", tmp_path / "cache")
    line = ("pretrain", "nano", *small, "--data", tmp_path / "text.txt", "--trackers", "filed")
    assert regard(*line, "--out", tmp_path / "run").code == 0
    assert not (tmp_path / "run.work").exists()
    assert [step for step, _ in lines(tmp_path / "run.logs")][-2:] == [1, 2]
    assert regard(*line, "--out", tmp_path / "run", "--overwrite").code == 0
    assert [step for step, _ in lines(tmp_path / "run.logs")].count(2) == 1


def test_logs_stand_beside_the_work_folder(tmp_path: Path) -> None:
    assert find_log_dir(None, resume=False) is None
    assert find_log_dir(tmp_path / "run.work", resume=False) == tmp_path / "run.logs"
    kept = tmp_path / "run.logs" / "row"
    kept.touch()
    assert find_log_dir(tmp_path / "run.work", resume=True) == kept.parent
    assert kept.exists()
    assert find_log_dir(tmp_path / "run.work", resume=False) == kept.parent
    assert not kept.exists()


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_logs_that_no_run_has_made_is_left_alone(tmp_path: Path, *, resume: bool) -> None:
    own = tmp_path / "run.logs" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"^trackers: expected a new folder, .*run\.logs holds other files$"):
        find_log_dir(tmp_path / "run.work", resume=resume)
    assert own.read_text(encoding="utf-8") == "mine"
    own.unlink()
    assert find_log_dir(tmp_path / "run.work", resume=resume) == own.parent
    own.parent.joinpath("row").touch()
    find_log_dir(tmp_path / "run.work", resume=False)
    assert not own.parent.joinpath("row").exists()


def test_trials_of_a_sweep_have_trackers() -> None:
    fields = LearnCommand().complete({"stream": "stdlib-split", "method": "finetune", "trackers": ["filed"]})
    assert fields["trackers"] == ["filed"]
