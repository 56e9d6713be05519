"""Targets, divergences and densities against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.adapters.reflection import Density, divergence, target_of


def written_out(target: list[float], scores: list[list[float]]) -> float:
    """KL([ā, 0…0] ‖ a), the mean over rows, sum by sum."""
    total = 0.0
    for row in scores:
        whole = sum(math.exp(value) for value in row)
        for share, value in zip(target, row, strict=False):
            if share > 0:
                total += share * (math.log(share) - math.log(math.exp(value) / whole))
    return total / len(scores)


@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), old=st.integers(1, 4), new=st.integers(0, 3))
def test_the_divergence_is_its_definition(seed: int, rows: int, old: int, new: int) -> None:
    random = torch.Generator().manual_seed(seed)
    target = torch.rand(old, generator=random, dtype=torch.float64)
    target = target / target.sum()
    scores = torch.randn(rows, old + new, generator=random, dtype=torch.float64)
    expected = written_out(target.tolist(), scores.tolist())
    assert float(divergence(target, scores)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_target_may_have_shares_of_nothing() -> None:
    target, scores = torch.tensor([1.0, 0.0]), torch.zeros(3, 3, requires_grad=True)
    found = divergence(target, scores)
    assert float(found.detach()) == pytest.approx(math.log(3))
    (gradient,) = torch.autograd.grad(found, scores)
    assert torch.allclose(gradient.sum(0), torch.tensor([1 / 3 - 1, 1 / 3, 1 / 3]))


def test_where_the_weights_are_the_target_nothing_pulls() -> None:
    scores = torch.tensor([[0.3, -1.0]], dtype=torch.float64, requires_grad=True)
    found = divergence(scores.detach().softmax(-1)[0], scores)
    (gradient,) = torch.autograd.grad(found, scores)
    assert float(found.detach()) == pytest.approx(0, abs=1e-12)
    assert torch.allclose(gradient, torch.zeros_like(gradient), atol=1e-12)


def test_a_batch_of_one_has_a_target_over_blocks() -> None:
    assert torch.equal(target_of(torch.tensor([[0.25, 0.75]])), torch.tensor([0.25, 0.75]))
    mean = target_of(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    assert torch.allclose(mean, torch.tensor([1 / 3, 2 / 3]))


@pytest.mark.parametrize("directions", [0, 2, 6])
def test_a_density_has_the_moments_of_what_it_is_of(directions: int) -> None:
    random = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 6, generator=random, dtype=torch.float64)
    vectors = torch.randn(400, 6, generator=random, dtype=torch.float64) @ mixing + 3.0
    density = Density.of(vectors, directions)
    assert density.directions.shape == (directions, 6)
    assert torch.allclose(density.mean, vectors.mean(0))
    implied = density.directions.T @ density.directions + density.spread.square().diag()
    assert torch.allclose(implied.diagonal(), vectors.var(0), rtol=1e-9)
    if directions == 6:
        assert torch.allclose(implied, vectors.T.cov(), rtol=1e-6, atol=1e-8)
    drawn = density.draw(20000, seed=1)
    assert torch.allclose(drawn.mean(0), vectors.mean(0), atol=0.1)
    assert torch.allclose(drawn.var(0), vectors.var(0), rtol=0.06)


def test_draws_are_their_seeds_and_keep_no_row() -> None:
    vectors = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    density = Density.of(vectors, 3)
    first = density.draw(5, seed=7)
    assert torch.equal(first, density.draw(5, seed=7))
    assert not torch.equal(first, density.draw(5, seed=8))
    assert torch.cdist(first, vectors).min() > 1e-3


def test_one_vector_is_its_own_density() -> None:
    one = torch.randn(1, 4)
    density = Density.of(one, 3)
    assert density.directions.shape == (0, 4)
    assert torch.equal(density.draw(2, seed=0), one.expand(2, -1))
