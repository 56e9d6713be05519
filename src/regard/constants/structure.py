"""Constants approximated by forms that cost less than a whole matrix, which PAPA (arXiv 2211.03495) did not try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.constants.constants import Constants, Layer
from regard.constants.lengths import fit_length
from regard.errors import UserError, check_choice

Form = Literal["low-rank", "columns+band", "top-k", "toeplitz"]
FORMS: tuple[Form, ...] = ("low-rank", "columns+band", "top-k", "toeplitz")
Matrices = Float[Tensor, "head query key"]


def approximate(constants: Constants, form: Form, size: int) -> Constants:
    """Constants of a cheaper form, each head's matrix approximated on its own; without counts.

    * "low-rank": U·W of rank `size`, nearest in the Frobenius norm. Entries may be negative and stay so, for U·W cannot
      be multiplied by values without them; where it is applied a row is divided by its sum of absolute values.
    * "columns+band": the diagonals up to `size` − 1 off the main one, and the `size` columns with the largest sums of
      squares beside them: PAPA's two findings, that heads look at their neighbourhood and at special tokens.
    * "top-k": the `size` largest entries of each row.
    * "toeplitz": the average at each offset up to `size` − 1, and at the columns of special tokens one weight for all.

    What is left out is zero; nothing is normalised here. An entry of averages weighs √(n_i n_j) where token i was seen
    n_i times, so that rows few inputs reach do not take the places of all others; entries of other constants all weigh
    the same. Where constants are causal, what low rank puts above the diagonal is masked by whoever applies them.
    Raises UserError for another form, and a size below 1 or above the length.
    """
    _check(form, size, constants.length)
    matrices = {}
    for (site, layer), matrix in constants.matrices.items():
        counts = constants.counts.get(site)
        if form == "toeplitz":
            matrices[site, layer] = toeplitz(matrix, size, counts, constants.origin.separators)
        else:
            weight = _weights(matrix, counts)
            matrices[site, layer] = (_PLAIN[form](matrix.double() * weight, size) / weight).to(matrix.dtype)
    note = f"approximated as {form} of size {size}"
    return Constants(matrices=matrices, origin=replace(constants.origin, notes=(*constants.origin.notes, note)))


def approximation_error(constants: Constants, other: Constants) -> dict[Layer, Float[Tensor, " head"]]:
    """‖C − C'‖ / ‖C‖ in the Frobenius norm, by head, in float64; NaN for a head whose C is zero.

    Entries of averages weigh as in `approximate`, by the counts of the first.
    """
    if constants.layers != other.layers or constants.length != other.length:
        raise UserError(
            f"error: expected constants of the same layers and length, got {len(constants.layers)} layers of "
            f"{constants.length} tokens and {len(other.layers)} of {other.length}"
        )
    found = {}
    for place, matrix in constants.matrices.items():
        weight = _weights(matrix, constants.counts.get(place[0]))
        whole = matrix.double() * weight
        missed = (whole - other.matrices[place].double() * weight).square().sum((-1, -2))
        found[place] = (missed / whole.square().sum((-1, -2))).sqrt()
    return found


def count_multiply_adds(form: Form | Literal["dense"], size: int, length: int) -> int:
    """Multiply-adds of one head for a matrix of that form and one column of values, of an input of `length` tokens.

    A dense matrix takes length². Columns and band count as if they did not overlap.
    """
    if form == "dense":
        return length * length
    _check(form, size, length)
    band = length * (2 * size - 1) - size * (size - 1)
    return {
        "low-rank": 2 * size * length,
        "columns+band": size * length + band,
        "top-k": size * length,
        "toeplitz": band + 2 * length,
    }[form]


def low_rank(matrix: Matrices, size: int) -> Matrices:
    """The nearest matrices of that rank, by singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[..., :size] * values[:, None, :size]) @ right[:, :size]


def columns_and_band(matrix: Matrices, size: int) -> Matrices:
    """The entries less than `size` off the diagonal, and of the rest the columns with the largest sums of squares."""
    band = _offset(matrix).abs() < size
    rest = matrix.square().sum(-2) - (matrix * band).square().sum(-2)
    columns = rest.topk(size, dim=-1).indices
    kept = torch.zeros_like(rest, dtype=torch.bool).scatter_(-1, columns, True)
    return matrix * (band | kept[:, None])


def top_k(matrix: Matrices, size: int) -> Matrices:
    """The largest entries of each row."""
    found = matrix.topk(size, dim=-1)
    return torch.zeros_like(matrix).scatter_(-1, found.indices, found.values)


def toeplitz(
    matrix: Matrices, size: int, counts: Int[Tensor, "query key"] | None = None, separators: Sequence[int] = ()
) -> Matrices:
    """One weight for each offset below `size`, and for the first, the last and other columns of special tokens."""
    keys = matrix.shape[-1]
    whole = fit_length(matrix, counts, keys, dict(zip(separators, separators, strict=True)))
    kept = _offset(matrix).abs() < size
    kept[:, [0, keys - 1, *separators]] = True
    return whole * kept


_PLAIN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "low-rank": low_rank,
    "columns+band": columns_and_band,
    "top-k": top_k,
}


def _weights(matrix: Tensor, counts: Tensor | None) -> Tensor:
    """By how much to multiply each entry, so that its square weighs √(n_i n_j): (query, key), float64."""
    if counts is None:
        return torch.ones(matrix.shape[1:], dtype=torch.float64)
    query, key = (counts.amax(axis).double().clamp(min=1) ** 0.25 for axis in (1, 0))
    return query[:, None] * key


def _offset(matrix: Tensor) -> Tensor:
    """Query minus key, (query, key)."""
    queries, keys = matrix.shape[1:]
    return torch.arange(queries, device=matrix.device)[:, None] - torch.arange(keys, device=matrix.device)


def _check(form: str, size: int, length: int) -> None:
    check_choice("form", form, FORMS)
    if not 1 <= size <= length:
        raise UserError(f"size: expected 1 to {length}, the length of the constants, got {size}")
