"""Weightings, normalisations and proxies by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.attention.weightings import (
    FEATURE_MAPS,
    NORMALISATIONS,
    WEIGHTINGS,
    apply_gate,
    mlp_features,
    proxy_distribution,
)

BY_HAND = {
    "softmax": [2 / 3, 1 / 3, 0.0],
    "sigmoid": [2 / 3, 1 / 2, 0.0],
    "elu": [1 + math.log(2), 1.0, 0.0],
    "linear": [math.log(2), 0.0, 0.0],
    "softpick": [1.0, 0.0, 0.0],
}


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_scores_log_two_and_zero_and_one_that_is_hidden(name: str) -> None:
    scores, keep = tensor([math.log(2), 0.0, 5.0]), torch.tensor([[True, True, False]])
    torch.testing.assert_close(WEIGHTINGS[name].weigh(scores, keep), tensor(BY_HAND[name]), rtol=1e-7, atol=1e-7)


def test_scores_below_zero() -> None:
    keep = torch.ones(1, 2, dtype=torch.bool)
    scores = tensor([math.log(3), -math.log(2)])
    expected = {
        "elu": [1 + math.log(3), 0.5],
        "linear": [math.log(3), -math.log(2)],
        "sigmoid": [0.75, 1 / 3],
        "softpick": [2 / 2.5, 0.0],
    }
    for name, row in expected.items():
        torch.testing.assert_close(WEIGHTINGS[name].weigh(scores, keep), tensor(row), rtol=1e-7, atol=1e-7)


def test_weights_of_scores_far_below_zero_keep_their_digits() -> None:
    """In float32 elu(s) + 1 has four digits at −9 and none at −17: sinks were others than those of the training."""
    scores, keep = torch.tensor([[-9.0, -17.0, -40.0]]), torch.ones(1, 3, dtype=torch.bool)
    expected = torch.tensor([[math.exp(-9), math.exp(-17), math.exp(-40)]])
    for found in (WEIGHTINGS["elu"].weigh(scores, keep), FEATURE_MAPS["elu"](scores)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    row = torch.tensor([[-17.0, -18.0]], requires_grad=True)
    shares = proxy_distribution(WEIGHTINGS["elu"].weigh(row, keep[:, :2]))
    total = math.exp(-17) + math.exp(-18) + 1e-8
    torch.testing.assert_close(
        shares, torch.tensor([[math.exp(-17) / total, math.exp(-18) / total]]), rtol=1e-5, atol=0
    )
    WEIGHTINGS["elu"].weigh(row, keep[:, :2]).sum().backward()
    torch.testing.assert_close(row.grad, row.detach().exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", WEIGHTINGS)
@given(
    values=st.lists(st.floats(-300, 300), min_size=3, max_size=3),
    hidden=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_a_hidden_score_has_no_weight_and_no_gradient_and_no_say(
    name: str, values: list[float], hidden: tuple[bool, ...]
) -> None:
    scores, keep = tensor(values).requires_grad_(), ~torch.tensor([hidden])
    weights = WEIGHTINGS[name].weigh(scores, keep)
    (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
    assert torch.isfinite(weights).all()
    assert torch.isfinite(gradient).all()
    assert not weights[~keep].any()
    assert not gradient[~keep].any()
    other = scores.detach().masked_fill(~keep, 1e4)
    torch.testing.assert_close(WEIGHTINGS[name].weigh(other, keep), weights.detach())


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    scores = tensor([0.7, -1.3, 0.2, -0.4], [2.0, 0.1, -0.5, 1.1]).requires_grad_()
    keep = torch.tensor([[True, True, False, True], [True] * 4])
    assert torch.autograd.gradcheck(lambda s: WEIGHTINGS[name].weigh(s, keep), (scores,))


def test_normalisations_by_hand() -> None:
    weights = tensor([1.0, 3.0], [0.5, -0.75], [0.0, 0.0])
    torch.testing.assert_close(NORMALISATIONS["none"](weights), weights)
    torch.testing.assert_close(NORMALISATIONS["sum"](weights[::2]), tensor([0.25, 0.75], [0.0, 0.0]))
    torch.testing.assert_close(NORMALISATIONS["clamped-sum"](weights), tensor([0.25, 0.75], [0.5, -0.75], [0.0, 0.0]))
    torch.testing.assert_close(NORMALISATIONS["clamped-sum"](-weights), -NORMALISATIONS["clamped-sum"](weights))


def test_the_proxy_is_the_share_of_the_absolute_sum() -> None:
    torch.testing.assert_close(proxy_distribution(tensor([-1.0, 3.0], [0.0, 0.0])), tensor([0.25, 0.75], [0.0, 0.0]))
    assert [name for name, weighting in WEIGHTINGS.items() if weighting.proxy] == ["sigmoid", "elu", "linear"]


def test_feature_maps_by_hand() -> None:
    x = tensor([1.0, -math.log(2)])
    assert FEATURE_MAPS["none"](x) is x
    torch.testing.assert_close(FEATURE_MAPS["elu"](x), tensor([2.0, 0.5]))
    inner, outer = tensor([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]), tensor([1.0, 2.0, 3.0], [0.0, 0.0, 1.0])
    found = mlp_features(tensor([1.0, -3.0]), inner, outer)
    torch.testing.assert_close(found, tensor([1.0, 0.0]))


def test_a_gate_of_zero_lets_half_through() -> None:
    output = torch.full((1, 2, 1, 3), 4.0)
    assert apply_gate(output, torch.zeros(1, 2, 1, 3)).unique().tolist() == [2.0]
    assert apply_gate(output, torch.zeros(1, 2, 1, 1)).unique().tolist() == [2.0]
