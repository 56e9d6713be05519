"""Opening the gate: what is minimised, and what comes of it."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from regard.adapters.attention import SharedAttention
from regard.adapters.router_warmup import PastTask, _PastRows, divergences, warm_up_router
from regard.errors import UserError


def attention(blocks: int) -> SharedAttention:
    found = SharedAttention(8, hidden_size=6, seed=1)
    found.use(blocks)
    found.set_trainable(blocks - 1)
    return found


def vectors(around: float, rows: int = 20) -> torch.Tensor:
    random = torch.Generator().manual_seed(int(10 * around) + 50)
    return torch.randn(rows, 8, generator=random) * 0.3 + around * torch.tensor([1.0, -1.0] * 4)


def test_what_is_minimised_counts_each_task_the_same() -> None:
    gate, own, old = attention(3), vectors(1.0), [vectors(-1.0, 5), vectors(0.0, 7)]
    targets = [torch.tensor([1.0]), torch.tensor([0.2, 0.8])]
    expected = -sum(math.log(row[2]) for row in gate(own).tolist()) / 20
    expected += sum(-math.log(row[0]) for row in gate(old[0]).tolist()) / 5
    for row in gate(old[1]).tolist():
        expected += (0.2 * math.log(0.2 / row[0]) + 0.8 * math.log(0.8 / row[1])) / 7
    earlier = [PastTask(*one) for one in zip(targets, old, strict=True)]
    assert warm_up_router(gate, own, earlier, steps=1, rate=1e-3) == pytest.approx(expected, rel=1e-5)


def test_the_rate_rises_and_then_falls_to_nothing() -> None:
    """Of five steps two are the warm-up: the rates are 1/2, 4/5, 3/5, 2/5 and 1/5 of the highest."""
    gate = attention(2).double()
    expected, rows = copy.deepcopy(gate), vectors(1.0).double()
    optimizer = torch.optim.AdamW([one for one in expected.parameters() if one.requires_grad], weight_decay=0.0)
    for rate in (5e-3, 8e-3, 6e-3, 4e-3, 2e-3):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (-expected(rows)[:, 1].log().mean()).backward()
        optimizer.step()
    warm_up_router(gate, rows, [], steps=5, rate=1e-2, warmup=0.4)
    for name, value in expected.state_dict().items():
        assert_close(gate.state_dict()[name], value, rtol=1e-9, atol=1e-9)


def test_a_new_task_is_known_and_the_earlier_ones_still_are() -> None:
    gate = attention(1)
    earlier = [PastTask(torch.tensor([1.0]), vectors(-1.0))]
    gate.use(2)
    gate.set_trainable(1)
    key, before = gate.keys[0].detach().clone(), gate.down.detach().clone()
    loss = warm_up_router(gate, vectors(1.0), earlier, steps=200, rate=5e-3)
    assert loss < 0.2
    assert gate(vectors(1.0, 9))[:, 1].min() > 0.8
    assert gate(vectors(-1.0, 9))[:, 0].min() > 0.8
    assert torch.equal(gate.keys[0], key)
    assert not torch.equal(gate.down, before)
    assert all(one.grad is None for one in gate.parameters())


@pytest.mark.exhaustive
def test_without_the_earlier_ones_they_are_forgotten() -> None:
    gate = attention(2)
    earlier = [PastTask(torch.tensor([1.0]), vectors(0.5))]
    warm_up_router(gate, vectors(1.0), [], steps=200, rate=5e-3)
    assert gate(vectors(0.5))[:, 1].mean() > 0.5
    assert divergences(gate, earlier)[0] > 0.5


def test_it_is_a_function_of_its_seed() -> None:
    def opened(seed: int) -> torch.Tensor:
        gate = attention(2)
        warm_up_router(
            gate, vectors(1.0, 200), [PastTask(torch.tensor([1.0]), vectors(-1.0))], steps=5, rate=1e-2, seed=seed
        )
        return gate.keys[1].detach()

    assert torch.equal(opened(1), opened(1))
    assert not torch.equal(opened(1), opened(2))


def test_what_is_opened_is_the_open_block() -> None:
    """Not the newest, whose key is frozen."""
    gate = attention(2)
    gate.set_trainable(0)
    warm_up_router(gate, vectors(1.0), [], steps=100, rate=5e-3)
    assert gate(vectors(1.0))[:, 0].min() > 0.8


def test_without_an_open_block_or_a_row_nothing_is_opened() -> None:
    gate = attention(2)
    with pytest.raises(UserError, match="vectors: expected at least one of the task's rows, got none"):
        warm_up_router(gate, vectors(1.0)[:0], [], steps=1, rate=5e-3)
    gate.set_trainable(None)
    with pytest.raises(UserError, match="attention: expected one with an open adapter, got none"):
        warm_up_router(gate, vectors(1.0), [], steps=1, rate=5e-3)


def test_no_steps_change_nothing() -> None:
    gate = attention(2)
    before = {name: value.clone() for name, value in gate.state_dict().items()}
    assert warm_up_router(gate, vectors(1.0), [], steps=0, rate=1.0) == 0
    assert all(torch.equal(value, before[name]) for name, value in gate.state_dict().items())


def test_a_step_sees_as_many_rows_however_many_tasks_there_are_and_each_task_counts_the_same() -> None:
    gate = attention(3)
    earlier = [
        PastTask(torch.tensor([1.0]), vectors(-1.0, 300)),
        PastTask(torch.tensor([0.2, 0.8]), vectors(0.0, 10)),
        PastTask(torch.tensor([0.5, 0.5]), vectors(1.0, 60)),
    ]
    rows, generator = _PastRows.of(earlier, 3), torch.Generator().manual_seed(0)
    assert rows.sample(400, generator) is rows
    with torch.no_grad():
        assert_close(rows.losses(gate).sum(), divergences(gate, earlier).sum())
        sampled = [rows.sample(64, generator) for _ in range(200)]
        assert {len(one.vectors) for one in sampled} == {64}
        mean = sum(float(one.losses(gate).sum()) for one in sampled) / 200
        assert mean == pytest.approx(float(divergences(gate, earlier).sum()), rel=0.03)
