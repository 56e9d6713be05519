"""What each task has changed, and the network put together again from it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from regard.continual.learner import Learner
from regard.continual.methods import METHODS
from regard.continual.models import (
    TaskDeltas,
    delta_path,
    export_network,
    load_network,
    rebuild_network,
)
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import collect_tensors
from regard.errors import UserError
from regard.models.generator import add_model_hash
from tests.continual.small_tasks import BUDGET, loaded, stream
from tests.continual.together import made

ONE = replace(BUDGET, num_epochs=1, num_probing_epochs=1)
KNOWN = {"separate": [1, 2, 3], "joint": [0, 0, 3]}
"""How many tasks the model knows after each, where that is not all so far; of `separate` the place of the one."""
NAMES = ("finetune", "probe", "probe-finetune", "prescale", "separate", "joint")
STOPPED = 2


class Broken(Exception):
    """What ends a run early."""


def learnt(name: str, folder: Path, **options: Any) -> list[dict[str, Tensor]]:
    """The network after each task of a run whose deltas go to the folder."""
    method, after = made(name), list[dict[str, Tensor]]()
    learner = make_learner(stream(4), method, add_model_hash(loaded()), ONE, seed=1, **options)
    deltas = TaskDeltas(folder)
    deltas.begin(learner, method, name)

    def keep(learner: Learner, task: int) -> None:
        deltas.write(learner, task)
        after.append({key: value.clone() for key, value in collect_tensors(learner.network).items()})

    run_stream(learner, method, on_task=keep)
    return after


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_network_after_each_task(name: str, tmp_path: Path) -> None:
    """Bit for bit."""
    after = learnt(name, tmp_path)
    for task, expected in enumerate(after, start=1):
        network, about = rebuild_network(tmp_path, task, loaded())
        found = collect_tensors(network)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        lineage = network.classifier.config.lineage
        known = ["cat-dog", "red-blue-green", "run-sit"][: KNOWN.get(name, [1, 2, 3])[task - 1]]
        assert [one["name"] for one in lineage["tasks"]] == (known[-1:] if name == "separate" else known)
        assert lineage["base"] == "tiny"
        assert about["method"]["name"] == name
        assert not network.training


def test_only_what_has_changed_is_kept(tmp_path: Path) -> None:
    learnt("probe", tmp_path)
    for task in (1, 2, 3):
        assert set(load_file(delta_path(tmp_path, task))) == {"classifier.head.vectors", "classifier.head.bias"}


def test_below_adapters_nothing_is_kept(tmp_path: Path) -> None:
    (*_, last) = learnt("finetune", tmp_path, lora={"rank": 2})
    names = set(load_file(delta_path(tmp_path, 3)))
    assert all("lora_" in name or ".head." in name for name in names)
    network, _ = rebuild_network(tmp_path, 3, loaded())
    assert all(torch.equal(collect_tensors(network)[key], value) for key, value in last.items())


@pytest.mark.exhaustive
def test_a_run_that_goes_on_writes_the_same(tmp_path: Path) -> None:
    """Wherever it was broken off: before the state after a task was written, of which the delta is there."""
    learnt("finetune", tmp_path / "whole")
    method, folder = METHODS["finetune"](), tmp_path / "deltas"
    start = partial(make_learner, stream(4), loaded=add_model_hash(loaded()), budget=ONE, seed=1)
    deltas = TaskDeltas(folder)

    def stop(learner: Learner, task: int) -> None:
        deltas.write(learner, task)
        if task == STOPPED:
            raise Broken

    with pytest.raises(Broken):
        run_stream(start(method=method), method, folder=tmp_path / "states", on_task=stop)
    method, deltas = METHODS["finetune"](), TaskDeltas(folder)
    run_stream(start(method=method), method, folder=tmp_path / "states", resume=True, on_task=deltas.write)
    for task in (1, 2, 3):
        assert delta_path(folder, task).read_bytes() == delta_path(tmp_path / "whole", task).read_bytes()


def test_a_model_is_told_by_its_weights(tmp_path: Path) -> None:
    learnt("finetune", tmp_path)
    assert add_model_hash(loaded()).sha256 == add_model_hash(loaded()).sha256
    assert add_model_hash(replace(loaded(), sha256="of files")).sha256 == "of files"
    rebuild_network(tmp_path, 1, replace(loaded(), sha256="of files, which have the same weights"))
    with pytest.raises(
        UserError, match=r"model: expected the one that the run began with, tiny with weights [0-9a-f]{12}; "
    ):
        rebuild_network(tmp_path, 1, replace(loaded(seed=1), name="other"))


def test_a_changed_bit_of_a_delta_is_noticed(tmp_path: Path) -> None:
    learnt("probe", tmp_path)
    path = delta_path(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"models: .*after-0001\.safetensors is damaged"):
        rebuild_network(tmp_path, 2, loaded())


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("lineage.json", "{", "models: expected lineage.json as `regard learn` writes it, cannot read "),
        ("after-0002.safetensors", "short", "models: cannot read "),
        ("after-0001.safetensors", None, "models: cannot read "),
    ],
)
def test_damaged_files(name: str, content: str | None, told: str, tmp_path: Path) -> None:
    learnt("probe", tmp_path)
    path = tmp_path / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError) as raised:
        rebuild_network(tmp_path, 2, loaded())
    assert str(raised.value).startswith(told)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("task", [0, 4])
def test_tasks_that_are_not_there(task: int, tmp_path: Path) -> None:
    learnt("probe", tmp_path)
    with pytest.raises(UserError, match=f"task: expected a number from 1 to 3, got {task}"):
        rebuild_network(tmp_path, task, loaded())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["prescale", "lwf", "mbpa++", "idbr", "l2p", "ctr"])
def test_a_network_is_written_and_read(name: str, tmp_path: Path) -> None:
    learnt(name, tmp_path / "deltas")
    network, about = rebuild_network(tmp_path / "deltas", 2, loaded())
    export_network(network, loaded().tokenizer, about, tmp_path / "model")
    back = load_network(tmp_path / "model")
    rows = {"input_ids": torch.tensor([[2, 5, 11, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    rows["tasks"] = torch.tensor([1])
    with torch.no_grad():
        torch.testing.assert_close(back(rows), network(rows), rtol=0, atol=1e-6)
    found, expected = collect_tensors(back), collect_tensors(network)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert (
        json.loads((tmp_path / "model" / "config.json").read_text())["lineage"]["sha256"]
        == add_model_hash(loaded()).sha256
    )
    with pytest.raises(UserError, match=r"model: .*nowhere cannot be read: "):
        load_network(tmp_path / "nowhere")


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["idbr", "l2p", "ctr"])
def test_a_part_of_a_network_is_no_classifier(name: str, tmp_path: Path) -> None:
    """Which would answer something else than the network does."""
    learnt(name, tmp_path / "deltas")
    network, about = rebuild_network(tmp_path / "deltas", 2, loaded())
    folder = export_network(network, loaded().tokenizer, about, tmp_path / "model")
    with pytest.raises(UserError, match=rf"model: expected a classifier, .*model is the network of {name}; .*load_net"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_network_that_lacks_weights(tmp_path: Path) -> None:
    learnt("l2p", tmp_path / "deltas")
    network, about = rebuild_network(tmp_path / "deltas", 1, loaded())
    folder = export_network(network, loaded().tokenizer, about, tmp_path / "model")
    weights = load_file(folder / "network.safetensors")
    save_file({name: value for name, value in weights.items() if name != "keys"}, folder / "network.safetensors")
    with pytest.raises(UserError, match="models: expected all weights of l2p in "):
        load_network(folder)
