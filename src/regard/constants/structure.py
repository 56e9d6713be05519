"""Constants approximated by forms that cost less than a dense matrix; PAPA (arXiv 2211.03495) did not try them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.constants.constants import Constants, Layer
from regard.constants.lengths import fit_length
from regard.constants.patterns import offsets
from regard.errors import UserError, check_choice

Form = Literal["low-rank", "columns+band", "top-k", "toeplitz"]
FORMS: tuple[Form, ...] = ("low-rank", "columns+band", "top-k", "toeplitz")
Matrices = Float[Tensor, "head query key"]


def approximate(constants: Constants, form: Form, size: int) -> Constants:
    """Return constants of a cheaper form, without counts. The matrix of each head is approximated alone.

    * "low-rank": the nearest matrix of rank `size` in the Frobenius norm. Its entries may be negative; a row is divided
      by its sum of absolute values when it is applied.
    * "columns+band": the diagonals up to `size` − 1 off the main one, and the `size` columns with the largest sums of
      squares beside them.
    * "top-k": the `size` largest entries of each row.
    * "toeplitz": the mean at each offset up to `size` − 1, and one weight for each column of special tokens.

    Other entries are zero. Nothing is normalized; sums of rows are those of the constants, counted if a file of
    averages from before they were kept has none. If token i was in n_i samples, entries of averages weigh √(n_i n_j);
    entries of other constants all weigh the same.
    """
    _check(form, size, constants.length)
    constants = constants.note_row_sums(constants.layers)
    matrices = {}
    for (site, layer), matrix in constants.matrices.items():
        counts = constants.counts.get(site)
        if form == "toeplitz":
            matrices[site, layer] = toeplitz(matrix, size, counts, constants.origin.separators)
        else:
            weight = _weights(matrix, counts)
            matrices[site, layer] = (_APPROXIMATE[form](matrix.double() * weight, size) / weight).to(matrix.dtype)
    note = f"approximated as {form} of size {size}"
    origin = replace(constants.origin, notes=(*constants.origin.notes, note))
    return Constants(matrices=matrices, origin=origin, row_sums=constants.row_sums)


def approximation_error(constants: Constants, other: Constants) -> dict[Layer, Float[Tensor, " head"]]:
    """Return ‖C − C'‖ / ‖C‖ of each head in the Frobenius norm, in float64; NaN if C is zero.

    Entries of averages weigh as in `approximate`, by the counts of the first constants.
    """
    if constants.layers != other.layers or constants.length != other.length:
        sizes = f"{len(constants.layers)} layers of {constants.length} tokens and {len(other.layers)} of {other.length}"
        raise UserError(f"error: expected constants of the same layers and length, got {sizes}")
    errors = {}
    for (site, layer), matrix in constants.matrices.items():
        weight = _weights(matrix, constants.counts.get(site))
        weighted = matrix.double() * weight
        residual = (weighted - other.matrices[site, layer].double() * weight).square().sum((-1, -2))
        errors[site, layer] = (residual / weighted.square().sum((-1, -2))).sqrt()
    return errors


def count_multiply_adds(form: Form | Literal["dense"], size: int, length: int) -> int:
    """Return the multiply-adds of one head for one column of values, of an input of `length` tokens.

    Columns and band count as if they did not overlap.
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
    """Return the nearest matrices of rank `size`, by singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[..., :size] * values[:, None, :size]) @ right[:, :size]


def columns_and_band(matrix: Matrices, size: int) -> Matrices:
    """Return the entries less than `size` off the diagonal, and the `size` largest columns of the others."""
    band = offsets(matrix).abs() < size
    rest = matrix.square().sum(-2) - (matrix * band).square().sum(-2)
    columns = rest.topk(size, dim=-1).indices
    is_selected = torch.zeros_like(rest, dtype=torch.bool).scatter_(-1, columns, True)
    return matrix * (band | is_selected[:, None])


def top_k(matrix: Matrices, size: int) -> Matrices:
    """Return the `size` largest entries of each row."""
    values, indices = matrix.topk(size, dim=-1)
    return torch.zeros_like(matrix).scatter_(-1, indices, values)


def toeplitz(
    matrix: Matrices, size: int, counts: Int[Tensor, "query key"] | None = None, separators: Sequence[int] = ()
) -> Matrices:
    """Return one weight for each offset below `size`, and for the first, the last and the separators' columns."""
    keys = matrix.shape[-1]
    dense = fit_length(matrix, counts, keys, dict(zip(separators, separators, strict=True)))
    mask = offsets(matrix).abs() < size
    mask[:, [0, keys - 1, *separators]] = True
    return dense * mask


_APPROXIMATE = {"low-rank": low_rank, "columns+band": columns_and_band, "top-k": top_k}


def _weights(matrix: Tensor, counts: Tensor | None) -> Tensor:
    """Return factors of the entries in float64, so that the square of each weighs √(n_i n_j)."""
    if counts is None:
        return torch.ones(matrix.shape[1:], dtype=torch.float64)
    query, key = (counts.amax(axis).double().clamp(min=1) ** 0.25 for axis in (1, 0))
    return query[:, None] * key


def _check(form: str, size: int, length: int) -> None:
    check_choice("form", form, FORMS)
    if not 1 <= size <= length:
        raise UserError(f"size: expected 1 to {length}, the length of the constants, got {size}")
