"""The training loop against a plain one, and what it tells of bad batches."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.training.loop import Trained, train
from regard.training.plan import Plan

WIDTH = 6


class Net(nn.Module):
    """Two layers, with or without dropout; rows of numbers, of which some count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 8)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.norm(self.dropout(self.inner(values).tanh())))


def net(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net(dropout).to(dtype)


def batch(step: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Rows with unequal numbers of places that count, none in some."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(rows, 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    counted = torch.rand(rows, 4, generator=generator) < torch.arange(rows)[:, None] / rows
    counted[-1, 0] = True
    return {"values": values, "counted": counted}


def loss(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
    wrong = (model(rows["values"]) - rows["values"].roll(1, -1)).square().mean(-1)
    return (wrong * rows["counted"]).sum()


def count(rows: Mapping[str, Tensor]) -> int:
    return int(rows["counted"].sum())


def trained(model: nn.Module, plan: Plan, **options: Any) -> Trained:
    given: dict[str, Any] = {"batch": batch, "loss": loss, "count": count, "device": "cpu"} | options
    return train(model, plan, **given)


PLAN = Plan(steps=12, batch_size=8, learning_rate=0.02, schedule="cosine", warmup_steps=3, log_every=4, clip=0.5)


def by_hand(model: nn.Module, plan: Plan, rate: Callable[[int], float]) -> list[tuple[float, float]]:
    """Loss and norm of every step, the model trained with PyTorch alone."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=plan.betas, eps=plan.adam_epsilon, weight_decay=plan.weight_decay, fused=False
    )
    found = []
    for step in range(plan.steps):
        optimizer.param_groups[0]["lr"] = rate(step + 1)
        rows = batch(step)
        mean = loss(model, rows) / count(rows)
        optimizer.zero_grad()
        mean.backward()
        norm = math.sqrt(sum(float(one.grad.square().sum()) for one in model.parameters() if one.grad is not None))
        for one in model.parameters():
            assert one.grad is not None
            one.grad *= min(1.0, plan.clip / (norm + 1e-6)) if plan.clip else 1.0
        optimizer.step()
        found.append((float(mean.detach()), norm))
    return found


def rate_of_plan(number: int) -> float:
    """Warm-up over three steps, then half a cosine from 0.02 to a tenth of it."""
    if number <= 3:
        return 0.02 * number / 3
    return 0.002 + 0.018 * (1 + math.cos(math.pi * (number - 3) / 9)) / 2


def test_it_is_the_plain_loop() -> None:
    model, plain = net(), net()
    expected = by_hand(plain, PLAN, rate_of_plan)
    result = trained(model, PLAN)
    assert [row["step"] for row in result.history] == [4, 8, 12]
    for row in result.history:
        mean, norm = expected[int(row["step"]) - 1]
        assert row["loss"] == pytest.approx(mean, rel=1e-12)
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-12)
        assert row["learning_rate"] == pytest.approx(rate_of_plan(int(row["step"])), rel=1e-12)
        assert row["items"] == sum(count(batch(step)) for step in range(int(row["step"])))
    assert max(norm for _, norm in expected) > 0.5, "clipping was never needed"
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_micro_batches_do_not_matter(size: int) -> None:
    whole, split = net(), net()
    first = trained(whole, PLAN)
    second = trained(split, Plan(**{**PLAN.to_dict(), "micro_batch": size}))
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert [row["loss"] for row in first.history] == pytest.approx([row["loss"] for row in second.history], rel=1e-12)
