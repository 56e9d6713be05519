"""Soft prompts and what re-parametrises them, against plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.prompt_adapters import PromptAdapters
from regard.errors import UserError

WIDTH, LENGTH = 8, 3


def blocks(**options: Any) -> PromptAdapters:
    with torch.random.fork_rng(devices=[]):
        made = PromptAdapters(WIDTH, LENGTH, 6, **options).double()
    made.reserve(3)
    return made.double()


# -- blocks -----------------------------------------------------------------------------------------------


def mapped(made: PromptAdapters, plain: Tensor) -> Tensor:
    """MLP(P), written out."""
    parts: Any = made.mlp
    down, _, up, norm = parts
    hidden = (plain @ down.weight.T + down.bias).clamp(min=0)
    out = hidden @ up.weight.T + up.bias
    centred = out - out.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / spread * norm.weight + norm.bias


@pytest.mark.parametrize("residual", [True, False])
def test_an_open_prompt_is_the_mlp_of_it_and_itself(residual: bool) -> None:
    made = blocks(residual=residual)
    made.set_trainable(1)
    plain = made.P[1].detach()
    expected = mapped(made, plain) + residual * plain
    torch.testing.assert_close(made.prompt(1), expected)
    assert torch.equal(made.prompt(0), made.P[0])
    assert made.trained == (1,)


def test_a_prompt_that_is_folded_is_what_it_was_and_needs_no_mlp() -> None:
    made = blocks()
    made.set_trainable(0)
    before = made.prompt(0).detach().clone()
    assert not torch.equal(before, made.P[0])
    made.fold()
    assert torch.equal(made.P[0], before)
    assert made.trained == ()
    made.mlp = None
    assert torch.equal(made.prompt(0), before)


def test_opening_the_next_folds_the_one_before_also_out_of_what_was_saved() -> None:
    made, other = blocks(), blocks()
    made.set_trainable(0)
    with torch.no_grad():
        for one in made.parameters():
            one.add_(torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view_as(one))
    before = made.prompt(0).detach().clone()
    other.load_state_dict(made.state_dict())
    for either in (made, other):
        either.set_trainable(1)
        assert torch.equal(either.prompt(0), before)
        assert not either.P[0].requires_grad
    assert torch.equal(made.prompt(1), other.prompt(1))


def test_opening_what_is_open_changes_nothing() -> None:
    made = blocks()
    made.set_trainable(0)
    parts: Any = made.mlp
    with torch.no_grad():
        parts[0].weight.add_(1.0)
    before = made.prompt(0).detach().clone()
    made.set_trainable(0)
    assert torch.equal(made.prompt(0), before)


@pytest.mark.parametrize("residual", [True, False])
def test_a_prompt_that_is_opened_again_is_what_it_was_and_is_trained_further(residual: bool) -> None:
    made = blocks(residual=residual)
    made.set_trainable(0)
    with torch.no_grad():
        made.P[0].add_(1.0)
    before = made.prompt(0).detach().clone()
    made.set_trainable(1)
    other = made.prompt(1).detach().clone()
    made.set_trainable(0, 1)
    torch.testing.assert_close(made.prompt(0), before)
    torch.testing.assert_close(made.prompt(1), other)
    assert made.trained == (0, 1)
    made.prompt(0).square().sum().backward()
    assert float(made.P[0].grad.abs().sum()) > 0
    with torch.no_grad():
        for one in made.parameters():
            if one.grad is not None:
                one.sub_(0.01 * one.grad)
    assert made.prompt(0).square().sum() < before.square().sum()
    moved = made.prompt(0).detach().clone()
    made.set_trainable(0)
    torch.testing.assert_close(made.prompt(0), moved)
    made.delete(1)
    assert made.folded.tolist() == [True, False]


def test_prompts_are_drawn_by_seed_and_number_and_begin_as_words() -> None:
    words = torch.arange(5.0)[:, None].expand(5, WIDTH)
    one, other = PromptAdapters(WIDTH, 4, 0, words=words), PromptAdapters(WIDTH, 4, 0, words=words)
    one.reserve(3)
    other.reserve(1)
    other.reserve(3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one.P, other.P, strict=True))
    assert all(len(row.unique()) == 1 for row in one.P[1])
    assert not torch.equal(one.P[0], one.P[1])
    changed = PromptAdapters(WIDTH, 4, 0, words=words, seed=1)
    changed.reserve(1)
    assert not torch.equal(changed.P[0], one.P[0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_mix_is_the_weighed_sum(count: int) -> None:
    made = blocks()
    made.set_trainable(0)
    weights = torch.rand(4, count, dtype=torch.float64)
    found = made.mix(weights)
    for row in range(4):
        expected = sum(weights[row, block] * made.prompt(block) for block in range(count))
        torch.testing.assert_close(found[row], expected)
    assert made.mix(weights[0]).shape == (1, LENGTH, WIDTH)


def test_the_next_block_moves_up_where_one_is_dropped() -> None:
    made = blocks()
    made.set_trainable(2)
    before = [made.prompt(number).detach().clone() for number in range(3)]
    made.delete(1)
    assert len(made) == 2
    assert torch.equal(made.prompt(0), before[0])
    assert torch.equal(made.prompt(1), before[2])
    assert made.trained == (1,)


def test_without_an_mlp_prompts_are_themselves() -> None:
    made = PromptAdapters(WIDTH, LENGTH, 0)
    made.reserve(1)
    made.set_trainable(0)
    assert torch.equal(made.prompt(0), made.P[0])
    assert made.P[0].requires_grad
    assert made.P[0].abs().max() <= 0.5


def test_blocks_that_cannot_be() -> None:
    with pytest.raises(UserError, match="length: expected a whole number of at least 1, got 0"):
        PromptAdapters(WIDTH, 0)
    with pytest.raises(UserError, match="hidden: expected a whole number of at least 0, got True"):
        PromptAdapters(WIDTH, 1, True)
    with pytest.raises(UserError, match="weights: expected one for each of at most 3 adapters, got 4"):
        blocks().mix(torch.ones(4))
