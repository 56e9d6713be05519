"""Merges of adapters that are trained apart: what is trained, what answers, and what is kept."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.continual.costs import measure_memory
from regard.continual.methods.merges import MergeNetwork
from regard.continual.run import make_learner, run_stream
from regard.continual.text_learner import make_text_learner
from tests.adapters.test_merging import defined_ties
from tests.continual import small_text_tasks
from tests.continual.methods.adapter_networks import copied, learnt, made, moved, of_block, precise, short, some
from tests.continual.small_tasks import BUDGET, loaded

NAMES = ("merge-linear", "merge-ties", "merge-dare")


pytestmark = pytest.mark.usefixtures("without_flops")


def defined(name: str, deltas: list[Tensor], scale: float, density: float, seed: int) -> Tensor:
    """The merge of a layer by its definition; DARE's entries are those that the seed draws."""
    mean = scale / len(deltas)
    if name == "merge-ties":
        return torch.from_numpy(defined_ties([delta.numpy() for delta in deltas], [scale] * len(deltas), density))
    if name == "merge-dare":
        deltas = [torch.bernoulli(torch.full_like(delta, density)) * delta / density for delta in deltas]
    return torch.from_numpy(np.sum([mean * delta.numpy() for delta in deltas], 0))


@pytest.mark.parametrize("name", NAMES)
def test_all_finished_tasks_answer_by_their_merge(name: str) -> None:
    said: dict[str, Any] = {"scale": 0.7} | ({} if name == "merge-linear" else {"density": 0.3})
    method = made(name, **said)
    learner = precise(method)
    for task in range(2):
        method.before_task(learner, task)
        method.after_task(learner, task)
    method.before_task(learner, 2)
    network, rows = learner.network_as(MergeNetwork), some(learner)
    torch.manual_seed(7)  # what was drawn before makes no difference
    found = network.eval()(rows)
    model = loaded(dropout=0.0, dtype=torch.float64).model.double()
    torch.manual_seed(1)
    with torch.no_grad():
        for layer_name, layer in network.pool.layers.items():
            adapters = layer.adapters
            deltas = [4.0 / 2 * adapters.B[task].detach() @ adapters.A[task].detach() for task in range(2)]
            model.get_submodule(layer_name).weight += defined(name, deltas, 0.7, 0.3, 1)
        states = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).last_hidden_state
        expected = network.classifier.head(states, rows["attention_mask"].bool())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(network(rows), found, rtol=0, atol=0)
    assert {name: value.numel() for name, value in copied(learner).items() if "merged" in name} == {}


def test_each_task_is_trained_alone_on_the_model_as_it_was() -> None:
    _, after = learnt("merge-linear", tasks=2)
    changed = moved(after[1], after[2])
    assert of_block(changed, 1)
    assert not of_block(changed, 0)
    method = made("merge-linear")
    learner = precise(method)
    method.before_task(learner, 1)
    trained, rows = learner.network_as(MergeNetwork), some(learner)
    found = trained.train()(rows)
    with trained.use_only(1):
        torch.testing.assert_close(found, trained.eval()(rows), rtol=0, atol=1e-12)
    parameters = [name for name, value in trained.named_parameters() if value.requires_grad and ".adapters." in name]
    assert parameters
    assert of_block(set(parameters), 1) == set(parameters)


def test_nothing_is_merged_before_a_task_is_done() -> None:
    method = made("merge-ties")
    learner = precise(method)
    method.before_task(learner, 0)
    network, rows = learner.network_as(MergeNetwork).eval(), some(learner)
    with network.pool.use_weights(None):
        expected = network.classifier(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    assert torch.equal(network(rows), expected)
    assert measure_memory(learner, method)["memory_bytes"] == 0
    method.after_task(learner, 0)
    adapter = sum(part.numel() * part.element_size() for part in network.pool.parameters_of(0))
    assert measure_memory(learner, method)["memory_bytes"] == adapter
    assert not torch.allclose(network(rows), expected)


def test_weights_of_the_model_stay_as_they_are() -> None:
    method = made("merge-dare")
    learner = make_learner(short(3), method, loaded(dropout=0.0), BUDGET, seed=1)
    before = copied(learner)
    run_stream(learner, method)
    changed = moved(before, copied(learner))
    assert {name for name in changed if ".adapters." not in name} == {
        *("count", "finished", "classifier.head.vectors", "classifier.head.bias")
    }


@pytest.mark.parametrize("kind", ["t5", "llama", "gpt2"])
def test_texts_are_written_by_the_merge(kind: Any) -> None:
    method = made("merge-linear", scale=2.0)
    learner = make_text_learner(
        small_text_tasks.stream(4, 2), method, small_text_tasks.lively(kind), small_text_tasks.BUDGET, seed=1
    )
    ran = run_stream(learner, method)
    assert {row["task_index"] for row in ran.rows["matrix"]} == {1, 2}
    network = learner.network_as(MergeNetwork).eval()
    rows = learner.rows(learner.items(0)[:3])
    with network.pool.use_weights(torch.ones(2)):
        expected = network.classifier(**{name: rows[name] for name in ("input_ids", "attention_mask", "labels")}).logits
    torch.testing.assert_close(network(rows), expected, rtol=0, atol=1e-4)
