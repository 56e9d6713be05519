"""Blocks that a run has learnt, taken out of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch

import regard
from regard.cli import main
from regard.continual import run as running
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import METHODS
from regard.continual.methods.sapt import Sapt, SaptConfig, SaptNetwork
from regard.continual.models import TaskDeltas, export_network, load_network, rebuild_network
from regard.continual.run import make_learner, run_stream
from regard.continual.saved_adapters import load_adapters
from regard.continual.text_learner import make_text_learner
from regard.errors import UserError
from regard.models.pretrained import Loaded
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream
from tests.continual.small_text_tasks import BUDGET as TEXTS
from tests.continual.small_text_tasks import Kind

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ROWS = {
    "input_ids": torch.tensor([[2, 5, 11, 3], [2, 7, 3, 0]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))


def written(name: str, folder: Path, learnt: int, *said: str) -> Path:
    """A model as `regard rollback` writes it."""
    kind, model = METHODS[name], loaded(dropout=0.0)
    method = kind(kind.Config.parse(dict(one.split("=") for one in said)))
    return kept(make_learner(stream(4), method, model, BUDGET, seed=1), method, folder, model, learnt)


def kept(learner: Learner, method: Method, folder: Path, model: Loaded, learnt: int = 2) -> Path:
    """A run's network after so many tasks."""
    deltas = TaskDeltas(folder / "deltas")
    deltas.begin(learner, method, next(name for name, kind in METHODS.items() if kind is type(method)))
    run_stream(learner, method, on_task=lambda learner, number: deltas.write(learner, number))
    network, about = rebuild_network(folder / "deltas", learnt, model)
    return export_network(network, model.tokenizer, about, folder / "model")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name, said",
    [("sapt", "router=attention"), ("sapt", "top_k=1"), ("sapt-paper", "gate=published"), ("sapt-task-free", "r=2")],
)
def test_blocks_of_a_run_compute_what_they_did_in_it(name: str, said: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path, 2, "r=2", said)
    network = load_network(folder)
    assert isinstance(network, SaptNetwork)
    adapters = load_adapters(loaded(dropout=0.0).model, folder)
    names = [task for adapter in adapters.adapter_names for task in adapter.split("+")]  # a task-free one may have two
    assert names == [task.name for task in stream(4).tasks[:2]]
    assert adapters.provenance[adapters.adapter_names[-1]]["tasks"][-1]["sha256"] == stream(4).tasks[1].sha256
    with torch.no_grad():
        torch.testing.assert_close(adapters.routing_weights(**ROWS), network.weights(ROWS))
        with network.pool.use_weights(network.weights(ROWS)):
            expected = network.classifier.encoder(**ROWS).last_hidden_state
        torch.testing.assert_close(adapters(**ROWS).last_hidden_state, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, loaded(dropout=0.0).model(**ROWS).last_hidden_state, atol=1e-3)


