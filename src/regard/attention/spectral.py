"""The spectral bound of softmax attention by Lanczos steps: of matrices that are held, or by passes over tiles."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.device_choice import choose_for
from regard.attention.tiles import Tile, tiles

TOLERANCE = 1e-6
"""Relative change of every bound at which Lanczos steps end."""
STEPS_PER_LOOK = 4
"""Lanczos steps from one look at the bounds to the next: a look costs as much, and waits for a GPU."""
HELD_KEYS = {"cpu": 2048, "cuda": 4096}
"""Most keys of matrices that are held: 16 MiB of float32 a head on a CPU, all heads of a key head at once."""
HELD_ENTRIES = 2**26
"""Most numbers of the matrices of a key head's heads that are held: 256 MiB of float32."""


def spectral_bound(call: AttentionCall, max_iterations: int) -> Float[Tensor, "batch head"]:
    """Return λ_max of Aᵀ(I − 11ᵀ/n)A over the n real queries of each sample and head (Bai et al. 2024, 2410.05648).

    Lanczos with full re-orthogonalization, until `STEPS_PER_LOOK` steps move no head by more than a relative
    `TOLERANCE`, or for `max_iterations` steps. Memory is (batch, head, steps, key), and of at most `HELD_KEYS` keys a
    few heads' matrices, up to `HELD_ENTRIES` numbers. The outputs of a head are no farther from their mean than √λ_max
    times the inputs from theirs. The bound of matrices with NaN is NaN.
    """
    batch, heads, queries, _ = call.query.shape
    keys = call.key.shape[2]
    held_at_once = heads // call.key.shape[1] * queries * keys
    if max(queries, keys) > choose_for(call.query.device, HELD_KEYS) or held_at_once > HELD_ENTRIES:
        like = call.query.new_empty(batch * heads, keys)
        return _lanczos(partial(_multiply_tiles, call), like, max_iterations).view(batch, heads)
    bound = call.query.new_empty(batch, heads)
    for tile, matrices in _centered_matrices(call):
        held = matrices.flatten(0, 1)
        part = _lanczos(partial(_multiply_held, held), held[:, 0], max_iterations)
        bound[tile.samples, tile.heads] = part.view(matrices.shape[:2])
    return bound


def _lanczos(
    multiply: Callable[[Tensor], Tensor], like: Float[Tensor, "matrix key"], max_iterations: int
) -> Float[Tensor, " matrix"]:
    """Return the largest eigenvalue of each symmetric matrix; `multiply` returns its product with vectors `like` these.

    A basis that spans all that a matrix moves goes on with zeros.
    """
    count = min(max_iterations, like.shape[1])
    basis = like.new_empty(len(like), count, like.shape[1])
    basis[:, 0] = _start_vector(like.shape[1], like.dtype, like.device)
    diagonal, off_diagonal = list[Tensor](), list[Tensor]()
    bound = like.new_zeros(len(like))
    for step in range(1, count + 1):
        vector, span = basis[:, step - 1], basis[:, :step]
        product = multiply(vector)
        diagonal.append((vector * product).sum(-1))
        for _repeat in range(2):
            product = product - _multiply_held(span, product)
        looks = step % STEPS_PER_LOOK == 0 or step == count
        previous, bound = bound, _largest_eigenvalue(diagonal, off_diagonal) if looks else bound
        length = torch.linalg.vector_norm(product, dim=-1)
        is_exhausted = length <= 1e-6 * torch.maximum(bound, diagonal[-1]).sqrt().clamp(min=1e-6)
        if looks:
            has_converged = (bound - previous).abs() <= TOLERANCE * bound.clamp(min=torch.finfo(bound.dtype).tiny)
            if step == count or bool((has_converged | is_exhausted).all()):
                break
        off_diagonal.append(length.masked_fill(is_exhausted, 0.0))
        basis[:, step] = (product / length[:, None]).masked_fill_(is_exhausted[:, None], 0.0)
    return bound


def _centered_matrices(call: AttentionCall) -> Iterator[tuple[Tile, Float[Tensor, "sample head query key"]]]:
    """Yield (I − 11ᵀ/n)A of the samples and heads of a tile, with rows of zeros for padded queries."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    matrices = call.query.new_empty(0)
    for tile in tiles(call):
        if tile.queries.start == 0:
            matrices = tile.exps.new_zeros(*tile.exps.shape[:2], queries, keys)
        torch.div(tile.exps, tile.total, out=matrices[:, :, tile.queries, tile.keys])
        if tile.queries.stop < queries:
            continue
        if call.query_mask is None:
            yield tile, matrices.sub_(matrices.mean(2, keepdim=True))
        else:
            real = call.query_mask[tile.samples, None, :, None].to(matrices.dtype)
            mean = matrices.mul_(real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
            yield tile, matrices.sub_(mean).mul_(real)


def _multiply_held(matrices: Float[Tensor, "matrix row key"], vectors: Tensor) -> Float[Tensor, "matrix key"]:
    """Return MᵀMx of each matrix: by rows times matrices, which are faster than matrices times columns."""
    return torch.bmm(torch.bmm(vectors[:, None], matrices.mT), matrices)[:, 0]


def _multiply_tiles(call: AttentionCall, vectors: Tensor) -> Float[Tensor, "matrix key"]:
    """Return Aᵀ(I − 11ᵀ/n)A x = Aᵀ(Ax) − (Aᵀ1)·mean(Ax) for one x per sample and head, in one pass."""
    batch, heads, queries, _ = call.query.shape
    mask = call.query_mask if call.query_mask is not None else call.query.new_ones(batch, queries, dtype=torch.bool)
    real, vector = mask.to(call.query.dtype), vectors.view(batch, heads, -1)
    total = call.query.new_zeros(batch, heads)
    product, mass = torch.zeros_like(vector), torch.zeros_like(vector)
    for tile in tiles(call):
        at = tile.at_keys
        factor = real[tile.samples, None, None, tile.queries] / tile.total.mT
        image = vector[at][..., None, :] @ tile.exps.mT * factor
        total[tile.samples, tile.heads] += image.sum((-1, -2))
        transposed = torch.cat([image * factor, factor], dim=-2) @ tile.exps
        product[at] += transposed[..., 0, :]
        mass[at] += transposed[..., 1, :]
    mean = total / real.sum(-1, keepdim=True).clamp(min=1)
    return (product - mass * mean[..., None]).flatten(0, 1)


@lru_cache(maxsize=32)
def _start_vector(keys: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " key"]:
    """Return the unit vector that Lanczos steps begin with: copied to a device once."""
    start = torch.randn(keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (start / start.norm()).to(device, dtype)


def _largest_eigenvalue(diagonal: list[Tensor], off_diagonal: list[Tensor]) -> Tensor:
    """Return the largest eigenvalue of the tridiagonal matrix of the Lanczos steps; NaN if it is not finite."""
    matrix = torch.diag_embed(torch.stack(diagonal, -1))
    if off_diagonal:
        beside = torch.stack(off_diagonal, -1)
        matrix = matrix + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    is_finite = matrix.isfinite().flatten(-2).all(-1)
    largest = torch.linalg.eigvalsh(matrix.where(is_finite[..., None, None], 0.0))[..., -1].clamp(min=0)
    return largest.masked_fill(~is_finite, math.nan)
