"""Cross-entropy of a linear layer's output, of which never more than a few rows stand in memory."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import nll_loss

IGNORE_INDEX = -100
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""The most logits at a time, by kind of device."""
MIN_CHUNKS = 4
"""So many parts at least: half the logits in float32 is the most that stands in memory at once, products included."""


def linear_cross_entropy(
    hidden: Float[Tensor, "token width"], weight: Float[Tensor, "vocabulary width"], labels: Int[Tensor, " token"]
) -> Float[Tensor, ""]:
    """Σ −log softmax(W h)_label over the tokens whose label is not −100: float32, float64 for float64 inputs.

    Logits are made a few rows at a time, and both gradients on the way, so that no row is made twice. Under autocast
    products are taken in its dtype, the exponentials and the sum over chunks in float32.
    """
    kind = hidden.device.type
    product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    learns = [torch.is_grad_enabled() and one.requires_grad for one in (hidden, weight)]
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, product, *learns)


def logits_cross_entropy(
    logits: Float[Tensor, "batch token vocabulary"], labels: Int[Tensor, "batch token"]
) -> Float[Tensor, ""]:
    """The same sum from logits that are there: without gradients no more than `MAX_LOGITS` of them are copied at a time."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    rows = max(MAX_LOGITS.get(logits.device.type, 2**22) // logits.shape[-1], 1)
    total = logits.new_zeros((), dtype=exact)
    for row, targets in zip(logits, labels, strict=True):
        for some, wanted in zip(row.split(rows), targets.split(rows), strict=True):
            chances = some.log_softmax(-1, dtype=exact)
            total = total + nll_loss(chances, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss, with its gradients taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        product: torch.dtype,
        for_hidden: bool,
        for_weight: bool,
    ) -> Tensor:
        """The sum of the losses."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        rows = max(min(MAX_LOGITS.get(hidden.device.type, 2**22) // weight.shape[0], -(-len(hidden) // MIN_CHUNKS)), 1)
        h, w = hidden.to(product), weight.to(product)
        counted = (labels != IGNORE_INDEX)[:, None]
        counted_h = h * counted if for_weight else h
        d_hidden = torch.empty_like(h) if for_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if for_weight else None
        total = hidden.new_zeros((), dtype=exact)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(h), rows):
                part = slice(start, start + rows)
                found, d_logits = _losses(h[part] @ w.T, labels[part], exact)
                total += found
                d_logits = d_logits.to(product)
                if d_hidden is not None:
                    torch.mm(d_logits, w, out=d_hidden[part])
                if d_weight is not None and product == exact:
                    d_weight.addmm_(d_logits.T, counted_h[part])
                elif d_weight is not None:
                    d_weight += d_logits.T @ counted_h[part]
            if d_hidden is not None:
                d_hidden *= counted
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward pass, times that of the sum."""
        found = (
            None if gradient is None else (gradient * outer[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*found, None, None, None, None)


def _losses(logits: Tensor, labels: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of some rows' losses, and its gradient by their logits, of rows that are not counted as well."""
    at = labels.clamp(min=0)[:, None]
    shares = logits.log_softmax(-1, dtype=exact)
    loss = -shares.gather(1, at)[:, 0].masked_fill(labels == IGNORE_INDEX, 0.0).sum()
    shares = shares.exp_()
    if torch.compiler.is_compiling():  # it makes loops of one pass of a comparison, and more passes of a scatter
        return loss, shares - (torch.arange(shares.shape[1], device=at.device) == at).to(exact)
    return loss, shares.scatter_add_(1, at, shares.new_full(at.shape, -1.0))
