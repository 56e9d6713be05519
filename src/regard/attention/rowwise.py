"""Attention whose rows are normalised by all their scores, in tiles of whole rows, which the backward pass makes anew.

Softmax where the fused kernels cannot take it (a table of distances, a window beside something else), and softpick.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall, Operation
from regard.attention.recomputed import Tiled, recomputed
from regard.attention.tiles import LOG2_E
from regard.attention.weightings import EPSILON


def _softmax(scores: Tensor, _room: Tensor, _base: Tensor | None) -> Tensor:
    return scores.exp2_()


def _softmax_back(gradient: Tensor, weights: Tensor, _less: Tensor | None, _base: Tensor | None) -> Tensor:
    """The gradient (g − Σ_j g_j A_j) · A."""
    return gradient.mul_(weights)


def _softpick(scores: Tensor, _room: Tensor, base: Tensor | None) -> Tensor:
    """exp(s − m) − exp(−m), both signs: zero where the score is."""
    assert base is not None
    return scores.exp2_().sub_(torch.exp2(-base))


def _positive(weights: Tensor, room: Tensor) -> Tensor:
    return torch.clamp(weights, min=0, out=room)


def _size(weights: Tensor, room: Tensor) -> Tensor:
    return torch.abs(weights, out=room).sum(-1, keepdim=True)


def _softpick_back(gradient: Tensor, weights: Tensor, less: Tensor | None, base: Tensor | None) -> Tensor:
    """The gradient exp(s − m) · (g − d where the weight is positive, d elsewhere), d = Σ_j g_j A_j.

    It comes as g − 2d, which is zeroed where the weight is not positive; then d is added everywhere.
    """
    assert less is not None
    assert base is not None
    back = torch.ops.aten.threshold_backward.grad_input(gradient, weights, 0, grad_input=gradient)
    return back.sub_(less).mul_(weights.add_(torch.exp2(-base)))


ROWWISE = {
    "softmax": Tiled(weigh=_softmax, back=_softmax_back, unit=LOG2_E, floor=float("-inf")),
    "softpick": Tiled(
        weigh=_softpick,
        back=_softpick_back,
        total=_size,
        met=_positive,
        hide=Tensor.mul_,
        marks=(1.0, 0.0),
        leaks=True,
        unit=LOG2_E,
        floor=0.0,
        epsilon=EPSILON,
        times=2,
    ),
}


def rowwise(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """The output of a whole causal sequence whose weighting is one of `ROWWISE`, in the dtype of its queries."""
    return recomputed(call, operation, ROWWISE[operation.weighting], normalised=True)
