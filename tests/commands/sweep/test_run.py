"""Sweeps of a verb whose runs take milliseconds: what is run, what is not run again, what is left."""

import hashlib
import io
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from regard import LearnResult
from regard.commands.learn.config import LearnConfig
from regard.commands.pretrain.config import PretrainConfig
from regard.commands.sweep.run import COMMANDS, SweepProgress, SweepResult, make_table, make_trials, sweep
from regard.commands.sweep.state import SweepState, trial_key
from regard.commands.sweep.terminal import sweep_summary
from regard.errors import UserError
from regard.runs.integrity import is_sealed, seal
from regard.runs.work_dir import lock_dir
from tests.commands.learn import learned
from tests.commands.sweep.sweeping import FAKE, Fake, counted, until
from tests.processes import started

ROOT = Path(__file__).parents[3]


def swept(out: Path, vary: dict[str, list[Any]], **options: Any) -> SweepResult:
    return sweep(FAKE, vary, out=out, **{"num_seeds": 1, "workers": 2, **options})


def told_state(out: Path) -> dict[str, Any]:
    record = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert is_sealed(record)
    return {name: value for name, value in record.items() if name != "sha256"}


@pytest.fixture(autouse=True)
def short_page(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A page that counts trials, for the command of these tests."""

    def page(table: pd.DataFrame, record: dict[str, Any], histories: dict[str, pd.DataFrame]) -> str:
        return f"<p>{len(table)} of {len(record['trials'])} with {len(histories)}</p>"

    if "learning" not in request.node.name:
        monkeypatch.setattr("regard.commands.sweep.run.sweep_page", page)


# -- which trials there are ---------------------------------------------------------------------------------------


@given(
    names=st.lists(st.sampled_from(["softmax", "sigmoid", "elu"]), min_size=1),
    rates=st.lists(st.floats(0, 1, width=16), min_size=1, max_size=4),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_each_combination_is_there_once(names: list[str], rates: list[float], seeds: list[int]) -> None:
    vary = {"name": names, "rate": rates}
    trials = make_trials(FAKE, vary, folder=Path("x"), fields={"seconds": 1.0}, seeds=seeds)
    there = [(trial.fields["name"], trial.fields["rate"], trial.seed) for trial in trials]
    assert len(there) == len(set(there)) == len({trial.key for trial in trials})
    assert set(there) == {(name, rate, seed) for name in names for rate in rates for seed in seeds}
    assert {trial.fields["seconds"] for trial in trials} == {1.0}


@pytest.mark.parametrize("chosen,sizes", [({}, [1024, None]), ({"vocab_size": 700}, [700, 700])])
def test_another_tokenizer_than_the_presets_brings_its_own_vocabulary(
    chosen: dict[str, Any], sizes: list[int | None]
) -> None:
    """As of `regard pretrain pico --tokenizer NAME`: 1,024 tokens are those of a tokenizer trained for pico."""
    command = COMMANDS["pretrain"]()

    def fields(varied: Mapping[str, Any]) -> dict[str, Any]:
        return command.initial_fields("pico", None, {**chosen, **varied})

    trials = make_trials(command, {"tokenizer": ["train", "other"]}, folder=Path("x"), fields=fields, seeds=[0])
    assert [trial.fields["vocab_size"] for trial in trials] == sizes
    vary = {"tokenizer": ["other"], "vocab_size": [800]}
    (trial,) = make_trials(command, vary, folder=Path("x"), fields=fields, seeds=[0])
    assert trial.fields["vocab_size"] == 800


def test_a_field_that_earlier_versions_lack_leaves_their_trials_as_they_are() -> None:
    """A sweep made before goes on: by default its trials have the fields, and so the keys, that they had."""
    command = COMMANDS["learn"]()
    fields = command.initial_fields(None, None, {"method": "finetune"})
    assert {"missing_values", "metric"} <= set(command.config.field_names())
    (trial,) = make_trials(command, {"learning_rate": [1e-3]}, folder=Path("x"), fields=fields, seeds=[0])
    assert not {"missing_values", "metric"} & trial.fields.keys()
    vary = {"missing_values": ["skip", "refuse"]}
    trials = make_trials(command, vary, folder=Path("x"), fields=fields, seeds=[0])
    assert [trial.fields["missing_values"] for trial in trials] == ["skip", "refuse"]


def test_a_key_depends_on_the_settings_and_nothing_else() -> None:
    first = make_trials(FAKE, {"rate": [1.0]}, folder=Path("x"), fields={"name": "elu"}, seeds=[3])
    other = make_trials(FAKE, {"name": ["elu", "softmax"]}, folder=Path("y"), fields={"rate": 1.0}, seeds=[0, 3])
    assert first[0].key in {trial.key for trial in other}
    written = (
        '["fake", {"deaf": false, "failures": 0, "gate": "", "name": "elu", "rate": 1.0, "seconds": 0.0, "seed": 3, '
        '"width": null}]'
    )
    assert first[0].key == hashlib.sha256(written.encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    "vary,options,said",
    [
        ({}, {}, "at least one field"),
        ({"colour": ["red"]}, {}, "no field colour; allowed are deaf, failures, gate, name"),
        ({"seed": [1]}, {}, "seeds are given by --seeds"),
        ({"rate": []}, {}, "at least one value of rate"),
        ({"name": "elu"}, {}, "vary: expected a list of values of name, got 'elu'"),
        ({"rate": 1.0}, {}, "vary: expected a list of values of rate, got 1.0"),
        ({"name": ["softmax", "softmin"], "rate": [1.0]}, {}, "got 'softmin' .of name=softmin rate=1.0"),
        ({"rate": [1.0]}, {"num_seeds": 0}, "num-seeds: expected at least 1, got 0"),
        ({"rate": [1.0]}, {"seeds": [1, -1]}, "seeds: expected"),
        ({"rate": [1.0]}, {"retries": -1}, "retries: expected at least 0"),
        ({"rate": [1.0]}, {"workers": 0}, "workers: expected at least 1"),
        ({"rate": [1.0]}, {"launcher": "slurm"}, "launcher: expected one of local, ray, got 'slurm'"),
        ({"rate": [1.0]}, {"address": "auto"}, "address: local trials need none"),
        ({"rate": [1.0]}, {"gpus": 2}, "gpus: expected 0 or 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    vary: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        swept(tmp_path / "out", vary, **options)
    assert not (tmp_path / "out").exists()


def test_a_verb_that_there_is_not() -> None:
    with pytest.raises(UserError, match="expected one of pretrain, learn, got 'paint'"):
        sweep("paint", {"rate": [1.0]}, out="x")


# -- what a sweep leaves ------------------------------------------------------------------------------------------


def test_all_trials_are_run_once_and_compared(tmp_path: Path) -> None:
    events: list[SweepProgress] = []
    vary = {"name": ["softmax", "elu"], "rate": [0.0, 0.5]}
    found = swept(tmp_path, vary, seeds=[0, 7], config={"width": 4}, on_progress=events.append)
    assert set(counted(tmp_path, "begun").values()) == set(counted(tmp_path, "ended").values()) == {1}
    table = pd.read_parquet(tmp_path / "trials.parquet")
    assert list(table.columns) == ["key", "seed", "name", "rate", "valid_loss"]
    pd.testing.assert_frame_equal(table, found.table)
    assert list(table["valid_loss"]) == list(table["rate"] + table["seed"])
    assert len(table) == 8
    assert (tmp_path / "report.html").read_text() == "<p>8 of 8 with 8</p>"
    assert found.metadata == told_state(tmp_path)
    assert (found.metadata["vary"], found.metadata["seeds"]) == (vary, [0, 7])
    assert found.metadata["settings"]["width"] == 4
    assert {(one["state"], one["attempts"], one["error"]) for one in found.metadata["trials"]} == {("finished", 1, "")}
    assert sorted(told.finished for told in events if told.event.kind == "finished") == list(range(1, 9))


@pytest.mark.exhaustive
def test_a_sweep_shows_itself(tmp_path: Path) -> None:
    found = swept(tmp_path, {"name": ["softmax", "sigmoid"]}, seeds=[0, 2])
    assert repr(found).startswith("SweepResult(Sweep over name 2 combinations · 2 seeds · 4 of 4 trials finished")
    assert found.overview()["Validation loss"].tolist() == ["1.0 ± 1.0"] * 2
    axes = found.plot().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["softmax (n = 2)", "sigmoid (n = 2)"]
    assert axes.lines[0].get_xdata() == pytest.approx([1.0, 1.0])
    low, high = axes.collections[0].get_segments()[0][:, 0]  # type: ignore[attr-defined]
    assert (high - low) / 2 == pytest.approx(12.7062, rel=1e-5)  # Student's t for one degree of freedom, s/√n = 1
    assert "<table" in found._repr_html_()
    assert len(found.frame(seed=2)) == 2
    with pytest.raises(UserError, match="metric"):
        found.plot("sink_rate")


@pytest.mark.exhaustive
def test_the_same_sweep_again_runs_nothing(tmp_path: Path) -> None:
    first = swept(tmp_path, {"rate": [0.0, 1.0]}, num_seeds=2)
    (tmp_path / "report.html").unlink()
    again = swept(tmp_path, {"rate": [0.0, 1.0]}, num_seeds=2)
    assert set(counted(tmp_path, "begun").values()) == {1}
    pd.testing.assert_frame_equal(first.table, again.table)
    assert (tmp_path / "report.html").exists()


@pytest.mark.exhaustive
def test_another_sweep_in_the_folder_adds_its_trials_and_takes_up_equal_ones(tmp_path: Path) -> None:
    swept(tmp_path, {"name": ["softmax", "elu"]}, num_seeds=2)
    found = swept(tmp_path, {"rate": [0.0, 1.0]}, num_seeds=1, config={"width": 8, "name": "elu"})
    assert found.metadata["vary"] == {"name": ["softmax", "elu"], "rate": [0.0, 1.0], "width": [None, 8]}
    again = swept(tmp_path, {"name": ["elu", "sigmoid"]}, seeds=[1])
    assert set(counted(tmp_path, "begun").values()) == {1}
    assert len(again.table) == 4 + 2 + 1
    assert again.table["width"].isna().sum() == 5
    assert again.metadata["trials"][1]["values"] == {"name": "softmax", "rate": 0.0, "width": None}


def test_a_trial_that_varies_a_field_that_earlier_versions_lack_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results do not say the default, which its own fields say."""
    command = COMMANDS["learn"]()
    metadata = {"config": LearnConfig(metric="auto").to_dict()}
    monkeypatch.setattr("regard.runs.command.read_metadata", lambda *_: metadata)
    fields = {**metadata["config"], "metric": "auto", "missing_values": "skip"}
    assert command.is_finished(tmp_path, fields)
    assert not command.is_finished(tmp_path, {**fields, "metric": "sari"})


@pytest.mark.exhaustive
def test_trials_that_failed_are_told_of_until_others_are_asked_for(tmp_path: Path) -> None:
    assert len(swept(tmp_path, {"failures": [0, 9]}, retries=0).metadata["trials"]) == 2
    found = swept(tmp_path, {"rate": [1.0]})
    assert [one["state"] for one in found.metadata["trials"]] == ["finished", "finished"]
    assert found.metadata["vary"] == {"rate": [0.0, 1.0]}


def test_values_of_several_kinds_become_text_in_the_table() -> None:
    assert list(make_table([{"width": "wide"}, {"width": 8}], ["width"])["width"]) == ["wide", "8"]


@pytest.mark.exhaustive
def test_a_trial_whose_results_are_of_other_settings_or_cut_off_is_run_again(tmp_path: Path) -> None:
    keys = list(swept(tmp_path, {"rate": [0.0, 1.0, 2.0]}).table["key"])
    (tmp_path / "trials" / keys[0] / "results.json").write_text('{"command": "fake", "config": {')
    (tmp_path / "trials" / keys[1] / "results.json").write_text('{"command": "fake", "config": {"rate": 9}}')
    swept(tmp_path, {"rate": [0.0, 1.0, 2.0]})
    assert [counted(tmp_path, "begun")[key] for key in keys] == [2, 2, 1]


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_failed_trial_is_tried_again_and_the_others_go_on(tmp_path: Path) -> None:
    events: list[SweepProgress] = []
    found = swept(tmp_path, {"failures": [0, 1, 2, 3]}, retries=2, on_progress=events.append)
    state = {one["values"]["failures"]: one for one in found.metadata["trials"]}
    assert {n: (one["state"], one["attempts"]) for n, one in state.items()} == {
        0: ("finished", 1),
        1: ("finished", 2),
        2: ("finished", 3),
        3: ("failed", 3),
    }
    assert found.failed == {state[3]["key"]: "the disk is full"}
    assert state[3]["error"] == "the disk is full"
    assert [told.event.kind for told in events].count("failed") == 1 + 2 + 2
    assert len(found.table) == 3
    assert (tmp_path / "report.html").read_text() == "<p>3 of 4 with 3</p>"
    again = swept(tmp_path, {"failures": [0, 1, 2, 3]}, retries=0)
    assert not again.failed
    assert set(counted(tmp_path, "ended").values()) == {1}


def test_where_all_fail_the_page_says_so(tmp_path: Path) -> None:
    found = swept(tmp_path, {"failures": [9]}, retries=0)
    assert list(found.failed.values()) == ["the disk is full"]
    assert (tmp_path / "report.html").read_text() == "<p>0 of 1 with 0</p>"
    assert not (tmp_path / "trials.parquet").exists()
    assert told_state(tmp_path)["trials"][0]["state"] == "failed"


@pytest.mark.parametrize(
    "content,said",
    [
        ("{", "is damaged or of another version"),
        ('{"command": "fake", "vary": {}, "trials": []}', "is damaged or of another version"),
        (json.dumps(seal({"schema_version": 1, "command": "learn"})), "holds a sweep of learn"),
    ],
)
def test_a_folder_with_another_state(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UserError, match=said):
        swept(tmp_path, {"rate": [1.0]})


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"something else than a sweep \(thesis.tex"):
        swept(tmp_path, {"rate": [1.0]})
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(UserError, match=r"--out: expected a folder, .*thesis.tex is a file"):
        swept(tmp_path / "thesis.tex", {"rate": [1.0]})
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_what_happens_to_a_trial_is_on_disk_at_once(tmp_path: Path) -> None:
    """A sweep that is killed leaves it there; trials of an earlier one that are not finished are forgotten."""
    trials = {trial_key("learn", {"seed": seed}): {"seed": seed} for seed in (1, 2, 3)}
    first, second, third = trials
    state = SweepState(tmp_path, "learn")
    state.add(trials, ["seed"], "")
    state.update(first, state="finished")
    state.update(second, state="running", attempts=1)
    left = SweepState.open(tmp_path, "learn").trials
    assert [(one["state"], one["attempts"]) for one in left.values()] == [
        ("finished", 0),
        ("running", 1),
        ("waiting", 0),
    ]
    state.end()
    again = SweepState.open(tmp_path, "learn")
    assert [one["state"] for one in again.trials.values()] == ["finished", "waiting", "waiting"]
    again.add({third: trials[third]}, ["seed"], "")
    assert list(SweepState.open(tmp_path, "learn").trials) == [first, third]


