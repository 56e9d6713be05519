"""Constants for other lengths than the one they were averaged at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.constants.constants import Constants, Origin
from regard.constants.sources import SOURCES
from regard.errors import UserError


def to_length(constants: Constants, length: int) -> Constants:
    """Constants for inputs of `length` tokens: the crop of longer ones, a fit where they are too short.

    A crop is what an input shorter than the constants gets anyway, renormalised after masking. The fit keeps, for each
    head, the average weight at each relative offset i − j, and of the first and the last key (which hold special
    tokens; of the first alone in causal attention) the average weight at that key instead. Offsets that were never seen
    get the average over the farther half of those that were, before and behind the query. Layout "paper" holds its
    separators at fixed columns: it cannot be cropped, and is fitted to every other length, the average weight of each
    separator at the column that the other length holds it at. Data-free constants are made anew.
    """
    if length < 1:
        raise UserError(f"length: expected at least 1, got {length}")
    old, origin = constants.length, constants.origin
    if length == old:
        return constants
    if origin.source in SOURCES and not origin.notes:
        made = SOURCES[origin.source](length, length)
        matrices = {place: made.expand(len(m), -1, -1).clone() for place, m in constants.matrices.items()}
        return Constants(matrices=matrices, origin=replace(origin, separators=_moved(origin, old, length)))
    if length < old and origin.layout != "paper":
        matrices = {place: m[:, :length, :length].clone() for place, m in constants.matrices.items()}
        return replace(constants, matrices=matrices, counts=_cropped(constants.counts, length), squares={})
    columns = dict(zip(origin.separators, _moved(origin, old, length), strict=True))
    matrices = {
        (site, layer): fit_length(matrix, constants.counts.get(site), length, columns)
        for (site, layer), matrix in constants.matrices.items()
    }
    note = f"fitted from {old} to {length} tokens by relative offset and the columns of special tokens"
    origin = replace(origin, notes=(*origin.notes, note), separators=tuple(columns.values()))
    return Constants(matrices=matrices, origin=origin)


def _cropped(counts: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    return {site: count[:length, :length].clone() for site, count in counts.items()}


def _moved(origin: Origin, old: int, new: int) -> tuple[int, ...]:
    """Where separators stand at another length: as far from the beginning, the middle or the end, what is nearest."""
    found = []
    for column in origin.separators:
        marks = {0: 0, old // 2: new // 2, old - 1: new - 1}
        near = min(marks, key=lambda mark: abs(column - mark))
        found.append(min(max(marks[near] + column - near, 0), new - 1))
    return tuple(found)


def fit_length(
    matrix: Float[Tensor, "head query key"],
    counts: Int[Tensor, "query key"] | None,
    length: int,
    columns: Mapping[int, int] | None = None,
) -> Float[Tensor, "head length length"]:
    """Matrices of another length with the same average weight at each relative offset, and at some keys apart.

    Those keys are the first one, the last one unless nothing stands above the diagonal, and `columns`, from where they
    stand here to where they stand in the result. Averages are weighted by the counts.
    """
    queries, keys = matrix.shape[1:]
    weight = torch.ones(queries, keys) if counts is None else counts.float()
    offset = torch.arange(queries)[:, None] - torch.arange(keys)
    causal = not bool(matrix.triu(1).any())
    apart = {0: 0} | (dict(columns) if columns else {}) | ({} if causal else {keys - 1: length - 1})
    inner = torch.ones(keys, dtype=torch.bool)
    inner[list(apart)] = False
    most = max(queries, keys, length)
    profile = _profile(matrix[:, :, inner], weight[:, inner], offset[:, inner], most)
    result = profile[:, torch.arange(length)[:, None] - torch.arange(length) + most]
    for column, place in apart.items():
        rows = weight[:, column]
        average = (matrix[:, :, column] * rows).sum(-1) / rows.sum().clamp(min=1)
        result[:, :, place] = average[:, None]
    return result.tril() if causal else result


def _profile(matrix: Tensor, weight: Tensor, offset: Tensor, most: int) -> Tensor:
    """The weighted mean of the entries at each offset: (head, most + offset)."""
    index = (offset + most).flatten()
    total = torch.zeros(2 * most + 1).index_add(0, index, weight.flatten())
    sums = torch.zeros(len(matrix), 2 * most + 1).index_add(1, index, (matrix * weight).flatten(1))
    found = sums / total.masked_fill(total == 0, 1)
    steps = torch.arange(-most, most + 1)
    for side in (steps < 0, steps > 0):
        seen = side & (total > 0)
        if not bool(seen.any()):
            continue
        reach = steps[seen].abs().max()
        far = seen & (2 * steps.abs() > reach)
        found[:, side & (steps.abs() > reach)] = (sums[:, far].sum(-1) / total[far].sum())[:, None]
    return found