@pytest.mark.exhaustive
def test_blocks_of_a_run_go_on_as_any_do(tmp_path: Path) -> None:
    """Kept, read into the base by itself, and used with peft."""
    adapters = load_adapters(loaded(dropout=0.0).model, written("sapt", tmp_path, 2, "r=2"))
    second = adapters.adapter_names[1]
    base = loaded(dropout=0.0).model
    back = regard.SharedAdapters.from_pretrained(base, adapters.save_pretrained(tmp_path / "blocks"))
    adapters.export_peft(second, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(loaded(dropout=0.0).model, tmp_path / "peft").eval()
    with torch.no_grad(), adapters.use_only(second), back.use_only(second):
        ours = adapters(**ROWS).last_hidden_state
        torch.testing.assert_close(back(**ROWS).last_hidden_state, ours)
        torch.testing.assert_close(theirs(**ROWS).last_hidden_state, ours, rtol=0, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_blocks_of_models_that_write(kind: Kind, tmp_path: Path) -> None:
    """The whole language model, encoder and decoder, with the weights of the prompt."""
    method, model = Sapt(SaptConfig(r=2)), small_text_tasks.loaded(kind)
    folder = kept(
        make_text_learner(small_text_tasks.stream(4, 2), method, model, TEXTS, seed=1), method, tmp_path, model
    )
    network, adapters = load_network(folder), load_adapters(small_text_tasks.loaded(kind).model, folder)
    assert isinstance(network, SaptNetwork)
    ids = torch.tensor([[5, 7, 6, 4, 8, 5]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([[4, 6, 7, 5, 5, 9]])}
    given = {**rows, "prompt_mask": torch.ones_like(ids).bool()} if kind == "llama" else rows
    with torch.no_grad():
        torch.testing.assert_close(adapters.routing_weights(**given), network.weights(rows))
        with network.pool.use_weights(network.weights(rows)):
            expected = network.classifier.encoder(**rows).logits
        torch.testing.assert_close(adapters(**given).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_blocks_of_t5_that_tells_classes_are_in_its_encoder(tmp_path: Path) -> None:
    found = replace(small_text_tasks.loaded("t5"), tokenizer=loaded().tokenizer)
    method = Sapt(SaptConfig(r=2))
    folder = kept(make_learner(stream(4), method, found, BUDGET, seed=1), method, tmp_path, found)
    network, adapters = load_network(folder), load_adapters(found.model, folder)
    assert isinstance(network, SaptNetwork)
    assert all(name.startswith("encoder.") for name in adapters.layers("count"))
    with torch.no_grad(), network.pool.use_weights(network.weights(ROWS)):
        expected = network.classifier.encoder(**ROWS).last_hidden_state
    with torch.no_grad():
        encoder = adapters.model.get_encoder()
        with adapters.use_weights(adapters.routing_weights(**ROWS)):
            torch.testing.assert_close(encoder(**ROWS).last_hidden_state, expected, rtol=0, atol=1e-6)


def test_other_methods_have_no_such_blocks(tmp_path: Path) -> None:
    folder = written("sequential-lora", tmp_path, 1, "r=2")
    with pytest.raises(
        UserError, match=rf"^folder: expected one with lineage.json, as `regard rollback` writes it, got {tmp_path}$"
    ):
        load_adapters("tiny", tmp_path)
    with pytest.raises(
        UserError, match=r"^folder: expected a model with an adapter for each task, .*; these have: .*epi, sapt,"
    ):
        load_adapters(loaded().model, folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sapt", "epi"])
def test_all_blocks_of_a_run_go_to_peft_and_come_back_with_their_router(name: str, tmp_path: Path) -> None:
    adapters = load_adapters(loaded(dropout=0.0).model, written(name, tmp_path, 3, "r=2"))
    folder = adapters.export_peft_set(tmp_path / "set")
    back = regard.SharedAdapters.from_peft_set(loaded(dropout=0.0).model, folder)
    assert back.adapter_names == adapters.adapter_names
    for task in adapters.adapter_names:
        theirs = peft.PeftModel.from_pretrained(loaded(dropout=0.0).model, folder / task).eval()
        with torch.no_grad(), adapters.use_only(task), back.use_only(task):
            ours = adapters(**ROWS).last_hidden_state
            assert torch.equal(back(**ROWS).last_hidden_state, ours)
            torch.testing.assert_close(theirs(**ROWS).last_hidden_state, ours, rtol=0, atol=1e-6)
    if name == "sapt":
        assert torch.equal(back.routing_weights(**ROWS), adapters.routing_weights(**ROWS))


@pytest.mark.exhaustive
def test_blocks_are_of_the_model_that_they_were_learnt_in(tmp_path: Path) -> None:
    folder, other = written("sapt", tmp_path, 1, "r=2"), loaded().model
    with torch.no_grad():
        other.encoder.layer[1].output.dense.bias.add_(1)
    with pytest.raises(UserError, match=r"began with, tiny; got one with other encoder.layer.1.output.dense.bias"):
        load_adapters(other, folder)
    assert not any("blocks" in name for name, _ in other.named_modules())


@pytest.mark.exhaustive
def test_a_text_is_looked_at_with_the_adapters_that_the_router_gives_it(tmp_path: Path) -> None:
    folder, small = written("sapt", tmp_path, 2, "r=2"), loaded(dropout=0.0)
    small.model.save_pretrained(tmp_path / "base")
    small.tokenizer.save_pretrained(tmp_path / "base")
    page, text = tmp_path / "page.html", small.tokenizer.decode([5, 11, 3, 7])
    assert main(["look", str(tmp_path / "base"), text, "--learnt", str(folder), "--out", str(page)]) == 0
    told = page.read_text(encoding="utf-8")
    assert "Adapters of this text" in told
    assert all(f">{task.name}<" in told for task in stream(4).tasks[:2])
