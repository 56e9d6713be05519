"""InfLoRA: its A and its memory against the papers' procedure on the inputs themselves, and what they are for."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.inflora import (
    InfLoraConfig,
    InputSubspace,
    apply_formula,
    compute_second_moments,
    decompose_outside,
    design_down,
    grow_subspace,
)
from regard.continual.run import run_stream
from regard.continual.run_state import restore_state, save
from regard.errors import UserError
from tests.continual.methods.adapter_networks import fill, learnt, made, moved, of_block, precise


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment(inputs: Tensor) -> Tensor:
    """Σ x xᵀ of inputs (feature, token)."""
    return inputs @ inputs.T


def spanned(basis: Tensor) -> Tensor:
    """The projection on what an orthonormal basis spans."""
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype), rtol=0, atol=1e-10)
    return basis @ basis.T


# -- by hand ----------------------------------------------------------------------------------------------

HAND = torch.diag(torch.tensor([1.0, 3.0, 2.0, 0.0], dtype=torch.float64)).square()
"""Inputs along the axes, with squares of 1, 9, 4 and 0 out of 14."""


def axes(*numbers: int) -> Tensor:
    return torch.eye(4, dtype=torch.float64)[:, list(numbers)]


def test_without_a_memory_a_block_reads_the_largest_directions_first() -> None:
    expected = torch.stack([axes(1)[:, 0], axes(2)[:, 0]]) / math.sqrt(3)
    torch.testing.assert_close(design_down(HAND, None, 2), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory", [InputSubspace(axes(1), False), InputSubspace(axes(0, 2, 3), True)])
def test_a_block_reads_nothing_of_the_memory_and_is_smaller_where_no_more_is_left(memory: InputSubspace) -> None:
    found = design_down(HAND, memory, 3)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[0, 2] = expected[1, 0] = 1 / math.sqrt(3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "share, taken", [(0.0, []), (0.5, [1]), (9 / 14 - 1e-9, [1]), (9 / 14 + 1e-9, [1, 2]), (0.92, [1, 2])]
)
def test_a_first_memory_is_as_small_as_the_share_allows(share: float, taken: list[int]) -> None:
    found = grow_subspace(None, HAND, share)
    assert not found.free
    torch.testing.assert_close(spanned(found.basis), spanned(axes(*taken)), rtol=0, atol=1e-12)


def test_as_released_large_directions_weigh_more() -> None:
    """Of 81 + 16 + 1 the first two have 97, of 9 + 4 + 1 they have 13."""
    found = grow_subspace(None, apply_formula(HAND, "released"), 97 / 98 - 1e-9)
    torch.testing.assert_close(spanned(found.basis), spanned(axes(1, 2)), rtol=0, atol=1e-12)
    assert grow_subspace(None, HAND, 97 / 98 - 1e-9).free
    assert apply_formula(HAND, "paper") is HAND


def test_a_memory_of_more_than_half_the_directions_stores_the_others() -> None:
    for share in (0.99, 1.0):
        found = grow_subspace(None, HAND, share)
        assert found.free
        torch.testing.assert_close(found.complement_projection(), spanned(axes(3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("before", [InputSubspace(axes(0), False), InputSubspace(axes(1, 2, 3), True)])
def test_a_memory_grows_by_what_it_lacks_of_the_new_inputs(before: InputSubspace) -> None:
    have = 1 / 14
    assert torch.equal(grow_subspace(before, HAND, have - 1e-9).complement_projection(), before.complement_projection())
    found = grow_subspace(before, HAND, have + 1e-9)
    torch.testing.assert_close(found.complement_projection(), spanned(axes(2, 3)), rtol=0, atol=1e-12)


# -- the papers' procedure, by singular values of the inputs ----------------------------------------------


def with_singular_values(taken: Tensor, inputs: Tensor, share: float) -> Tensor:
    """The memory (feature, direction) after one more task, by the inputs' own singular vectors."""
    left = inputs - taken @ (taken.T @ inputs)
    vectors, values, _ = torch.linalg.svd(left, full_matrices=False)
    whole = float(inputs.square().sum())
    have, more = float((taken.T @ inputs).square().sum()), 0
    while have < share * whole:
        have += float(values[more]) ** 2
        more += 1
    return torch.cat([taken, vectors[:, :more]], 1)


