"""N-LoRA against its formula, and what the penalty is for."""

import pytest
import torch
from torch import Tensor

from regard.continual.adapter_network import PoolNetwork
from regard.continual.methods.lora import NLoraConfig, l1_norm
from regard.errors import UserError
from tests.continual.methods.adapter_networks import gradients, learnt, made, precise, some


def product(one: Tensor, other: Tensor) -> list[list[float]]:
    """The product of two matrices, entry by entry."""
    left, right = one.tolist(), other.T.tolist()
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in right] for row in left]


def by_hand(network: PoolNetwork, block: int, *, released: bool) -> float:
    """The sum of the sizes of the entries."""
    total = 0.0
    for blocks in network.pool.adapters:
        pair = (blocks.A[block], blocks.B[block]) if released else (blocks.B[block], blocks.A[block])
        total += sum(abs(entry) for row in product(*pair) for entry in row)
    return total


@pytest.mark.parametrize("released", [False, True])
def test_the_size_of_a_block_is_the_sum_over_the_entries_of_its_product(released: bool) -> None:
    network = precise(made("n-lora")).network_as(PoolNetwork)
    found = float(l1_norm(network.pool, 1, released=released).detach())
    assert found == pytest.approx(by_hand(network, 1, released=released), rel=1e-12)


@pytest.mark.parametrize("product_", ["update", "released"])
def test_the_loss_has_the_penalty_once_for_each_row_that_counts(product_: str) -> None:
    method = made("n-lora", sparsity_weight=0.3, penalized_product=product_)
    learner = precise(method, task=1)
    method.before_task(learner, 1)
    rows = some(learner)
    rows["labels"][2:4] = -100
    plain = float(learner.cross_entropy(learner.network(rows), rows).detach())
    expected = plain + 5 * 0.3 * by_hand(learner.network_as(PoolNetwork), 1, released=product_ == "released")
    assert float(method.loss(learner, learner.network, rows).detach()) == pytest.approx(expected, rel=1e-12)


def test_the_penalty_moves_the_new_block_alone() -> None:
    method = made("n-lora")
    learner = precise(method)
    method.before_task(learner, 1)
    found = gradients(learner, l1_norm(learner.network_as(PoolNetwork).pool, 1))
    assert {name.rsplit(".adapters.")[1] for name in found} == {"A.1", "B.1"}


def collisions(network: PoolNetwork) -> float:
    """The share of weights that both blocks change by more than a thousandth."""
    both = []
    for blocks in network.pool.adapters:
        one, other = (blocks.delta(number).abs() for number in (0, 1))
        both.append((one > 1e-3) & (other > 1e-3))
    return float(torch.cat(both).double().mean())


def test_blocks_collide_less_than_without_the_penalty() -> None:
    loose, tight = (
        collisions(learnt("n-lora", sparsity_weight=one)[0].learner.network_as(PoolNetwork)) for one in (0.0, 0.1)
    )
    assert loose > 0.2
    assert tight < 0.7 * loose


def test_the_released_product_needs_layers_that_give_as_much_as_they_read() -> None:
    said = {"penalized_product": "released", "target_modules": "intermediate.dense"}
    method = made("n-lora", **said)
    with pytest.raises(
        UserError, match=r"penalized_product: expected update, since .*intermediate\.dense gives another number"
    ):
        precise(method)
    precise(made("n-lora", target_modules="intermediate.dense"))


@pytest.mark.parametrize("said", [{"sparsity_weight": -1}, {"penalized_product": "sum"}])
def test_settings_that_cannot_be(said: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(said))}: expected"):
        NLoraConfig.parse(said)
