"""Constants for other lengths than the one they were averaged at."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.constants.constants import SOURCES, Constants, Origin
from regard.errors import UserError


def to_length(constants: Constants, length: int) -> Constants:
    """Return constants for inputs of `length` tokens.

    * Longer constants are cropped, as for any input that is shorter than they are.
    * Shorter ones are fitted, see `fit_length`.
    * Constants of the layout "paper" are fitted to every other length, with their separators moved.
    * Data-free constants are made anew.

    Sums of rows are counted, if a file of averages from before they were kept has none.
    """
    if length < 1:
        raise UserError(f"length: expected at least 1, got {length}")
    old, origin = constants.length, constants.origin
    if length == old:
        return constants
    constants = constants.note_row_sums(constants.layers)
    if origin.source in SOURCES and not origin.notes:
        matrix = SOURCES[origin.source](length, length)
        matrices = {key: matrix.expand(len(m), -1, -1).clone() for key, m in constants.matrices.items()}
        return Constants(matrices=matrices, origin=replace(origin, separators=_move_separators(origin, old, length)))
    if length < old and origin.layout != "paper":
        matrices = {key: m[:, :length, :length].clone() for key, m in constants.matrices.items()}
        counts = {site: count[:length, :length].clone() for site, count in constants.counts.items()}
        row_sums = {key: sums[:, :length].clone() for key, sums in constants.row_sums.items()}
        return replace(constants, matrices=matrices, counts=counts, squares={}, row_sums=row_sums)
    columns = dict(zip(origin.separators, _move_separators(origin, old, length), strict=True))
    matrices = {
        (site, layer): fit_length(matrix, constants.counts.get(site), length, columns)
        for (site, layer), matrix in constants.matrices.items()
    }
    note = f"fitted from {old} to {length} tokens by relative offset and the columns of special tokens"
    origin = replace(origin, notes=(*origin.notes, note), separators=tuple(columns.values()))
    rows = _rows_by_place(columns, old, length)
    row_sums = {key: constants.sums_of(key)[:, rows] for key in constants.row_sums}
    return Constants(matrices=matrices, origin=origin, row_sums=row_sums)


def _move_separators(origin: Origin, old: int, new: int) -> tuple[int, ...]:
    """Return the columns of separators at another length: as far from the beginning, the middle or the end."""
    landmarks = {0: 0, old // 2: new // 2, old - 1: new - 1}
    columns = []
    for column in origin.separators:
        nearest = min(landmarks, key=lambda landmark: abs(column - landmark))
        columns.append(min(max(landmarks[nearest] + column - nearest, 0), new - 1))
    return tuple(columns)


def _rows_by_place(columns: Mapping[int, int], old: int, new: int) -> Int[Tensor, " row"]:
    """Return the row of `old` for each of `new` that stands as far behind the same special token, or the beginning.

    Where there are fewer such rows, it is the last before the next special token.
    """
    places = sorted({0: 0, **columns}.items())
    ends = [place for place, _ in places[1:]] + [old]
    rows = torch.arange(new)
    for (place, moved), end in zip(places, ends, strict=True):
        rows[moved:] = (place + torch.arange(new - moved)).clamp(max=end - 1)
    return rows


def fit_length(
    matrix: Float[Tensor, "head query key"],
    counts: Int[Tensor, "query key"] | None,
    length: int,
    columns: Mapping[int, int] | None = None,
) -> Float[Tensor, "head length length"]:
    """Return matrices of another length with the same mean weight at each relative offset i − j.

    Some keys, which hold special tokens, keep their own mean weight instead: the first, the last of matrices that are
    not causal, and `columns`. Offsets beyond those of the matrix get the mean over the farther half of its offsets on
    that side of the query.

    `counts` are the weights of the means; None: all equal. `columns` are other special keys, and their new columns.
    """
    queries, keys = matrix.shape[1:]
    weight = torch.ones(queries, keys) if counts is None else counts.float()
    offset = torch.arange(queries)[:, None] - torch.arange(keys)
    causal = not bool(matrix.triu(1).any())
    special = {0: 0} | (dict(columns) if columns else {}) | ({} if causal else {keys - 1: length - 1})
    inner = torch.ones(keys, dtype=torch.bool)
    inner[list(special)] = False
    max_offset = max(queries, keys, length)
    profile = _mean_by_offset(matrix[:, :, inner], weight[:, inner], offset[:, inner], max_offset)
    result = profile[:, torch.arange(length)[:, None] - torch.arange(length) + max_offset]
    for column, new_column in special.items():
        rows = weight[:, column]
        mean = (matrix[:, :, column] * rows).sum(-1) / rows.sum().clamp(min=1)
        result[:, :, new_column] = mean[:, None]
    return result.tril() if causal else result


def _mean_by_offset(matrix: Tensor, weight: Tensor, offset: Tensor, max_offset: int) -> Tensor:
    """Return the weighted mean of the entries at each offset: (head, max_offset + offset)."""
    index = (offset + max_offset).flatten()
    weight = weight.to(matrix.dtype)
    total = matrix.new_zeros(2 * max_offset + 1).index_add(0, index, weight.flatten())
    sums = matrix.new_zeros(len(matrix), 2 * max_offset + 1).index_add(1, index, (matrix * weight).flatten(1))
    means = sums / total.masked_fill(total == 0, 1)
    offsets = torch.arange(-max_offset, max_offset + 1)
    for side in (offsets < 0, offsets > 0):
        known = side & (total > 0)
        if not bool(known.any()):
            continue
        farthest = offsets[known].abs().max()
        far = known & (2 * offsets.abs() > farthest)
        means[:, side & (offsets.abs() > farthest)] = (sums[:, far].sum(-1) / total[far].sum())[:, None]
    return means
