"""`regard compare` with runs of learn, replace and pretrain: what differs in settings, and the main figures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from regard.commands.compare.comparison import compare_figures, compare_settings, list_notes
from regard.commands.learn.result import LearnResult
from regard.commands.learn.run import learn
from regard.commands.pretrain.result import PretrainResult, final_metrics
from regard.commands.replace.result import ReplaceResult
from tests.commands.learn.learn_runs import FIELDS
from tests.commands.pretrain import pretrain_run
from tests.commands.replace import replaced_run
from tests.continual.small_tasks import loaded, stream

Regard = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of probing, and one with twice the epochs and more rows, and their figures."""
    folder = tmp_path_factory.mktemp("runs")
    fields = {**FIELDS, "diagnostic_samples": 0, "probing_learning_rate": 5e-2}
    for name, options in {"short": {}, "long": {"num_probing_epochs": 4}}.items():
        learn(stream(), ["probe"], loaded(), seeds=[1, 2], **{**fields, **options}).save(folder / name)
    return folder


def test_settings_that_differ_and_main_figures_are_shown(runs: Path, regard: Regard, tmp_path: Path) -> None:
    ended = regard("compare", runs / "short", runs / "long", "--out", "page.html")
    assert (ended.code, ended.err) == (0, "")
    found = {name: LearnResult.load(runs / name) for name in ("short", "long")}
    table = compare_settings(found)
    epochs = [str(run.metadata["config"]["num_probing_epochs"]) for run in found.values()]
    assert table.to_dict("records") == [{"setting": "num_probing_epochs", "short": epochs[0], "long": epochs[1]}]
    figures = compare_figures(found).set_index("figure")
    name = "probe, average_performance til"
    last = [
        run.accuracy_matrix.query("after_task == 3 and scenario == 'til'")["score"].mean() for run in found.values()
    ]
    assert figures.loc[name, ["short", "long"]].tolist() == pytest.approx(last)
    assert figures.loc[name, "difference"] == pytest.approx(last[1] - last[0])
    (line,) = [line for line in ended.out.splitlines() if line.startswith(name)]
    assert [float(word) for word in line.removeprefix(name).split()] == pytest.approx(
        [*last, last[1] - last[0]], rel=1e-3
    )
    assert "num_probing_epochs" in ended.out
    assert "note: difference is long − short" in ended.out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "short against long" in page
    assert "num_probing_epochs" in page


def test_runs_of_another_command_are_refused(runs: Path, regard: Regard, tmp_path: Path) -> None:
    scores, heads = replaced_run.scores(), replaced_run.heads()
    config = {"config": {"rank_heads_by": ["lambda"]}, "command": "replace", "schema_version": 0}
    other = ReplaceResult(scores, heads, pd.DataFrame(), config)
    assert "none, none, 1.0" in " ".join(other.main_figures())
    assert regard("compare", runs / "short", tmp_path / "nothing").complaint.startswith("regard compare: no run in ")


def test_figures_of_other_commands_are_their_means_or_last_values() -> None:
    scores = replaced_run.scores()
    result = ReplaceResult(scores, replaced_run.heads(), pd.DataFrame(), {})
    expected = scores.query("task == 'cola' and constants == 'identity' and dynamic_fraction == 0.5")["score"].mean()
    assert result.main_figures()["cola, mcc, identity, lambda, 0.5"] == pytest.approx(expected)
    history = pretrain_run.history()
    trained = PretrainResult(history, pd.DataFrame(), {"final": final_metrics(history)})
    assert trained.main_figures()["valid_loss"] == history["valid_loss"].iloc[-1]
    nothing = pd.DataFrame(columns=["setting"])
    assert "one seed each" in list_notes({"a": trained, "b": trained}, nothing)[-1]
    assert "means over seeds" in list_notes({"a": result, "b": result}, nothing)[-1]


def test_a_run_with_a_task_more_is_said_to_have_other_tasks(runs: Path) -> None:
    """As a run that goes on with another: the difference of their means is of other tasks, not of learning."""
    found, nothing = LearnResult.load(runs / "short"), pd.DataFrame(columns=["setting"])
    fewer = {**found.metadata, "stream": {**found.metadata["stream"], "tasks": found.metadata["stream"]["tasks"][:2]}}
    longer = {"a": replace(found, metadata=fewer), "b": found}
    assert any("of different tasks" in note for note in list_notes(longer, nothing))
    assert not any("of different tasks" in note for note in list_notes({"a": found, "b": found}, nothing))


def test_runs_that_are_alike_say_so(runs: Path, regard: Regard, tmp_path: Path) -> None:
    result = LearnResult.load(runs / "short")
    replace(result).save(tmp_path / "copy")
    ended = regard("compare", runs / "short", tmp_path / "copy", runs / "long")
    assert ended.code == 0
    assert "no setting differs" not in ended.out
    alike = regard("compare", runs / "short", tmp_path / "copy")
    assert "note: no setting differs\n" in alike.out
    assert "difference is copy − short" in alike.out
