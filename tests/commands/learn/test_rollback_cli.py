"""`regard rollback`: the model as it was after a task, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from regard import LearnResult, learn
from tests.continual.small_tasks import stream

Regard = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"num_epochs": 2, "num_probing_epochs": 2, "learning_rate": 5e-3, "probing_learning_rate": 5e-2, "batch_size": 4},
    **{"length": 10, "diagnostic_samples": 0, "order": "2-0-1"},
}
ORDER = ("run-sit", "cat-dog", "red-blue-green")


@pytest.fixture(scope="module")
def learnt(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs."""
    folder = tmp_path_factory.mktemp("learnt")
    found = learn(
        str(words / "words.jsonl"),
        ["finetune", "prescale"],
        str(words / "model"),
        seeds=[3],
        work_dir=folder / "work",
        **OPTIONS,
    )
    return found.save(folder / "run")


def score(folder: Path, task: str) -> float:
    """The accuracy of the model in a folder on a task's test rows, among its own classes."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (of,) = [one for one in stream().tasks if one.name == task]
    columns = [model.config.label2id[label] for label in of.labels]
    batch = tokenizer([text for (text,) in of.test.texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch).logits[:, columns].argmax(1)
    return float((found == torch.tensor(of.test.labels)).double().mean()) * 100


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["finetune", "prescale"])
def test_the_model_scores_as_it_did_then(method: str, learnt: Path, regard: Regard, tmp_path: Path) -> None:
    matrix = LearnResult.load(learnt).accuracy_matrix
    for place, name in enumerate(ORDER, start=1):
        ended = regard("rollback", learnt, name, "--method", method, "--out", f"m{place}")
        assert ended.code == 0, ended.err
        assert f"after {', '.join(ORDER[:place])} ({method})" in " ".join(ended.out.split())
        rows = matrix[(matrix["method"] == method) & (matrix["after_task"] == place) & (matrix["scenario"] == "til")]
        then = {row.task: row.score for row in rows.itertuples() if row.task_index <= place}
        assert {task: score(tmp_path / f"m{place}", task) for task in ORDER[:place]} == pytest.approx(then)
    lineage = json.loads((tmp_path / "m2" / "lineage.json").read_text())
    assert [task["name"] for task in lineage["tasks"]] == list(ORDER[:2])
    assert lineage == AutoModelForSequenceClassification.from_pretrained(tmp_path / "m2").config.lineage


def test_only_such_a_model_is_written_over(learnt: Path, regard: Regard, words: Path, tmp_path: Path) -> None:
    line = ("rollback", learnt, 1, "--method", "finetune", "--seed", 3, "--out", "m")
    assert regard(*line).code == 0
    assert "m exists; choose another folder, or give --overwrite" in regard(*line).complaint
    (tmp_path / "m" / "stale").touch()
    assert "m holds stale, which was not written with lineage.json" in regard(*line, "--overwrite").complaint
    (tmp_path / "m" / "stale").unlink()
    assert regard(*line, "--overwrite").code == 0
    shutil.copytree(words / "model", tmp_path / "other")
    complaint = regard(*line[:-1], "other", "--overwrite").complaint
    assert "other holds something else than what is written here (no lineage.json)" in complaint


@pytest.mark.parametrize(
    "options,said",
    [
        (
            ("1",),
            "run: expected one, several fit (choose by --method and --seed",
        ),
        (
            ("1", "--method", "ewc"),
            "run: expected one, none fits (choose by --method and --seed",
        ),
        (("1", "--method", "finetune", "--seed", "4"), "none fits"),
        (("1", "--seed", "x"), "--seed: expected a number, got 'x'"),
        (("4", "--method", "finetune"), "task: expected a number from 1 to 3, or one of run-sit, cat-dog"),
        (("0", "--method", "finetune"), "got '0'"),
        (("sports", "--method", "finetune"), "got 'sports'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_gets_one_line(
    options: tuple[str, ...], said: str, learnt: Path, regard: Regard, tmp_path: Path
) -> None:
    assert said in regard("rollback", learnt, *options, "--out", "m").complaint
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_moved_is_named(learnt: Path, regard: Regard, words: Path, tmp_path: Path) -> None:
    line = ("rollback", learnt, 1, "--method", "finetune", "--seed", 3, "--out", "m")
    assert "nowhere" in regard(*line, "--model", "nowhere").complaint
    moved = shutil.copytree(words / "model", tmp_path / "moved")
    assert regard(*line, "--model", moved).code == 0
    assert (tmp_path / "m" / "lineage.json").is_file()


def test_models_that_are_not_there_or_damaged(learnt: Path, regard: Regard, tmp_path: Path) -> None:
    assert "no run in nowhere" in regard("rollback", "nowhere", "1", "--out", "m").complaint
    run = Path(shutil.copytree(learnt, tmp_path / "run"))
    (delta,) = (run / "models").glob("finetune*/after-0001.safetensors")
    delta.write_bytes(b"cut off")
    assert "models: cannot read" in regard("rollback", run, "2", "--method", "finetune", "--out", "m").complaint
    shutil.rmtree(run / "models")
    complaint = regard("rollback", run, "2", "--method", "finetune", "--out", "m").complaint
    assert "`regard learn --config" in complaint
    assert not (tmp_path / "m").exists()
