"""SEEKR against its formulas, with the attention that Transformers itself computes, and what distilling it is for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual.learner import Learner
from regard.continual.methods import seekr
from regard.continual.methods.seekr import (
    Seekr,
    SeekrNetwork,
    attention_divergence,
    average_by_layer,
    head_importance,
    select_heads,
)
from regard.continual.run import make_learner
from regard.errors import UserError
from regard.hooks.attention_weights import capture_weights
from regard.hooks.layers import find_attention_layers
from tests.continual.methods.adapter_networks import fill, made, short
from tests.continual.small_tasks import BUDGET, loaded


def begun(**said: Any) -> tuple[Seekr, Learner, SeekrNetwork]:
    """A run in float64 and without dropout, its block filled."""
    method = made("seekr", **{"memory_size": 4, **said})
    assert isinstance(method, Seekr)
    learner = make_learner(short(2), method, loaded(dropout=0.0, dtype=torch.float64), BUDGET, seed=1)
    learner.network.double()
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    network = learner.network
    assert isinstance(network, SeekrNetwork)
    fill(network)
    return method, learner, network


def second(**said: Any) -> tuple[Seekr, Learner, SeekrNetwork]:
    """A run that has come to its second task, the attention of all heads held on examples of the first."""
    method, learner, network = begun(head_fraction=1.0, layer_fraction=1.0, **said)
    method.before_task(learner, 0)
    method.after_task(learner, 0)
    learner.task = 1
    method.before_task(learner, 1)
    return method, learner, network


def attended(network: SeekrNetwork, rows: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The weights (row, head, query, key) of each layer, by Transformers."""
    encoder = network.classifier.encoder
    before = encoder.config._attn_implementation
    encoder.set_attn_implementation("eager")
    with network.pool.use_weights(torch.ones(1)):
        found = encoder(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].long(), output_attentions=True
        ).attentions
    encoder.set_attn_implementation(before)
    return tuple(found)


def test_weights_and_their_slopes_are_those_of_the_model() -> None:
    model = loaded(dropout=0.0, dtype=torch.float64).model.double().eval()
    ids = torch.randint(5, 12, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    here = find_attention_layers(model)
    with capture_weights(model, here) as reads:
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    slopes = [
        read.weights_grad(one)
        for read, one in zip(
            reads, torch.autograd.grad(states[:, 0].sin().sum(), [read.output for read in reads]), strict=True
        )
    ]
    model.set_attn_implementation("eager")
    found = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    loss = found.last_hidden_state[:, 0].sin().sum()
    expected = torch.autograd.grad(loss, list(found.attentions), retain_graph=True)
    assert len(reads) == len(found.attentions) == 2
    assert min(float(right.abs().max()) for right in expected) > 1e-3  # squares behind a norm would have none
    for read, weights, slope, right in zip(reads, found.attentions, slopes, expected, strict=True):
        torch.testing.assert_close(read.weights(), weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(read.weights(torch.tensor([2, 1])), weights[[2, 1]], rtol=0, atol=1e-12)
        torch.testing.assert_close(slope, right, rtol=0, atol=1e-12)
        assert read.weights().requires_grad


def test_heads_matter_that_move_and_are_steep() -> None:
    moved = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=torch.float64)
    steep = torch.tensor([[1.0, 3.0], [8.0, 2.0]], dtype=torch.float64)
    expected = torch.tensor([[1 * 0.25, 2 * 0.75], [3 * 0.8, 0.5 * 0.2]], dtype=torch.float64)
    torch.testing.assert_close(head_importance(moved, steep), expected)


def test_the_layers_with_the_most_come_first_and_then_their_heads() -> None:
    weights = torch.tensor([[9.0, 0, 0, 0], [3, 3, 2, 2], [0, 8, 0, 1], [1, 1, 1, 1]])
    assert select_heads(weights, 0.5, 0.125) == [[0, 0], [1, 0]]
    assert select_heads(weights, 0.75, 0.25) == [[0, 0], [1, 0], [1, 1], [2, 1]]
    assert select_heads(weights, 0.25, 1.0) == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert select_heads(torch.zeros(4, 4), 0.0, 0.0) == [[0, 0]]


def test_the_divergence_is_the_mean_over_queries_heads_and_then_layers() -> None:
    stored = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.2, 0.8], [0.9, 0.1]]], dtype=torch.float64)
    present = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.2, 0.8], [0.9, 0.1]]], dtype=torch.float64)
    first = (0.5 * math.log(2) + 0.5 * math.log(2 / 3) + math.log(2)) / 2
    found = attention_divergence(stored, present)
    assert found.tolist() == pytest.approx([first, 0.0], abs=1e-6)
    assert float(average_by_layer(torch.tensor([1.0, 3.0, 8.0]), [0, 0, 1])) == pytest.approx((2 + 8) / 2)