def test_memories_and_blocks_of_a_series_of_tasks_are_those_of_singular_values() -> None:
    taken, memory, kinds = drawn(12, 0), None, set()
    scales = torch.linspace(0.2, 2, 12, dtype=torch.float64)
    for task, share in enumerate((0.6, 0.7, 0.8, 0.9)):
        turn = torch.linalg.qr(drawn(12, 12, seed=50 + task)).Q
        inputs = turn @ (scales[:, None] * drawn(12, 40, seed=task))
        left = inputs - taken @ (taken.T @ inputs)
        vectors = torch.linalg.svd(left, full_matrices=False).U[:, :2].T / math.sqrt(3)
        found = design_down(moment(inputs), memory, 2)
        signs = (found * vectors).sum(1, keepdim=True).sign()
        torch.testing.assert_close(found, signs * vectors, rtol=0, atol=1e-9)
        assert (found.gather(1, found.abs().argmax(1, keepdim=True)) > 0).all()
        taken, memory = with_singular_values(taken, inputs, share), grow_subspace(memory, moment(inputs), share)
        within = torch.eye(12, dtype=torch.float64) - memory.complement_projection()
        torch.testing.assert_close(within, spanned(taken), rtol=0, atol=1e-9)
        assert memory.basis.shape[1] <= 6
        kinds.add(memory.free)
    assert kinds == {False, True}


def test_directions_outside_have_no_part_within_the_memory() -> None:
    memory = grow_subspace(None, moment(drawn(8, 30)), 0.5)
    squares, vectors = decompose_outside(moment(drawn(8, 3, seed=1)), memory)
    assert len(squares) == 3
    torch.testing.assert_close(memory.complement_projection() @ vectors, vectors, rtol=0, atol=1e-10)


# -- in a model -------------------------------------------------------------------------------------------


def read(learner: Learner, task: int) -> dict[str, Tensor]:
    """What each layer reads of a task's rows, (feature, token), a row at a time."""
    found: dict[str, list[Tensor]] = {}
    layers = learner.network_as(PoolNetwork).pool.layers
    handles = [
        layer.register_forward_pre_hook(
            lambda _, given, name=name: found.setdefault(name, []).append(given[0].flatten(0, -2).T)
        )
        for name, layer in layers.items()
    ]
    learner.network.eval()
    with torch.no_grad():
        for item in learner.items(task):
            learner.network(learner.rows([item]))
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


