"""A learnt model as it was after a task: loaded by Transformers it scores what the matrix says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from regard.commands.learn.result import LearnResult
from regard.commands.learn.rollback import _find_run, rollback
from regard.commands.learn.run import learn
from regard.errors import UserError
from tests.commands.learn.learn_runs import FIELDS
from tests.continual.small_tasks import loaded, stream


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two methods and two seeds."""
    place = tmp_path_factory.mktemp("learnt")
    fields = {**FIELDS, "diagnostic_samples": 0}
    found = learn(stream(), ["finetune", "prescale"], loaded(), seeds=[1, 2], work_dir=place / "work", **fields)
    return found.save(place / "run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["finetune", "prescale"])
@pytest.mark.parametrize("task", [1, 2, "run-sit"])
def test_it_scores_what_the_matrix_says(method: str, task: Any, run: Path, tmp_path: Path) -> None:
    out = rollback(run, task, tmp_path / "model", method=method, seed=2, model=loaded())
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    learnt = task if isinstance(task, int) else 3
    lineage = model.config.lineage
    assert [one["name"] for one in lineage["tasks"]] == ["cat-dog", "red-blue-green", "run-sit"][:learnt]
    assert lineage["base"] == "tiny"
    assert model.config.classes == list(stream().classes)
    matrix = LearnResult.load(run).accuracy_matrix
    for place in range(learnt):
        test, own = stream().tasks[place].test, list(stream().class_indices(place))
        texts = [text for (text,) in test.texts]
        rows = tokenizer(texts, padding=True, truncation=True, max_length=10, return_tensors="pt")
        rows.pop("token_type_ids", None)
        with torch.no_grad():
            told = model(**rows).logits[:, own].argmax(-1)
        rows_of = matrix.query("method == @method and seed == 2 and scenario == 'til'")
        row = rows_of.query("after_task == @learnt and task_index == @place + 1")
        assert 100 * (told == torch.tensor(test.labels)).float().mean().item() == pytest.approx(row["score"].item())


@pytest.mark.parametrize(
    "said, told",
    [
        (
            {"method": "finetune"},
            "run: expected one, several fit (choose by --method and --seed",
        ),
        (
            {"method": "joint"},
            "run: expected one, none fits (choose by --method and --seed",
        ),
        ({"method": "finetune", "seed": 1, "task": 4}, "task: expected a number from 1 to 3, or one of cat-dog, "),
        ({"method": "finetune", "seed": 1, "task": 1.5}, "task: expected a number from 1 to 3, or one of cat-dog, "),
        ({"method": "finetune", "seed": 1, "task": "cats"}, "task: expected a number from 1 to 3, or one of cat-dog, "),
        ({"method": "finetune", "seed": 1, "model": loaded(seed=1)}, "model: expected the one that the run began with"),
    ],
)
def test_what_cannot_be_rolled_back(said: dict[str, Any], told: str, run: Path, tmp_path: Path) -> None:
    given = {"task": 1, "model": loaded()} | said
    with pytest.raises(UserError) as raised:
        rollback(run, given.pop("task"), tmp_path / "model", **given)
    assert str(raised.value).startswith(told)
    assert not (tmp_path / "model").exists()


def test_folders_that_are_none(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in "):
        rollback(tmp_path, 1, tmp_path / "model")
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("models"))
    with pytest.raises(UserError, match=r"models: .* has none of finetune-1 .* `regard learn --config .*bare --out"):
        rollback(bare, 1, tmp_path / "model", method="finetune", seed=1)
    out = tmp_path / "taken"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        rollback(run, 1, out, method="finetune", seed=1, model=loaded())
    assert json.loads((run / "results.json").read_text())["command"] == "learn"


def test_a_method_is_found_without_its_settings_where_only_one_has_them() -> None:
    runs = [{"method": name, "seed": 1, "tasks": []} for name in ("finetune", "sapt r=2", "ewc", "ewc lambda=3")]
    assert _find_run(runs, "sapt", None)["method"] == "sapt r=2"
    assert _find_run(runs, "ewc", 1)["method"] == "ewc"
    with pytest.raises(UserError, match=r"none fits .*; the folder has 'finetune' with seed 1, 'sapt r=2' with seed 1"):
        _find_run(runs, "sap", None)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls what Transformers renames
def test_a_base_with_an_adapter_is_loaded_with_it(tmp_path: Path) -> None:
    base, model = tmp_path / "base", loaded()
    model.model.save_pretrained(base)
    model.tokenizer.save_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    peft.get_peft_model(AutoModel.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    fields = {**FIELDS, "diagnostic_samples": 0, "adapter": str(tmp_path / "adapter")}
    result = learn(stream(), "finetune", str(base), seeds=[1], work_dir=tmp_path / "work", **fields)
    assert result.metadata["model"]["adapter"] == str(tmp_path / "adapter")
    result.save(tmp_path / "run")
    assert rollback(tmp_path / "run", 1, tmp_path / "model").is_dir()  # which compares the hash of the base
    plain = learn(stream(), "finetune", str(base), seeds=[1], **{**fields, "adapter": None})
    assert plain.metadata["model"]["sha256"] != result.metadata["model"]["sha256"]
    with pytest.raises(UserError, match="adapter: expected none with a model given in Python"):
        learn(stream(), "finetune", loaded(), **fields)