def test_importance_and_what_is_stored_are_what_the_formulas_say() -> None:
    method, learner, network = begun(head_fraction=0.5, layer_fraction=1.0)
    method.before_task(learner, 0)
    coming = sorted(method.earlier)
    rows = [learner.rows([item]) for item in coming]
    before = [torch.stack(attended(network, one))[:, 0].detach() for one in rows]
    with torch.no_grad():
        for part in network.pool.parameters_of(0):
            part.mul_(1.5)
    method.after_task(learner, 0)
    moved, steep = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for one, item, old in zip(rows, coming, before, strict=True):
        now = attended(network.eval(), one)
        moved += (torch.stack(now)[:, 0].detach() - old).square().mean((-1, -2)) / len(rows)
        with capture_weights(network.classifier.encoder, network.attention_layers) as reads:
            logits = network.classifier.head(_states(network, one), one["attention_mask"])
        loss = learner.cross_entropy(logits, one)
        values = [read.call.value for read in reads]
        outputs = torch.autograd.grad(loss, [read.output for read in reads])
        for layer in range(2):
            slope = torch.einsum("hqw,hkw->hqk", outputs[layer][0], values[layer][0])
            steep[layer] += slope.square().mean((-1, -2)) / len(rows)
        torch.testing.assert_close(method.state.tensors[f"logits/0/{item.row}"], logits[0].detach(), rtol=0, atol=1e-10)
        stored = method.state.tensors[f"attention/0/{item.row}"]
        chosen = method.state.values["heads"]["0"]
        for place, (layer, head) in enumerate(chosen):
            torch.testing.assert_close(stored[place], now[layer][0, head].detach(), rtol=0, atol=1e-10)
    expected = moved * steep / steep.sum(1, keepdim=True)
    torch.testing.assert_close(method.state.tensors["importance"], expected, rtol=1e-8, atol=1e-14)
    assert len(method.state.values["heads"]["0"]) == 2


def _states(network: SeekrNetwork, rows: dict[str, Tensor]) -> Tensor:
    with network.pool.use_weights(torch.ones(1)):
        return network.classifier.states(rows["input_ids"], rows["attention_mask"].bool())


def test_the_loss_of_replayed_rows_has_its_three_parts() -> None:
    method, learner, network = second(attention_distillation_weight=3.0, logit_distillation_weight=0.3)
    with torch.no_grad():
        for part in network.pool.parameters_of(0):
            part.mul_(1.3)
    old = method.state.examples[:2]
    rows = learner.rows([*learner.items(1)[:2], *old], size=5)
    logits = learner.mask_logits(network(rows), rows["tasks"])
    now = attended(network, rows)
    expected = float(nn.functional.cross_entropy(logits[:2], rows["labels"][:2], reduction="sum").detach())
    for row, item in enumerate(old, start=2):
        entropy = float(nn.functional.cross_entropy(logits[row], rows["labels"][row]).detach())
        classes = [0, 1]
        answer = method.state.tensors[f"logits/0/{item.row}"][classes].softmax(-1)
        told = -float((answer * logits[row, classes].log_softmax(-1)).sum().detach())
        real, stored = rows["attention_mask"][row], method.state.tensors[f"attention/0/{item.row}"]
        each = torch.zeros(2, 2)
        for place, (layer, head) in enumerate(method.state.values["heads"]["0"]):
            weights = now[layer][row, head][real][:, real]
            each[layer, head] = float((stored[place] * (stored[place] / weights).log()).sum(-1).mean().detach())
        expected += 0.7 * entropy + 0.3 * told + 3.0 * float(each.mean())
    assert float(each.mean()) > 1e-5
    assert float(method.loss(learner, network, rows).detach()) == pytest.approx(expected, rel=1e-5)


def test_where_nothing_has_changed_nothing_is_held_though_there_is_dropout() -> None:
    method, learner, network = second(attention_distillation_weight=1000.0, logit_distillation_weight=1.0)
    rows = learner.rows(list(method.state.examples))
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    network.train()
    answers = [method.state.tensors[f"logits/0/{item.row}"][[0, 1]].softmax(-1) for item in method.state.examples]
    expected = -sum(float((one * one.log()).sum()) for one in answers)
    assert float(method.loss(learner, network, rows).detach()) == pytest.approx(expected, abs=1e-3)
    assert network.training


def test_what_is_in_the_memory_no_more_leaves_nothing_behind() -> None:
    method, learner, _ = begun()
    for task in range(2):
        learner.task = task
        method.before_task(learner, task)
        method.after_task(learner, task)
    items = {(item.task, item.row) for item in method.state.examples}
    assert {task for task, _ in items} == {0, 1}
    names = {tuple(map(int, name.split("/")[1:])) for name in method.state.tensors if "/" in name}
    assert names == items
    assert len(method.state.tensors) == 2 * len(items) + 1


def test_importance_adds_up_over_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    method, learner, _ = begun()
    found = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.0], [0.0, 0.5]])]
    monkeypatch.setattr(seekr, "head_importance", lambda *_: found[learner.task])
    for task in range(2):
        learner.task = task
        method.before_task(learner, task)
        method.after_task(learner, task)
    assert method.state.tensors["importance"].tolist() == [[1.5, 2.0], [3.0, 4.5]]


@pytest.mark.exhaustive
def test_attention_on_stored_examples_stays_nearer_with_distillation() -> None:
    def drift(attention: float) -> float:
        method, learner, network = second(attention_distillation_weight=attention, memory_size=3)
        items = list(method.state.examples)
        rows = learner.rows([*learner.items(1), *items])
        optimizer = torch.optim.Adam([one for one in network.parameters() if one.requires_grad], lr=0.05)
        for _ in range(15):
            optimizer.zero_grad()
            method.loss(learner, network, rows).backward()
            optimizer.step()
        now = [torch.cat([one[0] for one in attended(network, learner.rows([item]))]) for item in items]
        stored = [method.state.tensors[f"attention/0/{item.row}"] for item in items]
        return sum(float(attention_divergence(*each).sum().detach()) for each in zip(stored, now, strict=True))

    free = drift(0.0)
    assert free > 1e-4
    assert drift(1000.0) < 0.2 * free


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UserError, match="head_fraction"):
        made("seekr", head_fraction=1.5)
    with pytest.raises(UserError, match="memory_size"):
        made("seekr", memory_size=0)
