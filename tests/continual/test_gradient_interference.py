"""The gradients of tasks against each other: a linear regression by hand, and what must not matter."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import regard.continual.gradient_interference as tested
from regard.continual.gradient_interference import (
    COLUMNS,
    compute_gradients,
    compute_interference,
    make_interference_table,
    project,
)
from regard.errors import UserError

Rows = tuple[Tensor, Tensor]


def squared(module: nn.Module, rows: Rows) -> Tensor:
    """Σ ½ (f(x) − y)²."""
    return (module(rows[0]) - rows[1]).square().sum() / 2


def count(rows: Rows) -> int:
    return len(rows[0])


def regression() -> nn.Linear:
    """f(x) = x₁ − 2 x₂ + 3."""
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0]]))
        module.bias.fill_(3.0)
    return module


def rows(*triples: tuple[float, float, float]) -> Rows:
    """Inputs (x₁, x₂) and targets y."""
    table = torch.tensor(triples, dtype=torch.float32)
    return table[:, :2], table[:, 2:]


BY_HAND = [
    # f = 2, 5; f − y = 1, −1: the mean of (1, 1, 1)·1 and (2, 0, 1)·(−1)
    [rows((1, 1, 1), (2, 0, 6))],
    # f = 1, y = −1: (0, 1, 1)·2
    [rows((0, 1, -1))],
    # f = 2, 4, 0; f − y = −1, 0, 3: the mean of (1, 1, 1)·(−1), 0 and (1, 2, 1)·3
    [rows((1, 1, 3)), rows((1, 0, 4), (1, 2, -3))],
]
GRADIENTS = torch.tensor([[-0.5, 0.5, 0.0], [0.0, 2.0, 2.0], [2 / 3, 5 / 3, 2 / 3]])
"""By w₁, w₂ and b."""


class Network(nn.Module):
    """Something with dropout, a part that no loss sees, and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 1)
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)) + self.again(self.encoder(-x)).square()


def tasks(tasks: int = 3, length: int = 12, dtype: torch.dtype = torch.float64) -> list[Rows]:
    draw = torch.Generator().manual_seed(1)
    shapes = [((length, 4), (length, 1))] * tasks
    return [
        (torch.randn(x, generator=draw, dtype=dtype), torch.randn(y, generator=draw, dtype=dtype)) for x, y in shapes
    ]


def test_gradients_of_a_regression_are_those_by_hand() -> None:
    found = compute_gradients(regression(), BY_HAND, squared, count)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, GRADIENTS)


def test_products_and_cosines_are_those_by_hand() -> None:
    dot, cosine = compute_interference(compute_gradients(regression(), BY_HAND, squared, count))
    assert dot.dtype == cosine.dtype == torch.float64
    expected = torch.tensor([[0.5, 1.0, 0.5], [1.0, 8.0, 14 / 3], [0.5, 14 / 3, 11 / 3]], dtype=torch.float64)
    torch.testing.assert_close(dot, expected, rtol=1e-6, atol=1e-6)
    norm = [math.sqrt(0.5), math.sqrt(8), math.sqrt(11 / 3)]
    by_hand = torch.tensor([[float(expected[a, b]) / norm[a] / norm[b] for b in range(3)] for a in range(3)])
    torch.testing.assert_close(cosine, by_hand.double(), rtol=1e-6, atol=1e-6)


def test_a_step_against_one_gradient_changes_the_other_loss_by_the_product() -> None:
    """First-order: L_b(θ − ε g_a) − L_b(θ) ≈ −ε dot."""
    module, (first, second) = Network().double().eval(), tasks(2)
    gradients = compute_gradients(module, [[first], [second]], squared, count)
    dot, _ = compute_interference(gradients)
    before = float(squared(module, second).detach()) / count(second)
    rate = 1e-6
    with torch.no_grad():
        parameters = list(module.parameters())
        for one, step in zip(parameters, gradients[0].split([p.numel() for p in parameters]), strict=True):
            one.sub_(rate * step.view_as(one))
    change = float(squared(module, second).detach()) / count(second) - before
    assert change == pytest.approx(-rate * float(dot[0, 1]), rel=1e-3)
    assert abs(change) > 1e-9


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 7], [11, 1], [4, 4, 4]])
def test_how_rows_are_batched_makes_no_difference(sizes: list[int]) -> None:
    module = Network().double().train()
    whole = compute_gradients(module, [[task] for task in tasks()], squared, count)
    parts = [zip(*(tensor.split(sizes) for tensor in task), strict=True) for task in tasks()]
    found = compute_gradients(module, parts, squared, count)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_gradients_are_of_the_module_in_evaluation_and_leave_it_as_it_was() -> None:
    module = Network().double().train()
    module.encoder[0].eval()
    squared(module, tasks()[0]).backward()
    kept = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    chance = torch.get_rng_state()
    with torch.no_grad():
        found = compute_gradients(module, [[task] for task in tasks()], squared, count)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), chance)
    assert [name for name, part in module.named_modules() if not part.training] == ["encoder.0"]
    for name, parameter in module.named_parameters():
        before = kept[name]
        assert (parameter.grad is None) == (before is None)
        assert before is None or (parameter.grad is not None and torch.equal(parameter.grad, before))
        assert parameter.requires_grad
    module.eval()
    module.zero_grad()
    (squared(module, tasks()[0]) / 12).backward()
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])
    torch.testing.assert_close(found[0], flat, rtol=1e-12, atol=1e-12)
    assert flat.any()