def test_two_sweeps_at_once_in_a_folder(tmp_path: Path) -> None:
    with lock_dir(tmp_path, "sweep"), pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
        swept(tmp_path, {"rate": [1.0]})


def test_fields_of_a_trial_that_were_changed_are_noticed(tmp_path: Path) -> None:
    (key,) = swept(tmp_path, {"rate": [1.0]}).table["key"]
    path = tmp_path / "trials" / f"{key}.json"
    path.write_text(path.read_text().replace("softmax", "sigmoid"))
    with pytest.raises(UserError, match=f"{key}.json is missing or damaged"):
        swept(tmp_path, {"rate": [1.0]})


def test_trials_of_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "patients.csv").write_text("precious")
    with pytest.raises(UserError, match=r"something else than a sweep \(trials"):
        swept(tmp_path, {"rate": [1.0]})
    assert (tmp_path / "trials" / "patients.csv").read_text() == "precious"


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_trials_of_learning_that_are_finished_are_compared_by_their_scores(tmp_path: Path) -> None:
    """Made-up runs are put where the trials would write theirs: fine-tuning forgets 8 points a task, the other one."""
    vary = {"method": ["finetune", "prescale"]}
    settings = {"stream": "yahoo-split", "num_epochs": 2}
    SweepState(tmp_path, "learn").write()
    for trial in make_trials(COMMANDS["learn"](), vary, folder=tmp_path, fields=settings, seeds=[39, 508]):
        scores = learned.matrix([trial.values["method"]], [trial.seed])
        tables = {name: learned.tables(scores)[name] for name in ("matrix", "cost", "diagnostics", "interference")}
        record = learned.record(config=trial.fields)
        LearnResult(accuracy_matrix=tables.pop("matrix"), **tables, metadata=record).save(trial.folder)
    found = sweep("learn", vary, out=tmp_path, config=settings, seeds=[39, 508])
    table = found.table.set_index(["method", "seed"])
    assert len(table) == 4
    assert not list(tmp_path.glob("trials/*.log"))
    np.testing.assert_allclose(
        table.loc[("finetune", 39), ["forgetting_til", "average_performance_til", "average_performance_cil"]],
        [16, 84, 64],
    )
    np.testing.assert_allclose(
        table.loc[("prescale", 508), ["forgetting_til", "average_performance_til", "average_performance_cil"]],
        [2, 94.5, 74.5],
    )
    assert found.metadata["settings"]["samples_per_class"] == 60
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(title in page for title in ("AP TIL", "FGT CIL", "Tasks learnt", "scores in per cent"))
    terminal = io.StringIO()
    Console(file=terminal, width=80).print(sweep_summary(found.table, found.metadata))
    assert "AP TIL" in terminal.getvalue().splitlines()[3]
    curves = COMMANDS["learn"]().curves(tmp_path / "trials" / found.table["key"][0])
    assert list(curves.columns) == ["tasks", "average_performance_cil", "average_performance_til"]
    np.testing.assert_allclose(curves["average_performance_til"], [96, 92, 88, 84])


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"stream": "nowhere"}, "stream: expected one of yahoo-split"),
        ({"method": "finetune,ewc"}, "method: expected one in each trial, got finetune,ewc; vary method=finetune,ewc"),
        ({"method": "finetune", "set": ["share=2"]}, "set: finetune has no settings, got share"),
        ({"scale": "huge"}, "scale: expected one of laptop"),
        ({"trackers": ["mlflov"]}, "trackers: expected .*; got mlflov"),
    ],
)
def test_trials_of_learning_that_cannot_be(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        sweep("learn", {"num_epochs": [1, 2]}, out=tmp_path / "out", config=settings, num_seeds=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "verb, settings, said",
    [
        ("learn", {"model": "no model"}, "model: 'no model' is no folder here"),
        ("learn", {"model": "empty"}, "model: expected config.json in the folder 'empty', found nothing"),
        ("learn", {"adapter": "empty"}, "adapter: expected"),
        ("pretrain", {"tokenizer": "empty"}, "tokenizer: expected a folder with tokenizer"),
    ],
)
def test_models_that_cannot_be_had_are_refused_once_before_a_trial(
    verb: Literal["learn", "pretrain"],
    settings: dict[str, Any],
    said: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    fields = {
        "learn": {"stream": "yahoo-split", "model": str(tiny("bert"))},
        "pretrain": {"max_steps": 1, "warmup_steps": 0},
    }[verb]
    vary = {"learning_rate": [0.1, 0.2]}
    with pytest.raises(UserError, match=said):
        sweep(verb, vary, out="out", config={**fields, **settings}, num_seeds=2)
    assert not (tmp_path / "out").exists()


def test_models_of_a_cluster_are_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise UserError("as far as the trials")

    monkeypatch.setattr("regard.commands.sweep.run.make_launcher", lambda *_, **__: None)
    monkeypatch.setattr("regard.commands.sweep.run._run_trials", stop)
    settings = {"stream": "yahoo-split", "model": "no model"}
    with pytest.raises(UserError, match="as far as the trials"):
        sweep("learn", {"learning_rate": [0.1]}, out=tmp_path / "out", config=settings, num_seeds=1, launcher="ray")


@pytest.mark.parametrize(
    "fields, side", [({}, "middle"), ({"truncation_side": "left"}, "left"), ({"scale": "paper"}, "right")]
)
def test_trials_on_ones_own_tasks_are_known_by_their_fields(
    fields: dict[str, str], side: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name the side of prompts if it was given, so that a sweep of before it could be goes on."""
    rows = [{"task": "t", "text": f"w{number}", "label": f"w{number % 2}"} for number in range(20)]
    stream, found = tmp_path / "rows.jsonl", list[dict[str, Any]]()
    stream.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def stop(_command: Any, trials: Any, *_: Any) -> None:
        found.extend(trial.fields for trial in trials)
        raise UserError("as far as the trials")

    monkeypatch.setattr("regard.commands.sweep.run._run_trials", stop)
    settings = {"stream": str(stream), "model": str(tiny("bert")), **fields}
    with pytest.raises(UserError, match="as far as the trials"):
        sweep("learn", {"learning_rate": [0.1, 0.2]}, out=tmp_path / "out", config=settings, num_seeds=1)
    assert [LearnConfig.from_dict(one).side for one in found] == [side] * 2
    assert ["truncation_side" in one for one in found] == ["truncation_side" in fields] * 2


def test_an_encoder_does_not_learn_to_answer_in_a_sweep(tiny: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"task": "t", "text": f"w{number}", "answer": f"w{number}"} for number in range(10)]
    stream = tmp_path / "rows.jsonl"
    stream.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"stream": str(stream), "model": str(tiny("bert"))}
    with pytest.raises(UserError, match=r"model: expected one that writes text, got '.*', an encoder"):
        sweep("learn", {"learning_rate": [0.1, 0.2]}, out=tmp_path / "out", config=settings, num_seeds=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", [{"stream": "superni"}, {"stream": "long-sequence", "task_type": "generation"}])
def test_an_encoder_does_not_learn_to_answer_a_published_stream(
    settings: dict[str, str], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    fields = {**settings, "model": str(tiny("bert"))}
    with pytest.raises(UserError, match=r"model: expected one that writes text, got '.*', an encoder"):
        sweep("learn", {"learning_rate": [0.1, 0.2]}, out=tmp_path / "out", config=fields, num_seeds=1)


def test_a_finished_sweep_needs_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its trials were logged with may be gone since."""

    def refuse(names: list[str], folder: Path) -> None:
        if names:
            raise UserError("trackers: expected none")

    monkeypatch.setattr("regard.commands.sweep.run.check_trackers", refuse)
    complete = Fake.complete
    monkeypatch.setattr(Fake, "complete", lambda self, fields: {**complete(self, fields), "trackers": ["gone"]})
    monkeypatch.setattr(Fake, "is_finished", lambda self, folder, fields: False)
    with pytest.raises(UserError, match="trackers: expected none"):
        swept(tmp_path, {"rate": [1.0]})
    monkeypatch.setattr(Fake, "is_finished", lambda self, folder, fields: True)
    monkeypatch.setattr(Fake, "final_metrics", lambda self, folder: {"valid_loss": 1.0})
    assert len(swept(tmp_path / "out", {"rate": [1.0]}).table) == 1


def test_a_path_that_is_varied_is_named_as_a_text_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\(of data=rows.txt\)$"):
        sweep("pretrain", {"data": [Path("rows.txt")]}, out=tmp_path / "out", config={"max_steps": -1}, num_seeds=1)


def test_the_settings_of_a_run_of_learning_leave_what_its_scale_gives_to_another_scale(tmp_path: Path) -> None:
    command = COMMANDS["learn"]()
    whole = command.complete({"stream": "ag-split", "num_epochs": 2, "seed": 3})
    (tmp_path / "course.json").write_text(json.dumps(whole))
    other = command.complete({**command.initial_fields(None, tmp_path / "course.json", {}), "scale": "paper"})
    assert (whole["length"], other["length"], other["num_epochs"], other["seed"]) == (None, 128, 2, 3)
    assert command.initial_fields("db-split", None, {}) == {"stream": "db-split"}


# -- interruptions ------------------------------------------------------------------------------------------------

SWEEPING = """
import signal, sys
from pathlib import Path
from types import SimpleNamespace
from regard.commands.sweep.run import sweep
from tests.commands.sweep.sweeping import FAKE
signal.signal(signal.SIGINT, signal.default_int_handler)
out = Path(sys.argv[1])
try:
    sweep(FAKE, {"gate": ["", str(out.with_name("gate"))], "rate": [0.0, 1.0]}, num_seeds=1, out=out, workers=4)
except KeyboardInterrupt:
    sys.exit(2)
"""


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_sweep_stops_its_trials_keeps_the_finished_and_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with started(["-c", SWEEPING, str(out)], environment) as process:
        until(lambda: len(counted(out, "ended")) == 2 and len(counted(out, "begun")) == 4)
        until(lambda: [one["state"] for one in told_state(out)["trials"]].count("finished") == 2)
        process.send_signal(number)
        ended = process.end()
    assert (ended.returncode, ended.stderr) == (2 if number == signal.SIGINT else -number, "")
    until(lambda: len(counted(out, "kept")) == 2)  # the trials at work were asked to end, and kept what they had
    state = "waiting" if number == signal.SIGINT else "running"
    assert sorted(one["state"] for one in told_state(out)["trials"]) == sorted(["finished", "finished", state, state])
    (tmp_path / "gate").touch()
    found = swept(out, {"gate": ["", str(tmp_path / "gate")], "rate": [0.0, 1.0]})
    assert len(found.table) == 4
    assert sorted(counted(out, "begun").values()) == [1, 1, 2, 2]
    assert set(counted(out, "ended").values()) == {1}


def test_trials_over_other_data_do_not_join_those_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "a.txt").write_text("before")
    monkeypatch.setattr(FAKE, "data_paths", lambda fields: [str(data), str(tmp_path / "missing")])
    swept(out, {"rate": [0.0]})
    (data / ".hidden").write_text("nothing to read")
    assert len(swept(out, {"rate": [0.0, 1.0]}).table) == 2
    (data / "a.txt").write_text("after")
    with pytest.raises(UserError, match=f"--out: {out} holds trials with {data} as it was before"):
        swept(out, {"rate": [0.0, 2.0]})
    assert len(counted(out, "begun")) == 2


def test_what_trials_read(tmp_path: Path) -> None:
    fields = PretrainConfig(
        tokenizer="t", data=("python", "a=books,valid=held.txt", "b@2=hub:x:en,tokens=1000")
    ).to_dict()
    assert COMMANDS["pretrain"]().data_paths(fields) == ["books", "held.txt", "t"]
    config = LearnConfig(stream="news-series,own.csv", model="m", adapter="a", held_out="h", method="own.py:Own")
    assert COMMANDS["learn"]().data_paths(config.to_dict()) == ["own.csv", "m", "a", "h", "own.py"]
    task = tmp_path / "task.yaml"
    task.write_text("task: own")
    assert COMMANDS["learn"]().data_paths(LearnConfig(evaluate=f"piqa,{task}").to_dict()) == ["minilm", str(task)]
