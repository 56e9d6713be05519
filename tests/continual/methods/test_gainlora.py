"""GainLoRA's gates against their formulas, and what they are for."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.continual import run as running
from regard.continual.learner import Learner
from regard.continual.methods.gainlora import LAYERS, GainNetwork, gram_matrix, update_free_projection
from regard.continual.methods.lora import overlap_penalty
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from tests.continual.methods.adapter_networks import made, precise, short, some
from tests.continual.small_tasks import BUDGET, loaded

DRAWN = torch.Generator()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=DRAWN.manual_seed(seed), dtype=torch.float64)


def silu(vector: list[float]) -> list[float]:
    return [x / (1 + math.exp(-x)) for x in vector]


def times(matrix: Tensor, vector: list[float]) -> list[float]:
    return [sum(x * y for x, y in zip(row, vector, strict=True)) for row in matrix.tolist()]


def dot(one: list[float], other: list[float]) -> float:
    return sum(x * y for x, y in zip(one, other, strict=True))


def gated() -> tuple[Learner, GainNetwork]:
    """A run at its second task, whose gates and changes are drawn."""
    method = made("gainlora", gate_hidden_size=5)
    learner = precise(method)
    network = learner.network_as(GainNetwork)
    network.start_adapter(1)
    with torch.no_grad():
        for number, name in enumerate(LAYERS):
            getattr(network, name).copy_(draw(*getattr(network, name).shape, seed=number))
            network.change[name].copy_(draw(*network.change[name].shape, seed=9 + number))
            basis = torch.linalg.qr(draw(network.get_buffer(f"free_{name}").shape[0], 2, seed=20 + number))[0]
            network.get_buffer(f"free_{name}").sub_(basis @ basis.T)
    return learner, network


def test_a_gate_is_what_its_formula_says() -> None:
    learner, network = gated()
    rows = some(learner)
    found = network.weights(rows)
    assert found is not None
    encoder: Any = network.classifier.encoder
    table = encoder.get_input_embeddings().weight.detach()
    for row in range(len(rows["input_ids"])):
        real = [int(one) for one, seen in zip(rows["input_ids"][row], rows["attention_mask"][row], strict=True) if seen]
        mean = [sum(table[one, feature].item() for one in real) / len(real) for feature in range(table.shape[1])]
        for block in (0, 1):
            own = {name: getattr(network, name)[block].clone() for name in LAYERS}
            if block:
                own = {
                    name: one + network.change[name].detach() @ network.get_buffer(f"free_{name}")
                    for name, one in own.items()
                }
            state, key = silu(times(own["up"], silu(times(own["down"], mean)))), own["key"][0].tolist()
            turned = dot(state, key) / math.sqrt(dot(state, state) * dot(key, key))
            expected = abs(2 / (1 + math.exp(-4 * turned)) - 1)
            assert float(found[row, block].detach()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.95])
def test_as_few_directions_are_taken_as_have_the_share(threshold: float) -> None:
    first, second = (draw(30, 6, seed=seed) * torch.tensor([4.0, 3, 2, 1, 0.5, 0.1]) for seed in (1, 2))
    kept = np.zeros((6, 0))
    free = torch.eye(6, dtype=torch.float64)
    for inputs in (first, second):
        free = update_free_projection(free, gram_matrix(inputs), threshold)
        H = inputs.numpy().T
        known = kept @ kept.T @ H
        left, values, _ = np.linalg.svd(H - known)
        many = 0
        while (known**2).sum() + (values[:many] ** 2).sum() < threshold * (H**2).sum():
            many += 1
        kept = np.concatenate([kept, left[:, :many]], 1)
        np.testing.assert_allclose(free.numpy(), np.eye(6) - kept @ kept.T, rtol=0, atol=1e-10)
    assert 0 < kept.shape[1] < 6


def test_a_last_layer_begins_where_the_new_states_are_and_no_earlier_ones() -> None:
    _, network = gated()
    states = draw(40, 16, seed=3)
    network.init_key(1, gram_matrix(states))
    key, free = network.key[1, 0], network.get_buffer("free_key")
    residual = states.numpy() @ free.numpy()
    direction = np.linalg.svd(residual)[2][0]
    assert abs(np.dot(key.numpy(), direction)) == pytest.approx(math.sqrt(16 / 3), rel=1e-10)
    assert float(key.norm()) == pytest.approx(math.sqrt(16 / 3), rel=1e-10)
    assert float((key - key @ free).abs().max()) < 1e-10


def test_a_gate_with_no_direction_left_is_shut() -> None:
    _, network = gated()
    network.get_buffer("free_key").zero_()
    network.init_key(1, gram_matrix(draw(40, 16, seed=3)))
    assert int(network.key[1].count_nonzero()) == 0
    assert float(network.gate_weight(draw(3, 16), 1).abs().max().detach()) == 0


def test_whatever_is_trained_a_new_gate_is_shut_for_what_earlier_tasks_look_like() -> None:
    _, network = gated()
    with torch.no_grad():
        for name in LAYERS:
            network.get_buffer(f"free_{name}").copy_(torch.eye(len(network.get_buffer(f"free_{name}"))))
    network.start_adapter(0)
    network.begin_gate(0)
    read = draw(3, 16, seed=4) @ torch.diag(torch.tensor([1.0] * 2 + [0.0] * 14, dtype=torch.float64))
    network.init_key(0, gram_matrix(network.gate_inputs(read, 0)[-1].detach()))
    with torch.no_grad():
        for name in LAYERS:
            network.change[name].copy_(draw(*network.change[name].shape, seed=31))
    opened = network.gate_weight(read, 0).detach()
    network.finish_gate(0, [gram_matrix(one.detach()) for one in network.gate_inputs(read, 0)], 1.0)
    torch.testing.assert_close(network.gate_weight(read, 0).detach(), opened, rtol=0, atol=1e-12)
    network.start_adapter(1)
    network.begin_gate(1)
    other = draw(10, 16, seed=5)
    network.init_key(1, gram_matrix(network.gate_inputs(other, 1)[-1].detach()))
    optimizer = torch.optim.AdamW(network.change.values(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (1 - network.gate_weight(other, 1)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(network.gate_weight(read, 0).detach(), opened, rtol=0, atol=1e-12)
    assert float(network.gate_weight(read, 1).max().detach()) < 1e-5
    assert float(network.gate_weight(other, 1).mean().detach()) > 0.5


def test_the_loss_has_the_penalty_once_for_each_row_that_counts() -> None:
    method = made("gainlora", orthogonality_weight=0.7)
    learner = precise(method, task=2)
    method.before_task(learner, 2)
    rows = some(learner)
    rows["labels"][1] = -100
    plain = float(learner.cross_entropy(learner.network(rows), rows).detach())
    expected = plain + 6 * 0.7 * float(overlap_penalty(learner.network_as(GainNetwork).pool, 2).detach())
    assert float(method.loss(learner, learner.network, rows).detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("measure", ["paper", "released"])
def test_what_is_kept_free_is_what_the_gate_has_read(measure: str) -> None:
    method = made("gainlora", gate_hidden_size=5, threshold=0.6, threshold_formula=measure)
    learner = precise(method, task=0)
    method.before_task(learner, 0)
    network = learner.network_as(GainNetwork)
    with torch.no_grad():
        read = torch.cat([network.embed(learner.rows([item])) for item in learner.items(0)])
        inputs = [one.numpy().T for one in network.gate_inputs(read, 0)]
    method.after_task(learner, 0)
    for name, H in zip(LAYERS, inputs, strict=True):
        left, values, _ = np.linalg.svd(H if measure == "paper" else H @ H.T)
        many = 1 + int((np.cumsum(values**2) < 0.6 * (values**2).sum()).sum())
        expected = np.eye(len(H)) - left[:, :many] @ left[:, :many].T
        np.testing.assert_allclose(network.get_buffer(f"free_{name}").numpy(), expected, rtol=0, atol=1e-8)


def test_the_share_that_is_kept_free_grows_with_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From ε = 0.6 in the first task by (1 − ε)/T with each, of T = 3."""
    method, shares = made("gainlora", gate_hidden_size=5, threshold=0.6), []
    learner = precise(method, task=0)
    monkeypatch.setattr(GainNetwork, "finish_gate", lambda _self, _adapter, _squares, share: shares.append(share))
    for task in range(3):
        learner.network_as(GainNetwork).start_adapter(task)
        method.after_task(learner, task)
    assert shares == pytest.approx([0.6, 0.6 + 0.4 / 3, 0.6 + 0.8 / 3])


@pytest.mark.parametrize("measure, most", [("paper", 0.25), ("released", 0.35)])
def test_after_two_tasks_the_second_block_is_for_the_second_task(
    measure: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more so the more directions are kept of the first."""
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
    method = made("gainlora", gate_hidden_size=8, threshold=0.99, threshold_formula=measure)
    learner = make_learner(short(2), method, loaded(dropout=0.0), BUDGET, seed=1)
    network = run_stream(learner, method).learner.network_as(GainNetwork)
    with torch.no_grad():
        first, second = (network.weights(learner.rows(learner.items(task))) for task in (0, 1))
    assert first is not None
    assert second is not None
    assert float(first[:, 1].mean()) < most * float(second[:, 1].mean())
    assert float(first[:, 0].mean()) > 0.5


def test_a_threshold_over_one() -> None:
    with pytest.raises(UserError, match="threshold"):
        made("gainlora", threshold=1.5)
