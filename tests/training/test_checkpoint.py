"""Checkpoints: a killed run goes on as if nothing had been, and what is damaged, full or of another run is told."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from regard.errors import UserError
from regard.runs.integrity import seal
from regard.runs.snapshots import Snapshots
from regard.training.checkpoint import full_weights
from regard.training.loop import TrainResult, train
from regard.training.plan import TrainingConfig
from tests.processes import run_python
from tests.training.small import batch, count, loss, net

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("resumed.py")
CLOCK = ("seconds", "items_per_second")


KILLS = {"twice": ["6", "11"], "before the first checkpoint": ["2"], "while one is written": ["write:8"]}


def without_clock(out: Path) -> list[dict[str, Any]]:
    rows = json.loads((out / "history.json").read_text())
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Where they are, and how each of them ended: one unbroken, and others killed and resumed."""
    place = tmp_path_factory.mktemp("runs")
    jobs = [(name, when) for name, kills in {"unbroken": [], **KILLS}.items() for when in (*kills, "")]
    arguments = [[str(place / name), str(place / f"{name} out"), when] for name, when in jobs]
    ended = run_python(["-W", "error", str(SCRIPT), json.dumps(arguments)])
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, list[dict[str, Any]]] = {}
    for (name, _), how in zip(jobs, json.loads(ended.stdout), strict=True):
        found.setdefault(name, []).append(how)
    return place, found


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, left",
    [
        ("twice", ["step-00000004", "step-00000008"]),
        ("before the first checkpoint", []),
        ("while one is written", ["step-00000004"]),
    ],
)
def test_a_killed_run_is_the_unbroken_one(name: str, left: list[str], runs: Any) -> None:
    place, ended = runs
    *killed, resumed = ended[name]
    assert [one["code"] for one in killed] == [-signal.SIGKILL] * len(KILLS[name])
    unfinished = [one for one in killed[-1]["left"] if one.startswith(".")]
    assert killed[-1]["left"] == [*unfinished, *left]
    assert len(unfinished) == (name == "while one is written")
    assert resumed == {"code": 0, "left": ["step-00000012", "step-00000014"]}
    rows = without_clock(place / f"{name} out")
    assert rows == without_clock(place / "unbroken out")
    assert [row["step"] for row in rows] == list(range(15))
    assert [row["step"] for row in rows if "norm" in row] == [0, 3, 6, 9, 12, 14]
    assert {row["training"] for row in rows if "norm" in row} == {0.0}
    weights, expected = (load_file(place / f"{one} out" / "weights.safetensors") for one in (name, "unbroken"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


# -- in this process ------------------------------------------------------------------------------------

PLAN = TrainingConfig(max_steps=12, batch_size=8, learning_rate=0.02, logging_steps=1, save_steps=3, save_total_limit=3)


def trained(model: nn.Module, folder: Path, plan: TrainingConfig = PLAN, **options: Any) -> TrainResult:
    given: dict[str, Any] = {"batch": batch, "loss": loss, "count": count, "device": "cpu"} | options
    return train(model, plan, folder=folder, **given)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that stopped behind step 10, with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path / "run"
    with pytest.raises(KeyError):
        trained(net(), folder, batch=lambda step: {step: batch(step) for step in range(10)}[step])
    assert names(folder) == ["step-00000003", "step-00000006", "step-00000009"]
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The model of a run that did not stop."""
    model = net()
    trained(model, tmp_path_factory.mktemp("whole") / "run")
    return model


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


def test_the_last_few_are_kept(stopped: Path, whole: nn.Module) -> None:
    model = net()
    taken: list[int] = []
    plan = replace(PLAN, save_total_limit=1, save_steps=1)
    result = trained(model, stopped, plan, resume=True, batch=lambda step: taken.append(step) or batch(step))
    assert taken == [9, 10, 11]
    assert names(stopped) == ["step-00000012"]
    assert same(model, whole)
    assert [row["step"] for row in result.history] == list(range(1, 13))
    assert result.steps == 12


def test_a_finished_run_is_not_run_again(stopped: Path, whole: nn.Module) -> None:
    first = trained(net(), stopped, resume=True)
    model = net()
    again = trained(model, stopped, resume=True, batch=lambda step: {}[step])
    assert same(model, whole)
    assert again == first


def test_more_steps_at_a_constant_rate(tmp_path: Path) -> None:
    plan = replace(PLAN, lr_scheduler_type="constant")
    straight, longer = net(), net()
    trained(straight, tmp_path / "straight", plan)
    trained(longer, tmp_path / "longer", replace(plan, max_steps=7))
    trained(longer, tmp_path / "longer", plan, resume=True)
    assert same(straight, longer)


def test_a_folder_that_has_checkpoints(stopped: Path) -> None:
    with pytest.raises(UserError, match="expected no checkpoints, got step-00000009; resume, or name another folder"):
        trained(net(), stopped)
    with pytest.raises(UserError, match=r"^learning_rate: the run in this folder has 0\.02, got 0\.1; "):
        trained(net(), stopped, replace(PLAN, learning_rate=0.1), resume=True)
    wider = net()
    wider.out = nn.Linear(8, 7)
    with pytest.raises(UserError, match=r"out.bias is \(6,\) there, and \(7,\) here"):
        trained(wider, stopped, resume=True)
    frozen = net()
    frozen.out.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"out.weight was trained there, and is not here"):
        trained(frozen, stopped, resume=True)
    assert same(frozen, net())
    assert names(stopped) == ["step-00000003", "step-00000006", "step-00000009"]


def flip(path: Path) -> None:
    """Change one bit of the last number."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the model": lambda path: flip(path / "model.safetensors"),
    "half of the optimiser": lambda path: os.truncate(path / "optimizer.safetensors", 1000),
    "no model": lambda path: (path / "model.safetensors").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "a manifest of another kind": lambda path: (path / "manifest.json").write_text("[]"),
    "a later format": lambda path: (path / "manifest.json").write_text(json.dumps(seal({"schema_version": 2}))),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_one_before_a_damaged_one(damage: Callable[[Path], object], stopped: Path, whole: nn.Module) -> None:
    damage(stopped / "step-00000009")
    model = net()
    with pytest.warns(UserWarning, match=r"step-00000009 is damaged \(.*\); the state before it is used"):
        trained(model, stopped, resume=True)
    assert same(model, whole)
    assert names(stopped) == ["step-00000006", "step-00000009", "step-00000012"]
    latest = Snapshots(stopped).find_latest()
    assert latest is not None
    assert latest[0] == stopped / "step-00000012"


@pytest.mark.filterwarnings("ignore:.*is damaged:UserWarning")
def test_all_damaged(stopped: Path) -> None:
    for path in stopped.iterdir():
        flip(path / "model.safetensors")
    with pytest.raises(UserError, match=r"cannot resume: each of the 3 states in .* is damaged"):
        trained(net(), stopped, resume=True)


def test_what_comes_after_a_resumed_step_goes(stopped: Path) -> None:
    """A checkpoint of a later step is of a run that this one is not."""
    shutil.copytree(stopped / "step-00000009", stopped / "step-00000011")
    (stopped / "step-00000011" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step-00000011 is damaged"), pytest.raises(KeyError):
        trained(net(), stopped, replace(PLAN, save_steps=1), resume=True, batch=lambda step: {9: batch(9)}[step])
    assert names(stopped) == ["step-00000006", "step-00000009", "step-00000010"]


class Wordy:
    """A watcher whose numbers take more place than the weights."""

    def due(self, step: int, last: bool) -> bool:
        return step >= 10

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        return {"number" * 2000: 0.0}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_full_disk(file: str, stopped: Path, whole: nn.Module) -> None:
    """Whichever file there is no place for, the checkpoints are those from before, and the run goes on from them.

    The limit is one on the size of a file, which is met as a full disk is, when bytes are written.
    """
    sizes = {path.name: path.stat().st_size for path in (stopped / "step-00000009").iterdir()}
    assert sizes["model.safetensors"] < sizes["optimizer.safetensors"] < 12_000
    limit = 12_000 if file == "manifest.json" else sizes[file] - 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(UserError) as raised:
            trained(net(), stopped, resume=True, watchers=[Wordy()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = str(raised.value)
    assert told.startswith(f"cannot write the state of step 12 to {stopped}: ")
    assert "File too large" in told
    assert told.endswith(f"; the last good state is {stopped / 'step-00000009'}")
    assert names(stopped) == ["step-00000003", "step-00000006", "step-00000009"]
    model = net()
    trained(model, stopped, resume=True)
    assert same(model, whole)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the state of step 3 to .*; there is no saved state"):
        trained(net(), tmp_path / "file" / "run")


def test_a_model_can_be_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    """Tied weights are written once, and the names are those that Transformers knows."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=20, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)

    def of_tokens(model: nn.Module, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return model(**rows, labels=rows["input_ids"], num_items_in_batch=1).loss

    trained(
        model,
        tmp_path / "run",
        replace(PLAN, max_steps=2),
        batch=lambda step: {"input_ids": torch.arange(8 * 6).reshape(8, 6) % 20},
        loss=of_tokens,
        count=lambda rows: rows["input_ids"][:, 1:].numel(),
    )
    written = load_file(tmp_path / "run" / "step-00000002" / "model.safetensors")
    assert "model.embed_tokens.weight" in written
    assert "lm_head.weight" not in written
    config.save_pretrained(tmp_path / "run" / "step-00000002")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "step-00000002")
    assert same(loaded, model)
    state = json.loads((tmp_path / "run" / "step-00000002" / "manifest.json").read_text())["record"]
    assert (state["step"], state["items"], state["processes"]) == (2, 80, 1)
    assert TrainingConfig.from_dict(state["plan"]) == replace(PLAN, max_steps=2)


def test_full_weights_are_copies() -> None:
    model = nn.Linear(2, 2)
    before = full_weights(model)
    expected = {name: tensor.clone() for name, tensor in before.items()}
    with torch.no_grad():
        model.weight.add_(1)
    assert all(before[name].equal(expected[name]) for name in expected)
