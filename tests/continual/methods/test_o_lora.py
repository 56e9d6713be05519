"""O-LoRA against its formula, and what the penalty is for."""

import pytest
import torch

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora import OLoraConfig, overlap_penalty
from regard.errors import UserError
from tests.continual.methods.adapter_networks import gradients, learnt, made, precise, some


def by_hand(learner: Learner, block: int, power: int) -> float:
    """Σ |a · b|^power over every row a of an earlier block and every row b of this one."""
    total = 0.0
    for blocks in learner.network_as(PoolNetwork).pool.adapters:
        for earlier in range(block):
            for a in blocks.A[earlier].tolist():
                for b in blocks.A[block].tolist():
                    total += abs(sum(x * y for x, y in zip(a, b, strict=True))) ** power
    return total


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("block", [1, 2])
def test_the_overlap_is_that_of_each_pair_of_rows(block: int, squared: bool) -> None:
    learner = precise(made("o-lora"))
    found = overlap_penalty(learner.network_as(PoolNetwork).pool, block, squared=squared)
    assert float(found.detach()) == pytest.approx(by_hand(learner, block, 2 if squared else 1), rel=1e-12)


def test_the_loss_has_the_penalty_once_for_each_row_that_counts() -> None:
    method = made("o-lora", orthogonality_weight=0.7, norm_weight=0.2)
    learner = precise(method, task=2)
    method.before_task(learner, 2)
    rows = some(learner)
    rows["labels"][1] = -100
    plain = learner.cross_entropy(learner.network(rows), rows)
    trained = learner.network_as(PoolNetwork).pool.parameters_of(2)
    norms = sum(float(one.detach().square().sum()) ** 0.5 for one in trained)
    expected = float(plain.detach()) + 6 * (0.7 * by_hand(learner, 2, 1) + 0.2 * norms)
    assert float(method.loss(learner, learner.network, rows).detach()) == pytest.approx(expected, rel=1e-12)


def test_the_first_task_has_nothing_to_be_orthogonal_to() -> None:
    method = made("o-lora")
    learner = precise(method, task=0)
    method.before_task(learner, 0)
    rows = some(learner)
    assert torch.equal(method.loss(learner, learner.network, rows), learner.cross_entropy(learner.network(rows), rows))


def test_the_penalty_moves_the_new_block_alone_and_makes_it_more_orthogonal() -> None:
    method = made("o-lora")
    learner = precise(method)
    method.before_task(learner, 1)
    pool = learner.network_as(PoolNetwork).pool
    before = overlap_penalty(pool, 1)
    found = gradients(learner, before)
    assert {name.rsplit(".adapters.")[1] for name in found} == {"A.1"}
    named = dict(learner.network.named_parameters())
    with torch.no_grad():
        for name, gradient in found.items():
            named[name] -= 1e-3 * gradient
        assert overlap_penalty(pool, 1) < before


def test_blocks_end_up_closer_to_orthogonal_than_without_the_penalty() -> None:
    found = []
    for strength in (0.0, 0.5):
        ran, _ = learnt("o-lora", orthogonality_weight=strength)
        found.append(float(overlap_penalty(ran.learner.network_as(PoolNetwork).pool, 1).detach()))
    assert found[1] < 0.8 * found[0]


@pytest.mark.parametrize("name", ["orthogonality_weight", "norm_weight"])
def test_settings_that_cannot_be(name: str) -> None:
    assert (OLoraConfig().orthogonality_weight, OLoraConfig().norm_weight) == (0.5, 0.0)
    with pytest.raises(UserError, match=f"{name}: expected a number"):
        OLoraConfig.parse({name: -1})
