"""Weightings, normalizations and feature maps: how scores become weights, and what queries and keys go through before.

What `keep` hides has weight zero. To add one, write a function and enter it in the table at the end of its kind.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear, relu

from regard.attention.tracing import is_exported

EPSILON = 1e-8
_SCALE = 2.0**20
Matrix = Float[Tensor, "*lead query key"]
Mask = Bool[Tensor, "*#lead query key"]
Features = Float[Tensor, "*lead width"]


def softmax(scores: Matrix, keep: Mask) -> Matrix:
    """Return exp(s) / Σ exp(s); a row that sees no key is zero."""
    return scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~keep, 0.0)


def softpick(scores: Matrix, keep: Mask) -> Matrix:
    """Return relu(exp(s) − 1) / Σ |exp(s) − 1|, both times exp(−max) so that none overflows (Zuhri et al. 2025)."""
    hidden = scores.masked_fill(~keep, float("-inf"))
    top = hidden.amax(-1, keepdim=True).clamp(min=0).detach()
    gap = ((hidden - top).exp() - (-top).exp()).masked_fill(~keep, 0.0)
    return _divide(relu(gap), gap.abs().sum(-1, keepdim=True))


def elu_and_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1 as max(x, 0) + exp(min(x, 0)): in the sum itself nothing is left of exp(x) below 10⁻⁷."""
    return relu(x) + x.clamp(max=0).exp()


def _divide(weights: Tensor, total: Tensor) -> Tensor:
    """Return A / (total + 10⁻⁸), in an exported graph both times 2²⁰: ONNX's optimizer takes + 10⁻⁸ for + 0."""
    if is_exported():
        weights, total, epsilon = weights * _SCALE, total * _SCALE, EPSILON * _SCALE
        return weights / (total + epsilon)
    return weights / (total + EPSILON)


@dataclass(frozen=True)
class Weighting:
    """A way from scores to weights.

    Attributes:
        proxy: The weights are no distribution; sinks are measured on `proxy_distribution` of them.
        linear: The weights are linear in the scores.
    """

    weigh: Callable[[Tensor, Tensor], Tensor]
    proxy: bool = True
    linear: bool = False


WEIGHTINGS = {
    "softmax": Weighting(softmax, proxy=False),
    "sigmoid": Weighting(lambda scores, keep: scores.sigmoid().masked_fill(~keep, 0.0)),
    "elu": Weighting(lambda scores, keep: elu_and_one(scores).masked_fill(~keep, 0.0)),
    "linear": Weighting(lambda scores, keep: scores.masked_fill(~keep, 0.0), linear=True),
    "softpick": Weighting(softpick, proxy=False),
}


def normalize_by_sum(weights: Matrix) -> Matrix:
    """Return A / (Σ_j A + 10⁻⁸), for weights that are not negative."""
    return _divide(weights, weights.sum(-1, keepdim=True))


NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda weights: weights,
    "sum": normalize_by_sum,
    "clamped-sum": lambda weights: weights / weights.sum(-1, keepdim=True).abs().clamp(min=1),
}
"""By the sum of weights that are not negative, or by max(|Σ_j A|, 1) for weights of either sign."""


def proxy_distribution(weights: Matrix) -> Matrix:
    """Return |A| / (Σ_j |A| + 10⁻⁸), on which sinks of other weightings are measured (Gu et al. 2025)."""
    return normalize_by_sum(weights.abs())


def mlp_features(x: Features, inner: Float[Tensor, "hidden width"], outer: Float[Tensor, "width hidden"]) -> Features:
    """Return φ(x) = W₂ relu(W₁ x), with weights that queries, keys and heads share."""
    return linear(relu(linear(x, inner)), outer)


FEATURE_MAPS: dict[str, Callable[..., Tensor]] = {"none": lambda x: x, "elu": elu_and_one, "mlp": mlp_features}
"""`mlp` takes its two weights as well."""


def apply_gate(
    output: Float[Tensor, "batch query head width"], gate: Float[Tensor, "batch query head #width"]
) -> Float[Tensor, "batch query head width"]:
    """Return the output o · σ(W_g x) of gated attention, where `gate` is W_g x (Qiu et al. 2025)."""
    return output * torch.sigmoid(gate)
