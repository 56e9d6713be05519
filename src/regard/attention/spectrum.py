"""The largest eigenvalue of Aᵀ(I − 11ᵀ/n)A without A: Lanczos steps, each one pass over tiles."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.tiles import tiles

TOLERANCE = 1e-6


def spectral_bound(call: AttentionCall, iterations: int) -> Float[Tensor, "batch head"]:
    """λ_max of Aᵀ(I − 11ᵀ/n)A over the n real queries, per sample and head.

    The over-smoothing bound of Bai et al. 2024: the outputs of a head are no farther from their mean than √λ_max times
    the inputs from theirs. Lanczos with full re-orthogonalisation, until a step moves no head by more than a relative
    1e-6, or for `iterations` steps; memory (batch, head, steps, key).
    """
    batch, heads, keys = *call.query.shape[:2], call.key.shape[2]
    start = torch.randn(keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = _unit(start.to(call.query).expand(batch, heads, keys))
    basis, diagonal = [vector], list[Tensor]()
    beside: list[Tensor] = []
    bound = call.query.new_zeros(batch, heads)
    for _ in range(min(iterations, keys)):
        following = _multiply(call, basis[-1])
        diagonal.append((basis[-1] * following).sum(-1))
        span = torch.stack(basis, dim=-1)
        for _again in range(2):
            following = following - (span @ (span.mT @ following[..., None]))[..., 0]
        before, bound = bound, _largest(diagonal, beside)
        length = following.norm(dim=-1)
        done = (bound - before).abs() <= TOLERANCE * bound.clamp(min=torch.finfo(bound.dtype).tiny)
        exhausted = length <= 1e-6 * bound.sqrt().clamp(min=1e-6)
        if bool((done | exhausted).all()):
            break
        beside.append(length.masked_fill(exhausted, 0.0))
        basis.append(_unit(following.masked_fill(exhausted[..., None], 0.0)))
    return bound


def _multiply(call: AttentionCall, vector: Tensor) -> Tensor:
    """Aᵀ(I − 11ᵀ/n)A x for one x per sample and head, in one pass: Aᵀ(Ax) − (Aᵀ1)·mean(Ax)."""
    batch, heads, queries, _ = call.query.shape
    real = call.query_mask if call.query_mask is not None else call.query.new_ones(batch, queries, dtype=torch.bool)
    real = real.to(call.query.dtype)
    total = call.query.new_zeros(batch, heads)
    product, mass = torch.zeros_like(vector), torch.zeros_like(vector)
    for tile in tiles(call):
        at = tile.at_keys
        factor = real[tile.samples, None, tile.queries, None] / tile.total
        image = (tile.exps @ vector[at][..., None]) * factor
        total[tile.samples, tile.heads] += image.sum((-1, -2))
        back = torch.cat([image * factor, factor], dim=-1).mT @ tile.exps
        product[at] += back[..., 0, :]
        mass[at] += back[..., 1, :]
    mean = total / real.sum(-1, keepdim=True).clamp(min=1)
    return product - mass * mean[..., None]


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(vector.dtype).tiny)


def _largest(diagonal: list[Tensor], beside: list[Tensor]) -> Tensor:
    """The largest eigenvalue of the tridiagonal matrix that Lanczos has built so far."""
    matrix = torch.diag_embed(torch.stack(diagonal, -1))
    if beside:
        off = torch.stack(beside, -1)
        matrix = matrix + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    return torch.linalg.eigvalsh(matrix)[..., -1].clamp(min=0)
