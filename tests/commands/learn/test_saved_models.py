"""What `regard rollback` has written is measured, replaced and taught by its name, or refused in one line."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import regard
from regard import UserError, models
from regard.cli import main
from regard.commands.learn.rollback import rollback
from regard.commands.learn.run import learn
from regard.continual import run as running
from regard.continual.models import load_network
from regard.models.classifier import Classifier
from regard.models.generator import Generator, load_generator
from regard.models.pretrained import Loaded
from tests.commands.learn import learn_runs
from tests.commands.learn.marks import READS_ENGLISH
from tests.continual import small_tasks, small_text_tasks

pytestmark = [READS_ENGLISH, pytest.mark.exhaustive]  # four comparisons are learnt first
FIELDS: dict[str, Any] = {**learn_runs.FIELDS, "diagnostic_samples": 0, "seeds": [1]}
TEXTS = {
    "num_epochs": 1,
    "learning_rate": 5e-3,
    "batch_size": 4,
    "length": 16,
    "target_length": 5,
    "diagnostic_samples": 0,
    "seeds": [1],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a method: the model after the second of three tasks."""
    place = tmp_path_factory.mktemp("learnt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
        plain = learn(
            small_tasks.stream(), ["finetune", "mbpa++", "idbr"], small_tasks.loaded(), work_dir=place / "a", **FIELDS
        )
        adapted = learn(
            small_tasks.stream(), "finetune", small_tasks.loaded(), work_dir=place / "b", lora_rank=2, **FIELDS
        )
        blocks = {**FIELDS, "head": "labels", "set": ("r=2",)}
        pool = learn(small_tasks.stream(), "sapt", small_tasks.loaded(), work_dir=place / "c", **blocks)
        texts = learn(
            small_text_tasks.stream(), ["finetune", "osf"], small_text_tasks.loaded(), work_dir=place / "d", **TEXTS
        )
    runs = {"plain": plain, "adapted": adapted, "pool": pool, "texts": texts}
    for name, found in runs.items():
        found.save(place / name)
    for out, run, method in (
        ("finetune", "plain", "finetune"),
        ("mbpa", "plain", "mbpa++"),
        ("idbr", "plain", "idbr"),
        ("lora", "adapted", None),
        ("sapt", "pool", None),
        ("answers", "texts", "finetune"),
        ("osf", "texts", "osf"),
    ):
        model = small_text_tasks.loaded() if run == "texts" else small_tasks.loaded()
        rollback(place / run, 2, place / "m" / out, method=method, model=model)
    return place / "m"


@pytest.fixture(scope="module")
def documents() -> list[str]:
    drawn = random.Random(0)
    return [" ".join(drawn.choices(small_tasks.WORDS[5:], k=60)) for _ in range(6)]


def encoder_of(folder: Path) -> Any:
    """The encoder in memory, as the classifier has it that Transformers loads."""
    classifier = Classifier.from_pretrained(folder).eval()
    return classifier.encoder


def measured(model: Any, documents: list[str]) -> pd.DataFrame:
    return regard.measure(model, texts=documents, samples=7, length=12, statistics="all").table


@pytest.mark.parametrize("name", ["finetune", "mbpa", "lora"])
def test_it_is_measured_as_the_encoder_in_memory(name: str, written: Path, documents: list[str]) -> None:
    folder = written / name
    found, encoder = models.load(str(folder), device="cpu"), encoder_of(folder)
    assert type(found.model) is type(encoder)
    assert found.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert found.tokenizer("cat red")["input_ids"] == small_tasks.tokenizer()("cat red")["input_ids"]
    own = Loaded(encoder, small_tasks.tokenizer(), "in memory", None)
    if name == "lora":
        assert not any("lora" in key for key in found.model.state_dict())
    else:
        weights = encoder.state_dict()
        assert found.model.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in found.model.state_dict().items())
    exact = 1e-4 if name == "lora" else 1e-12  # of weights to which the adapters are added in single precision
    table = measured(str(folder), documents)
    pd.testing.assert_frame_equal(table, measured(own, documents), rtol=exact, atol=exact)
    before = measured(small_tasks.loaded(), documents)
    assert not table["value"].equals(before["value"])


