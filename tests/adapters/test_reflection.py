"""Targets, divergences and densities against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.adapters.attention import SharedAttention
from regard.adapters.reflection import Density, divergence, mean_weights, without
from regard.errors import UserError


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


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
    assert torch.equal(mean_weights(torch.tensor([[0.25, 0.75]])), torch.tensor([0.25, 0.75]))
    mean = mean_weights(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    assert torch.allclose(mean, torch.tensor([1 / 3, 2 / 3]))


@pytest.mark.every_value
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


def test_few_rows_have_no_more_directions_than_their_degrees_of_freedom() -> None:
    vectors = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    density = Density.of(vectors, 5)
    assert density.directions.shape == (2, 6)
    assert torch.allclose(density.directions.T @ density.directions, vectors.T.cov())
    assert torch.allclose(density.spread, torch.zeros(6, dtype=torch.float64), atol=1e-6)


def test_draws_are_their_seeds_and_keep_no_row() -> None:
    vectors = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    density = Density.of(vectors, 3)
    first = density.draw(5, seed=7)
    assert torch.equal(first, density.draw(5, seed=7))
    assert not torch.equal(first, density.draw(5, seed=8))
    assert torch.cdist(first, vectors).min() > 1e-3


def test_one_vector_has_no_density() -> None:
    """It would be the row itself."""
    with pytest.raises(UserError, match="density: expected at least two rows of a task, got 1"):
        Density.of(torch.randn(1, 4), 3)


# -- what cannot be held ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_in_low_precision_the_divergence_is_that_of_float32(kind: torch.dtype) -> None:
    scores = drawn(5, 3).to(kind)
    target = torch.tensor([0.25, 0.75])
    found = divergence(target, scores)
    assert found.dtype == torch.float32
    assert torch.equal(found, divergence(target, scores.float()))


def test_under_autocast_the_attention_keeps_its_precision() -> None:
    gate = SharedAttention(8, hidden_size=4, seed=0)
    gate.use(2)
    vectors = drawn(5, 8).float()
    with torch.no_grad():
        target = gate(vectors[:1])[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = gate.scores(vectors)
            assert abs(float(divergence(target, gate.scores(vectors[:1])))) < 1e-6
    assert torch.equal(found, gate.scores(vectors).detach())


def test_a_target_is_of_blocks_that_are_there() -> None:
    with pytest.raises(UserError, match="target: expected weights of at most the 2 adapters that there are, got 3"):
        divergence(torch.full((3,), 1 / 3), drawn(4, 2))
    with pytest.raises(UserError, match="vectors: expected at least one for each earlier task, got none"):
        divergence(torch.ones(1), drawn(0, 2))


def test_a_target_without_a_block_shares_what_that_had() -> None:
    target = torch.tensor([0.2, 0.5, 0.3])
    assert torch.allclose(without(target, 1), torch.tensor([0.4, 0.6]))
    assert without(target, 3) is target
    with pytest.raises(UserError, match="expected weight on adapters other than 0, which was removed"):
        without(torch.tensor([1.0, 0.0]), 0)
