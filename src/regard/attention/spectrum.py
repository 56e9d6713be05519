"""The largest eigenvalue of Aᵀ(I − 11ᵀ/n)A without A: Lanczos steps, each one pass over tiles."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.tiles import tiles

TOLERANCE = 1e-6


def spectral_bound(call: AttentionCall, max_iterations: int) -> Float[Tensor, "batch head"]:
    """Return λ_max of Aᵀ(I − 11ᵀ/n)A over the n real queries of each sample and head.

    Lanczos with full re-orthogonalization, until a step moves no head by more than a relative `TOLERANCE`, or for
    `max_iterations` steps. Memory is (batch, head, steps, key).

    Source:
        Bai et al. 2024 (arXiv 2410.05648): the outputs of a head are no farther from their mean than √λ_max times the
        inputs from theirs.
    """
    batch, heads, keys = *call.query.shape[:2], call.key.shape[2]
    start = torch.randn(keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = _normalize(start.to(call.query).expand(batch, heads, keys))
    basis, diagonal = [vector], list[Tensor]()
    off_diagonal: list[Tensor] = []
    bound = call.query.new_zeros(batch, heads)
    for _ in range(min(max_iterations, keys)):
        product = _multiply(call, basis[-1])
        diagonal.append((basis[-1] * product).sum(-1))
        span = torch.stack(basis, dim=-1)
        for _repeat in range(2):
            product = product - (span @ (span.mT @ product[..., None]))[..., 0]
        previous, bound = bound, _largest_eigenvalue(diagonal, off_diagonal)
        length = product.norm(dim=-1)
        has_converged = (bound - previous).abs() <= TOLERANCE * bound.clamp(min=torch.finfo(bound.dtype).tiny)
        is_exhausted = length <= 1e-6 * bound.sqrt().clamp(min=1e-6)
        if bool((has_converged | is_exhausted).all()):
            break
        off_diagonal.append(length.masked_fill(is_exhausted, 0.0))
        basis.append(_normalize(product.masked_fill(is_exhausted[..., None], 0.0)))
    return bound


def _multiply(call: AttentionCall, vector: Tensor) -> Tensor:
    """Return Aᵀ(I − 11ᵀ/n)A x = Aᵀ(Ax) − (Aᵀ1)·mean(Ax) for one x per sample and head, in one pass."""
    batch, heads, queries, _ = call.query.shape
    mask = call.query_mask if call.query_mask is not None else call.query.new_ones(batch, queries, dtype=torch.bool)
    valid = mask.to(call.query.dtype)
    total = call.query.new_zeros(batch, heads)
    product, mass = torch.zeros_like(vector), torch.zeros_like(vector)
    for tile in tiles(call):
        at = tile.at_keys
        factor = valid[tile.samples, None, tile.queries, None] / tile.total
        image = (tile.exps @ vector[at][..., None]) * factor
        total[tile.samples, tile.heads] += image.sum((-1, -2))
        transposed = torch.cat([image * factor, factor], dim=-1).mT @ tile.exps
        product[at] += transposed[..., 0, :]
        mass[at] += transposed[..., 1, :]
    mean = total / valid.sum(-1, keepdim=True).clamp(min=1)
    return product - mass * mean[..., None]


def _normalize(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(vector.dtype).tiny)


def _largest_eigenvalue(diagonal: list[Tensor], off_diagonal: list[Tensor]) -> Tensor:
    """Return the largest eigenvalue of the tridiagonal matrix of the Lanczos steps."""
    matrix = torch.diag_embed(torch.stack(diagonal, -1))
    if off_diagonal:
        beside = torch.stack(off_diagonal, -1)
        matrix = matrix + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    return torch.linalg.eigvalsh(matrix)[..., -1].clamp(min=0)
