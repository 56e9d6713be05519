"""Weightings that work in the buffers of a tile: scores become weights, a gradient of weights becomes one of scores.

Weights of each score alone (sigmoid: Ramapuram et al. 2024; elu + 1: Gu et al. 2025) may come a few keys at a time.
Softmax and softpick are relative to the maximum of a row, which must be whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.tiles import HIDDEN, LOG2_E
from regard.attention.weightings import EPSILON


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
    total: Callable[[Tensor, Tensor], Tensor] = lambda weights, _buffer: weights.sum(-1, keepdim=True)
    value_weights: Callable[[Tensor, Tensor], Tensor] = lambda weights, _buffer: weights
    hide: Callable[[Tensor, Tensor], Tensor] = Tensor.add_
    marks: tuple[float, float] = (0.0, HIDDEN)
    leaks: bool = False
    unit: float = 1.0
    floor: float | None = None
    epsilon: float = 0.0
    less_factor: int = 1


def _elu(scores: Tensor, buffer: Tensor, _base: Tensor | None) -> Tensor:
    """Return max(s, 0) + exp(min(s, 0)), of s · log2(e): exp2 takes a fifth of the time of exp."""
    return torch.add(torch.clamp(scores, max=0, out=buffer).exp2_(), scores.relu_(), alpha=1 / LOG2_E, out=scores)


def _softpick(scores: Tensor, _buffer: Tensor, base: Tensor | None) -> Tensor:
    """Return exp(s − m) − exp(−m), of either sign; zero where the score is."""
    assert base is not None
    return scores.exp2_().sub_(torch.exp2(-base))


def _softpick_backward(grad: Tensor, weights: Tensor, less: Tensor | None, base: Tensor | None) -> Tensor:
    """Return exp(s − m) · (g − d where the weight is positive, d elsewhere), d = Σ_j g_j A_j, from g − 2d."""
    assert less is not None
    assert base is not None
    grad = torch.ops.aten.threshold_backward.grad_input(grad, weights, 0, grad_input=grad)
    return grad.sub_(less).mul_(weights.add_(torch.exp2(-base)))


INPLACE_WEIGHTINGS = {
    "sigmoid": InPlaceWeighting(
        weigh=lambda scores, _buffer, _base: scores.sigmoid_(),
        backward=lambda grad, weights, _less, _base: torch.ops.aten.sigmoid_backward.grad_input(
            grad, weights, grad_input=grad
        ),
        epsilon=EPSILON,
    ),
    "elu": InPlaceWeighting(
        weigh=_elu,
        # A weight exceeds 1 where its score is positive; elsewhere it is exp(s).
        backward=lambda grad, weights, _less, _base: grad.mul_(weights.clamp_(max=1)),
        epsilon=EPSILON,
        unit=LOG2_E,
    ),
    "softmax": InPlaceWeighting(
        weigh=lambda scores, _buffer, _base: scores.exp2_(),
        backward=lambda grad, weights, _less, _base: grad.mul_(weights),
        unit=LOG2_E,
        floor=float("-inf"),
    ),
    "softpick": InPlaceWeighting(
        weigh=_softpick,
        backward=_softpick_backward,
        total=lambda weights, buffer: torch.abs(weights, out=buffer).sum(-1, keepdim=True),
        value_weights=lambda weights, buffer: torch.clamp(weights, min=0, out=buffer),
        hide=Tensor.mul_,
        marks=(1.0, 0.0),
        leaks=True,
        unit=LOG2_E,
        floor=0.0,
        epsilon=EPSILON,
        less_factor=2,
    ),
}