def test_moments_are_of_the_tokens_that_rows_have_by_themselves() -> None:
    method = made("inflora")
    learner = precise(method)
    method.before_task(learner, 1)
    for name, inputs in read(learner, 1).items():
        found = compute_second_moments(learner, learner.items(1))[name]
        torch.testing.assert_close(found, moment(inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("measure", ["paper", "released"])
def test_the_shares_grow_with_the_tasks(measure: str) -> None:
    """Of the squared singular values of the inputs H, or as released of those of H Hᵀ."""
    method = made("inflora", threshold=0.7, threshold_formula=measure)
    learner = precise(method)
    memories: dict[str, Tensor] = {}
    for task, share in enumerate((0.7, 0.8, 0.9)):
        method.after_task(learner, task)
        for name, inputs in read(learner, task).items():
            of = inputs if measure == "paper" else moment(inputs)
            taken = with_singular_values(memories.get(name, drawn(16, 0)), of, share)
            memories[name] = taken
            left = next(
                InputSubspace(value, key.startswith("free/"))
                for key, value in method.state.tensors.items()
                if key.endswith(name)
            ).complement_projection()
            torch.testing.assert_close(torch.eye(16, dtype=torch.float64) - left, spanned(taken), rtol=0, atol=1e-8)
    assert len(method.state.tensors) == len(memories)


def test_only_b_is_trained_and_a_is_as_it_was_designed() -> None:
    ran, after = learnt("inflora", tasks=3, threshold=0.5)
    for task, (before, behind) in enumerate(pairwise(after)):
        changed = moved(before, behind) - {"count"}
        own = of_block(changed, task)
        assert {name.rsplit(".", 2)[1] for name in own} == {"A", "B"}
        assert all(name.startswith("classifier.head.") for name in changed - own)
    assert not any(
        one.requires_grad for blocks in ran.learner.network_as(PoolNetwork).pool.adapters for one in blocks.A
    )
    assert all(blocks.B[2].requires_grad for blocks in ran.learner.network_as(PoolNetwork).pool.adapters)


def test_a_later_block_answers_nothing_to_what_the_memory_has() -> None:
    method = made("inflora", threshold=0.6, threshold_formula="paper")
    learner = precise(method)
    method.before_task(learner, 0)
    method.after_task(learner, 0)
    memories = {
        name: grow_subspace(None, one, 0.6) for name, one in compute_second_moments(learner, learner.items(0)).items()
    }
    method.before_task(learner, 1)
    for name, layer in learner.network_as(PoolNetwork).pool.layers.items():
        down = layer.adapters.A[1]
        within = torch.eye(16, dtype=torch.float64) - memories[name].complement_projection()
        assert float(down.norm()) == pytest.approx(math.sqrt(2 / 3))
        assert float((layer.adapters.delta(1) @ within).norm()) < 1e-10 < float(layer.adapters.delta(1).norm())
        assert float((layer.adapters.delta(0) @ within).norm()) > 1e-2


def test_when_all_is_kept_later_tasks_change_no_answer_to_the_first() -> None:
    method = made("inflora", threshold=1.0)
    learner = precise(method, tasks=2, task=0)
    method.before_task(learner, 0)
    few = learner.items(0)[:1]
    memories = {name: grow_subspace(None, one, 1.0) for name, one in compute_second_moments(learner, few).items()}
    for name, memory in memories.items():
        method.state.tensors[("free/" if memory.free else "taken/") + name] = memory.basis
    rows = learner.rows(few)
    learner.network.eval()
    with torch.no_grad():
        before = learner.network(rows)
        method.before_task(learner, 1)
        fill_b(learner)
        after, others = learner.network(rows), learner.network(learner.rows(learner.items(1)))
        learner.network_as(PoolNetwork).count.fill_(1)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
        assert (others - learner.network(learner.rows(learner.items(1)))).abs().max() > 1e-3


def fill_b(learner: Learner) -> None:
    """Draw B of the second block."""
    with torch.no_grad():
        for place, blocks in enumerate(learner.network_as(PoolNetwork).pool.adapters):
            blocks.B[1].copy_(drawn(*blocks.B[1].shape, seed=place))


def test_a_memory_without_directions_left_is_saved_and_restored(tmp_path: Path) -> None:
    method = made("inflora")
    learner = precise(method)
    method.state.tensors["free/empty"] = drawn(4, 0)
    save(tmp_path, 1, learner.network, method.state, {"identity": {}})
    restored = restore_state(tmp_path, learner.network, {})
    assert restored is not None
    kept = restored[1]
    assert kept.tensors["free/empty"].shape == (4, 0)
    found = design_down(HAND, InputSubspace(kept.tensors["free/empty"], True), 2)
    assert torch.equal(found, torch.zeros(2, 4, dtype=torch.float64))
    assert grow_subspace(InputSubspace(drawn(4, 0), True), HAND, 1.0).basis.shape == (4, 0)


@pytest.mark.exhaustive
def test_a_run_in_which_nothing_is_left_ends() -> None:
    method = made("inflora", threshold=1.0)
    learner = precise(method, tasks=2, task=0)
    fill(learner.network_as(PoolNetwork), size=0.0)
    ran = run_stream(learner, method)
    assert not any(blocks.A[1].any() for blocks in ran.learner.network_as(PoolNetwork).pool.adapters)
    assert not any(blocks.B[1].any() for blocks in ran.learner.network_as(PoolNetwork).pool.adapters)


def test_settings_that_cannot_be() -> None:
    assert (InfLoraConfig().threshold, InfLoraConfig().threshold_formula) == (0.995, "released")
    with pytest.raises(UserError, match="threshold_formula: expected one of released, paper, got 'both'"):
        InfLoraConfig.parse({"threshold_formula": "both"})
    with pytest.raises(UserError, match="threshold: expected a number of at least 0 and at most 1"):
        InfLoraConfig.parse({"threshold": 1.5})