def test_it_is_replaced(written: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{word} the a of {n}", "label": word} for n in range(12) for word in ("cat", "dog")]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"length": 8, "max_train_samples": 16, "max_eval_samples": 8, "num_epochs": 1, "batch_size": 8}
    settings |= {"learning_rate": 0.01, "num_seeds": 1, "dynamic_fractions": (1, 0)}
    found = regard.replace(str(written / "finetune"), str(tmp_path / "task.jsonl"), **settings)
    assert found.scores["dynamic_fraction"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("name", ["finetune", "lora"])
@pytest.mark.parametrize("lora", [0, 2])
def test_learning_begins_from_it(
    name: str, lora: int, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its weights, all of which are trained unless adapters are; and the run is put together again by its name."""
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
    folder = written / name
    options = {**FIELDS, **({"lora_rank": lora} if lora else {})}
    found = learn(small_tasks.stream(), "finetune", str(folder), work_dir=tmp_path / "work", **options)
    assert found.metadata["model"]["name"] == str(folder)
    found.save(tmp_path / "run")
    out = rollback(tmp_path / "run", 1, tmp_path / "again")
    lineage = json.loads((out / "config.json").read_text())["lineage"]
    assert lineage["base"] == str(folder)
    assert lineage["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    base, learnt = models.load(str(folder)).model.state_dict(), models.load(str(out)).model.state_dict()
    same = {key for key, value in base.items() if torch.equal(value, learnt[key])}
    assert ("embeddings.word_embeddings.weight" in same) == bool(lora)
    assert max((learnt[key] - value).abs().max() for key, value in base.items()) < 0.2


@pytest.mark.parametrize("name", ["idbr", "sapt", "osf"])
def test_a_part_of_a_network_is_refused(name: str, written: Path) -> None:
    folder = str(written / name)
    started = f"model: expected a complete one, got '{folder}', the network of {name}, which has weights "
    for options in ({}, {"random_weights": True}, {"language_model": True}):
        with pytest.raises(UserError) as raised:
            models.load(folder, **options)
        line = str(raised.value)
        assert line.startswith(started)
        assert f"regard.LearntModel.from_pretrained('{folder}') predicts with it" in line
        assert (f"`regard look BASE TEXT --learnt {folder}` shows its adapters" in line) == (name == "sapt")
        assert "\n" not in line
    assert load_network(folder)


def test_the_commands_refuse_it(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = tmp_path / "stream.csv"
    texts = [f"a,{word} {number},{word}\n" for number in range(9) for word in ("cat", "dog")]
    stream.write_text("task,text,label\n" + "".join(texts))
    out = ("--out", str(tmp_path / "out"))
    for line in (
        ("measure", str(written / "sapt"), *out),
        ("learn", str(stream), "--method", "finetune", "--model", str(written / "sapt"), *out),
    ):
        assert main([str(part) for part in line]) != 0
        assert "expected a complete one, got" in " ".join(capsys.readouterr().err.split())


def test_one_that_answers_in_texts_is_the_language_model(written: Path) -> None:
    folder, prompt = str(written / "answers"), torch.tensor([[5, 6, 2]])
    found = load_generator(folder, device="cpu")
    told = Generator.from_pretrained(folder)
    real = torch.ones_like(prompt)
    answer: Tensor = Generator.from_loaded(found).generate(prompt, real, 4)
    assert torch.equal(answer, told.generate(prompt, real, 4))
    weights = told.encoder.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in models.load(folder).model.state_dict().items())
    measured_sites = regard.measure(folder, texts=["the cat on the dog . " * 20], samples=3, length=10).table["site"]
    assert {*measured_sites.dropna()} == {"encoder", "decoder", "cross"}


def test_teaching_one_that_answers_goes_on(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
    found = learn(small_text_tasks.stream(), "finetune", str(written / "answers"), work_dir=tmp_path / "work", **TEXTS)
    found.save(tmp_path / "run")
    out = rollback(tmp_path / "run", 3, tmp_path / "again")
    assert json.loads((out / "config.json").read_text())["lineage"]["base"] == str(written / "answers")


def test_a_classifier_writes_no_answers(written: Path) -> None:
    folder = str(written / "finetune")
    line = f"model: expected one that writes text, got '{folder}', a classifier (over bert)"
    for asked in (
        lambda: load_generator(folder),
        lambda: regard.replace(folder, "lm"),
        lambda: learn(small_text_tasks.stream(), "finetune", folder, **TEXTS),
    ):
        with pytest.raises(UserError) as raised:
            asked()
        assert str(raised.value) == line
