"""Cross-entropy of a linear layer's output, computed a few rows at a time."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import nll_loss

from regard.attention.device_choice import choose_for
from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError

MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}  # maximum number of logits at a time, by type of device
MIN_CHUNKS = 4
"""Minimum number of chunks: at most half the logits in float32 are in memory at once, products included."""
WHOLE_LOGITS = {"cpu": 0, "cuda": 2**24}
"""Number of logits that are one chunk all the same: on a GPU, to launch the kernels of another takes longer."""


def linear_cross_entropy(
    hidden: Float[Tensor, "token width"], weight: Float[Tensor, "vocabulary width"], labels: Int[Tensor, " token"]
) -> Float[Tensor, ""]:
    """Return Σ −log softmax(W h)_label over the tokens whose label is not `IGNORE_INDEX`.

    The result is float32, or float64 for float64 inputs. Logits are computed a few rows at a time together with both
    gradients, so that no row is computed twice. Under autocast products are in its dtype, exponentials and the sum over
    chunks in float32.
    """
    device = hidden.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    needs_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, product_dtype, *needs_grad)


def logits_cross_entropy(
    logits: Float[Tensor, "batch token vocabulary"], labels: Int[Tensor, "batch token"]
) -> Float[Tensor, ""]:
    """Return the same sum from logits; without gradients at most `MAX_LOGITS` of them are copied at a time."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = max(choose_for(logits.device, MAX_LOGITS) // logits.shape[-1], 1)
    total = logits.new_zeros((), dtype=dtype)
    for sequence, sequence_labels in zip(logits, labels, strict=True):
        for chunk, targets in zip(sequence.split(rows), sequence_labels.split(rows), strict=True):
            log_probs = chunk.log_softmax(-1, dtype=dtype)
            total = total + nll_loss(log_probs, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss, with its gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, labels, product_dtype, hidden_grad, weight_grad = inputs
        acc_dtype = torch.promote_types(hidden.dtype, torch.float32)
        rows = _rows_of_chunk(hidden, weight)
        h, w = hidden.to(product_dtype), weight.to(product_dtype)
        has_label = (labels != IGNORE_INDEX)[:, None]
        labeled_h = h * has_label if weight_grad else h
        d_hidden = torch.empty_like(h) if hidden_grad else None
        d_weight = torch.zeros_like(weight, dtype=acc_dtype) if weight_grad else None
        total = hidden.new_zeros((), dtype=acc_dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(h), rows):
                chunk = slice(start, start + rows)
                loss, d_logits = _loss_and_gradient(h[chunk] @ w.T, labels[chunk], acc_dtype)
                total += loss
                d_logits = d_logits.to(product_dtype)
                if d_hidden is not None:
                    torch.mm(d_logits, w, out=d_hidden[chunk])
                if d_weight is not None and product_dtype == acc_dtype:
                    d_weight.addmm_(d_logits.T, labeled_h[chunk])
                elif d_weight is not None:
                    d_weight += d_logits.T @ labeled_h[chunk]
            if d_hidden is not None:
                d_hidden *= has_label
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError("loss: expected no gradient of its gradient (create_graph); return_logits=True allows one")
        gradients = (
            None if gradient is None else (gradient * outer[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None, None)


def _rows_of_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of rows whose logits are in memory at once."""
    rows, whole = (choose_for(hidden.device, limits) // weight.shape[0] for limits in (MAX_LOGITS, WHOLE_LOGITS))
    return max(min(rows, max(-(-len(hidden) // MIN_CHUNKS), whole)), 1)


def _loss_and_gradient(logits: Tensor, labels: Tensor, acc_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum of some rows' losses, and its gradient in the logits (also of rows without label)."""
    index = labels.masked_fill(labels == IGNORE_INDEX, 0)[:, None]
    log_probs = logits.log_softmax(-1, dtype=acc_dtype)
    loss = -log_probs.gather(1, index)[:, 0].masked_fill(labels == IGNORE_INDEX, 0.0).sum()
    probs = log_probs.exp_()
    if torch.compiler.is_compiling():  # compiled, a comparison takes one pass over memory and a scatter more
        return loss, probs - (torch.arange(probs.shape[1], device=index.device) == index).to(acc_dtype)
    return loss, probs.scatter_add_(1, index, probs.new_full(index.shape, -1.0))


def check_loss(value: Any) -> None:
    """Raise UserError if a loss of a function of one's own is nothing to train by."""
    got = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.requires_grad:
            return
        got = f"one of shape {tuple(value.shape)}" if value.numel() != 1 else "one without a gradient"
    raise UserError(f"loss: expected a tensor of one number with a gradient, got {got}")
