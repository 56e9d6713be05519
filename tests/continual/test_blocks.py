"""Blocks that a run has learnt, taken out of it."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tests.continual.small import BUDGET, loaded, stream

import regard
from regard.continual import run as running
from regard.continual.blocks import load_adapters
from regard.continual.methods import METHODS
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.models import Deltas, export, load_network, rebuilt
from regard.continual.run import begin, run
from regard.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ROWS = {
    "input_ids": torch.tensor([[2, 5, 11, 3], [2, 7, 3, 0]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "flops_a_token", lambda *_: 0.0)


def written(name: str, folder: Path, learnt: int, *said: str) -> Path:
    """A model as `regard rollback` writes it."""
    kind = METHODS[name]
    method = kind(kind.Settings.parsed(dict(one.split("=") for one in said)))
    learner = begin(stream(4), method, loaded(dropout=0.0), BUDGET, seed=1)
    deltas = Deltas(folder / "deltas")
    deltas.begin(learner, method, name)
    run(learner, method, on_task=lambda learner, number: deltas.keep(learner, number))
    network, about = rebuilt(folder / "deltas", learnt, loaded(dropout=0.0))
    return export(network, loaded().tokenizer, about, folder / "model")


@pytest.mark.parametrize("name, said", [("sapt", "ahead=20"), ("sapt", "top_k=1"), ("sapt-noticed", "ahead=20")])
def test_blocks_of_a_run_compute_what_they_did_in_it(name: str, said: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path, 2, "rank=2", said)
    network = load_network(folder)
    assert isinstance(network, SaptNetwork)
    adapters = load_adapters(loaded(dropout=0.0).model, folder)
    assert adapters.names == tuple(task.name for task in stream(4).tasks[:2])
    assert adapters.lineages[adapters.names[1]]["tasks"][0]["sha256"] == stream(4).tasks[1].sha256
    with torch.no_grad():
        torch.testing.assert_close(adapters.weights(**ROWS), network.weights(ROWS))
        with network.pool.weighing(network.weights(ROWS)):
            expected = network.classifier.encoder(**ROWS).last_hidden_state
        torch.testing.assert_close(adapters(**ROWS).last_hidden_state, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, loaded(dropout=0.0).model(**ROWS).last_hidden_state, atol=1e-3)


def test_blocks_of_a_run_go_on_as_any_do(tmp_path: Path) -> None:
    """Kept, read into the base by itself, and used with peft."""
    adapters = load_adapters(loaded(dropout=0.0).model, written("sapt", tmp_path, 2, "rank=2", "ahead=20"))
    second = adapters.names[1]
    base = loaded(dropout=0.0).model
    back = regard.SharedAdapters.from_pretrained(base, adapters.save_pretrained(tmp_path / "blocks"))
    adapters.export_peft(second, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(loaded(dropout=0.0).model, tmp_path / "peft").eval()
    with torch.no_grad(), adapters.forced(second), back.forced(second):
        ours = adapters(**ROWS).last_hidden_state
        torch.testing.assert_close(back(**ROWS).last_hidden_state, ours)
        torch.testing.assert_close(theirs(**ROWS).last_hidden_state, ours, rtol=0, atol=1e-6)


def test_other_methods_have_no_such_blocks(tmp_path: Path) -> None:
    folder = written("sequential-lora", tmp_path, 1, "rank=2")
    with pytest.raises(UserError, match="folder: expected a model of sapt, whose blocks share one attention;"):
        load_adapters(loaded().model, folder)


def test_blocks_are_of_the_model_that_they_were_learnt_in(tmp_path: Path) -> None:
    folder, other = written("sapt", tmp_path, 1, "rank=2", "ahead=20"), loaded().model
    with torch.no_grad():
        other.encoder.layer[1].output.dense.bias.add_(1)
    with pytest.raises(UserError, match=r"began with, tiny; got one with other encoder.layer.1.output.dense.bias"):
        load_adapters(other, folder)
    assert not any("blocks" in name for name, _ in other.named_modules())
