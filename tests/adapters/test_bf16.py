"""A base in bfloat16, and autocast: near float32, with gradients and files in the type of the adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.shared import SharedAdapters
from tests.adapters.model_families import fill, loss_of, made, rows

BF16, FLOAT = torch.bfloat16, torch.float32


def taught(base: torch.dtype, own: torch.dtype, family: str = "llama", **options: Any) -> SharedAdapters:
    adapters = SharedAdapters(made(family).to(base), r=4, **options)
    for number in range(3):
        adapters.add_adapter(f"task{number}")
        batch = {name: value for name, value in rows(family, 9, seed=20 + number).items() if "decoder" not in name}
        adapters.fit_router(f"task{number}", [batch])
    fill(adapters)
    for part in adapters.pool.adapters:
        part.to(own)
    return adapters


def step(adapters: SharedAdapters, family: str, *, autocast: bool = False) -> tuple[float, list[Tensor]]:
    with torch.autocast("cpu", BF16, enabled=autocast):
        loss = loss_of(adapters, family)
    trained = [parameter for parameter in adapters.parameters() if parameter.requires_grad]
    return float(loss.detach()), list(torch.autograd.grad(loss, trained))


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("base, own, autocast", [(BF16, FLOAT, False), (BF16, BF16, False), (FLOAT, FLOAT, True)])
def test_losses_and_gradients_are_near_those_of_float32(
    family: str, base: torch.dtype, own: torch.dtype, autocast: bool
) -> None:
    adapters = taught(base, own, family)
    expected, gradients = step(taught(FLOAT, FLOAT, family), family)
    loss, found = step(adapters, family, autocast=autocast)
    assert abs(loss - expected) < 0.02
    assert {gradient.dtype for gradient in found} == {own}
    actual, wanted = (torch.cat([gradient.float().flatten() for gradient in each]) for each in (found, gradients))
    error = float(torch.dist(actual, wanted) / wanted.norm())
    assert 0 < error < (0.1 if own is FLOAT else 0.2)


def test_what_the_router_knows_stays_in_float32() -> None:
    adapters = taught(BF16, FLOAT).to(BF16)
    known = [adapters.router.means, adapters.router.scatter, adapters.router.num_rows]
    assert {value.dtype for value in known} == {FLOAT}
    assert not torch.equal(adapters.router.means, adapters.router.means.to(BF16).float())
    adapters.fit_router("task0", [rows("llama", 9, seed=3)])
    assert adapters.routing_weights(**rows("llama")).dtype == FLOAT


@pytest.mark.parametrize("own", [BF16, FLOAT])
def test_adapters_on_a_base_in_bfloat16_are_saved_and_loaded_as_they_are(own: torch.dtype, tmp_path: Path) -> None:
    adapters, batch = taught(BF16, own), rows("llama")
    adapters.save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained(made("llama").to(BF16), tmp_path / "saved")
    for part, other in zip(loaded.pool.adapters, adapters.pool.adapters, strict=True):
        part.to(own)
        assert all(torch.equal(a, b) for a, b in zip(part.parameters(), other.parameters(), strict=True))
    adapters.freeze()
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, adapters(**batch).logits)


@pytest.mark.parametrize("own", [BF16, FLOAT])
def test_merging_into_a_base_in_bfloat16_is_near_the_adapter_alone(own: torch.dtype) -> None:
    adapters, batch = taught(BF16, own), rows("llama")
    with torch.no_grad():
        with adapters.use_only("task1"):
            alone = adapters(**batch).logits
        with adapters.use_weights(None):
            before = adapters(**batch).logits
        adapters.merge("task1")
        with adapters.use_weights(None):
            merged = adapters(**batch).logits
    assert merged.dtype == BF16
    assert (merged - alone).norm() < 0.05 * (alone - before).norm()


@pytest.mark.exhaustive
def test_a_task_is_learnt_on_a_base_in_bfloat16_as_on_one_in_float32() -> None:
    batch, losses = rows("llama", 9), {}
    for base in (BF16, FLOAT):
        adapters = SharedAdapters(made("llama").to(base), r=4)
        fit = adapters.fit_task("one", [{**batch, "labels": batch["input_ids"]}], epochs=12, learning_rate=0.02)
        assert {parameter.dtype for parameter in adapters.pool.parameters_of(0)} == {FLOAT}
        losses[base] = fit.losses[-1]
        assert losses[base] < fit.losses[0] - 0.05
    assert abs(losses[BF16] - losses[FLOAT]) < 0.02