def test_chance_is_restored_though_a_loss_draws_from_it() -> None:
    module, chance = regression(), torch.get_rng_state()
    found = compute_gradients(module, BY_HAND, lambda module, rows: squared(module, rows) * torch.rand(1)[0], count)
    assert torch.equal(torch.get_rng_state(), chance)
    assert not torch.allclose(found, GRADIENTS)


def test_the_parameters_are_those_that_require_gradients() -> None:
    module = Network().double()
    for parameter in module.encoder[0].parameters():
        parameter.requires_grad_(False)
    given = [[task] for task in tasks()]
    everything = compute_gradients(module, given, squared, count)
    assert everything.shape == (3, sum(p.numel() for p in module.parameters() if p.requires_grad))
    encoder = compute_gradients(module, given, squared, count, parameters=module.encoder.parameters())
    assert torch.equal(encoder, everything[:, : 6 * 6 + 6])
    assert [p.requires_grad for p in module.encoder[0].parameters()] == [False, False]
    doubled = compute_gradients(module, given, squared, count, parameters=[*module.encoder.parameters()] * 2)
    assert torch.equal(doubled, encoder)
    with pytest.raises(UserError, match=r"^parameters: expected at least one that requires gradients, got none$"):
        compute_gradients(module, given, squared, count, parameters=module.encoder[0].parameters())


def test_low_precision_is_added_up_in_float32() -> None:
    module = Network().bfloat16()
    given = [[task] for task in tasks(dtype=torch.bfloat16)]
    assert compute_gradients(module, given, squared, count).dtype == torch.float32


@pytest.mark.parametrize("empty", [[], [rows((1, 1, 1))] * 0])
def test_a_task_without_rows_is_refused(empty: list[Rows]) -> None:
    with pytest.raises(UserError, match=r"^tasks: expected rows of every task, got none of task 2$"):
        compute_gradients(regression(), [BY_HAND[0], empty], squared, count)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**16), st.sampled_from([1e-12, 1.0, 1e9]))
def test_it_is_symmetric_and_cosines_are_cosines(tasks: int, width: int, seed: int, scale: float) -> None:
    gradients = torch.randn(tasks, width, generator=torch.Generator().manual_seed(seed)) * scale
    dot, cosine = compute_interference(gradients)
    exact = gradients.double()
    torch.testing.assert_close(dot, exact @ exact.T, rtol=1e-12, atol=1e-12 * scale**2)
    assert torch.equal(dot, dot.T)
    assert torch.equal(cosine, cosine.T)
    assert (cosine.abs() <= 1).all()
    torch.testing.assert_close(cosine.diagonal(), torch.ones(tasks, dtype=torch.float64))
    for a in range(tasks):
        for b in range(tasks):
            expected = torch.cosine_similarity(exact[a], exact[b], dim=0, eps=1e-300)
            assert float(cosine[a, b]) == pytest.approx(float(expected), abs=1e-12)


def test_slices_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    whole = compute_interference(gradients)
    monkeypatch.setattr(tested, "SLICE", 7)
    for found, expected in zip(compute_interference(list(gradients)), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_gradient_of_zero_has_no_angle() -> None:
    dot, cosine = compute_interference(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    assert dot.tolist() == [[0, 0], [0, 25]]
    assert cosine.isnan().tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(
    "gradients, came",
    [([], "none"), ([torch.ones(2), torch.ones(3)], r"\(2,\), \(3,\)"), ([torch.ones(1, 2)], r"\(1, 2\)")],
)
def test_gradients_of_unequal_lengths_are_refused(gradients: Any, came: str) -> None:
    with pytest.raises(UserError, match=f"^gradients: expected a vector for each task, all of one length, got {came}$"):
        compute_interference(gradients)


def test_the_table_has_each_pair_once() -> None:
    gradients = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0]])
    table = make_interference_table(gradients)
    assert tuple(table.columns) == COLUMNS
    expected = [(1, 1, 1, 1), (1, 2, 3, 0.6), (1, 3, -2, -1), (2, 2, 25, 1), (2, 3, -6, -0.6), (3, 3, 4, 1)]
    pd.testing.assert_frame_equal(table, pd.DataFrame(expected, columns=list(COLUMNS)), check_dtype=False)


def test_a_projection_preserves_dot_products_within_its_error() -> None:
    """Of vectors with a few large numbers in the same places, as gradients have them."""
    random = torch.Generator().manual_seed(3)
    base = torch.randn(40_000, generator=random, dtype=torch.float64)
    base[::400] *= 30
    vectors = [base, base + torch.randn(40_000, generator=random, dtype=torch.float64), torch.roll(base, 200)]
    exact, _ = compute_interference(vectors)
    features = 4_096
    found, _ = compute_interference([project(vector, features) for vector in vectors])
    norms = exact.diagonal().sqrt()
    errors = (found - exact) / torch.outer(norms, norms)
    assert float(errors.abs().max()) < 4 / math.sqrt(features)
    assert float(errors.abs().max()) > 0


def test_numbers_that_share_a_feature_have_signs_of_their_own() -> None:
    """Else the products of vectors without a common number would all have one sign: 64, not within ±4·√64."""
    first, second = torch.zeros(2, 256)
    first[:64], second[64:128] = 1.0, 1.0
    assert abs(float(project(first, 64) @ project(second, 64))) < 32
    assert float(project(first, 64) @ project(first, 64)) == 64


def test_long_gradients_are_projected_and_short_ones_kept() -> None:
    module = regression()
    exact = compute_gradients(module, BY_HAND, squared, count, max_features=3)
    assert torch.equal(exact, compute_gradients(module, BY_HAND, squared, count))
    short = compute_gradients(module, BY_HAND, squared, count, max_features=2)
    torch.testing.assert_close(short, torch.stack([project(gradient, 2) for gradient in exact]))
