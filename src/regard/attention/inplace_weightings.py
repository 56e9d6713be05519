"""Weightings that work in the buffers of a tile: scores become weights, a gradient of weights becomes one of scores.

Weights that are a function of each score alone (sigmoid: Ramapuram et al. 2024; elu + 1: Gu et al. 2025) may come a few
keys at a time. Softmax and softpick are relative to the maximum of a row, which must be whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.tiles import HIDDEN, LOG2_E
from regard.attention.weightings import EPSILON


def _sum(weights: Tensor, _buffer: Tensor) -> Tensor:
    return weights.sum(-1, keepdim=True)


def _unchanged(weights: Tensor, _buffer: Tensor) -> Tensor:
    return weights


@dataclass(frozen=True, kw_only=True)
class InPlaceWeighting:
    """One weighting in place, with its backward pass. A `buffer` has the shape of the scores and may be overwritten.

    Attributes:
        weigh: `weigh(scores, buffer, base)` overwrites scores by weights. Scores come times `unit`, less `base`.
        backward: `backward(grad, weights, less, base)` turns the gradient of `value_weights` into that of the scores
            and may overwrite both. The gradient holds `less_factor` times `less`, what the total of a row takes off.
        total: `total(weights, buffer)`: what a row is divided by, without `epsilon`.
        value_weights: `value_weights(weights, buffer)`: what multiplies the values.
        hide: `hide(scores, mark)` writes the marks into the scores.
        marks: The marks of seen and of hidden pairs.
        leaks: Whether `backward` leaves hidden pairs a gradient, which must be removed.
        unit: Factor of the scores.
        floor: `base` is the maximum of a row, and at least this; None: no base, and rows need not be whole.
        epsilon: Added to the total.
        less_factor: See `backward`.
    """

    weigh: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    total: Callable[[Tensor, Tensor], Tensor] = _sum
    value_weights: Callable[[Tensor, Tensor], Tensor] = _unchanged
    hide: Callable[[Tensor, Tensor], Tensor] = Tensor.add_
    marks: tuple[float, float] = (0.0, HIDDEN)
    leaks: bool = False
    unit: float = 1.0
    floor: float | None = None
    epsilon: float = 0.0
    less_factor: int = 1


def _sigmoid(scores: Tensor, _buffer: Tensor, _base: Tensor | None) -> Tensor:
    return scores.sigmoid_()


def _sigmoid_backward(grad: Tensor, weights: Tensor, _less: Tensor | None, _base: Tensor | None) -> Tensor:
    """Return g · A (1 − A)."""
    return torch.ops.aten.sigmoid_backward.grad_input(grad, weights, grad_input=grad)


def _elu(scores: Tensor, buffer: Tensor, _base: Tensor | None) -> Tensor:
    """Return max(s, 0) + exp(min(s, 0)), of s · log2(e): exp2 takes a fifth of the time of exp."""
    exponential = torch.clamp(scores, max=0, out=buffer).exp2_()
    return torch.add(exponential, scores.relu_(), alpha=1 / LOG2_E, out=scores)


def _elu_backward(grad: Tensor, weights: Tensor, _less: Tensor | None, _base: Tensor | None) -> Tensor:
    """Return g · min(A, 1): a weight exceeds 1 where its score is positive, elsewhere it is exp(s)."""
    return grad.mul_(weights.clamp_(max=1))


def _softmax(scores: Tensor, _buffer: Tensor, _base: Tensor | None) -> Tensor:
    return scores.exp2_()


def _softmax_backward(grad: Tensor, weights: Tensor, _less: Tensor | None, _base: Tensor | None) -> Tensor:
    """Return (g − Σ_j g_j A_j) · A."""
    return grad.mul_(weights)


def _softpick(scores: Tensor, _buffer: Tensor, base: Tensor | None) -> Tensor:
    """Return exp(s − m) − exp(−m), of either sign; zero where the score is."""
    assert base is not None
    return scores.exp2_().sub_(torch.exp2(-base))


def _positive_part(weights: Tensor, buffer: Tensor) -> Tensor:
    return torch.clamp(weights, min=0, out=buffer)


def _absolute_sum(weights: Tensor, buffer: Tensor) -> Tensor:
    return torch.abs(weights, out=buffer).sum(-1, keepdim=True)


def _softpick_backward(grad: Tensor, weights: Tensor, less: Tensor | None, base: Tensor | None) -> Tensor:
    """Return exp(s − m) · (g − d where the weight is positive, d elsewhere), d = Σ_j g_j A_j.

    The gradient comes as g − 2d, which is zeroed where the weight is not positive; then d is added everywhere.
    """
    assert less is not None
    assert base is not None
    grad = torch.ops.aten.threshold_backward.grad_input(grad, weights, 0, grad_input=grad)
    return grad.sub_(less).mul_(weights.add_(torch.exp2(-base)))


INPLACE_WEIGHTINGS = {
    "sigmoid": InPlaceWeighting(weigh=_sigmoid, backward=_sigmoid_backward, epsilon=EPSILON),
    "elu": InPlaceWeighting(weigh=_elu, backward=_elu_backward, epsilon=EPSILON, unit=LOG2_E),
    "softmax": InPlaceWeighting(weigh=_softmax, backward=_softmax_backward, unit=LOG2_E, floor=float("-inf")),
    "softpick": InPlaceWeighting(
        weigh=_softpick,
        backward=_softpick_backward,
        total=_absolute_sum,
        value_weights=_positive_part,
        hide=Tensor.mul_,
        marks=(1.0, 0.0),
        leaks=True,
        unit=LOG2_E,
        floor=0.0,
        epsilon=EPSILON,
        less_factor=2,
    ),
}
