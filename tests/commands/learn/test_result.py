"""Records of learning, to and from disk, and what is not one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.commands.learn.result import COLUMNS, TABLES, LearnResult, make_table
from regard.commands.learn.run import learn
from regard.errors import UserError
from tests.commands.learn.learn_runs import FIELDS
from tests.continual.small_tasks import loaded, stream


@pytest.fixture(scope="module")
def found() -> LearnResult:
    """Two methods, two seeds, nothing diagnosed."""
    fields = {**FIELDS, "diagnostic_samples": 0, "probing_learning_rate": 5e-2}
    return learn(stream(), ["probe", "separate"], loaded(), seeds=[1, 2], **fields)


def test_metrics_are_of_the_matrix(found: LearnResult) -> None:
    last = found.accuracy_matrix[
        (found.accuracy_matrix["after_task"] == 3) & (found.accuracy_matrix["scenario"] == "til")
    ]
    by_hand = last.groupby(["method", "seed"])["score"].mean()
    ap = found.metrics[(found.metrics["metric"] == "average_performance") & (found.metrics["scenario"] == "til")]
    assert {(one.method, one.seed): one.value for one in ap.itertuples()} == pytest.approx(by_hand.to_dict())
    means = found.summary_table
    means = means[(means["metric"] == "average_performance") & (means["scenario"] == "til")].set_index("method")["mean"]
    assert means.to_dict() == pytest.approx(by_hand.groupby("method").mean().to_dict())
    assert not found.differences.empty


def test_zero_shot_transfer_is_above_chance_in_percent(found: LearnResult) -> None:
    tasks = found.metadata["stream"]["tasks"]
    run = found.accuracy_matrix.query("method == 'probe' and seed == 1 and scenario == 'til'")
    scores = run.set_index(["after_task", "task"])["score"]
    gains = [scores[number, task["name"]] - 100 / len(task["labels"]) for number, task in enumerate(tasks[1:], start=1)]
    metric = found.metrics.query("method == 'probe' and seed == 1 and scenario == 'til'").set_index("metric")["value"]
    assert metric["zero_shot_transfer"] == pytest.approx(sum(gains) / len(gains))


def test_a_table_has_all_its_columns() -> None:
    one = make_table("diagnostics", [{"statistic": "sink_deviation", "layer": None, "value": 0.5}])
    assert tuple(one) == COLUMNS["diagnostics"]
    assert str(one["layer"].dtype) == "Int64"
    assert make_table("matrix", []).empty


def test_tables_that_are_empty_are_saved(found: LearnResult, tmp_path: Path) -> None:
    found.save(tmp_path / "run")
    back = LearnResult.load(tmp_path / "run")
    assert back.models is None
    assert tuple(back.diagnostics) == COLUMNS["diagnostics"]
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    assert found.summary() is not None


def test_what_a_killed_process_left_among_the_models_is_not_kept(found: LearnResult, tmp_path: Path) -> None:
    for run in ("probe-1", ".-own.py-Own-1"):  # of --method ./own.py:Own
        models = tmp_path / "models" / run
        (models / ".index.json-ab12").mkdir(parents=True)
        for name in ("index.json", ".index.json-ab12/index.json"):
            (models / name).write_text("{}", encoding="utf-8")
    replace(found, models=tmp_path / "models").save(tmp_path / "run")
    kept = [path.relative_to(tmp_path / "run") for path in (tmp_path / "run" / "models").rglob("*.json")]
    assert sorted(map(str, kept)) == ["models/.-own.py-Own-1/index.json", "models/probe-1/index.json"]
    LearnResult.load(tmp_path / "run")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "name, content, told",
    [
        ("results.json", None, "no run in "),
        ("results.json", "{", "the run in "),
        ("results.json", json.dumps({"command": "replace"}), "the run in "),
        ("results.json", "[]", "the run in "),
        *((f"{name}.parquet", None, "the run in ") for name in TABLES),
        ("gate.parquet", "short", "the run in "),
        ("matrix.parquet", "short", "the run in "),
    ],
)
def test_what_is_no_run(name: str, content: Any, told: str, found: LearnResult, tmp_path: Path) -> None:
    folder = found.save(tmp_path / "run")
    path = folder / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError) as raised:
        LearnResult.load(folder)
    assert str(raised.value).startswith(f"{told}{folder}")
    assert "\n" not in str(raised.value)


def test_the_record_of_another_verb(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"command": "measure"}))
    with pytest.raises(UserError, match="is one of `regard measure`: expected one of `regard learn`"):
        LearnResult.load(tmp_path)
