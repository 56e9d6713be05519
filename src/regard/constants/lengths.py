"""Constants for other lengths than the one they were averaged at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.constants.constants import Constants
from regard.errors import UserError


def at(constants: Constants, length: int) -> Constants:
    """Constants for inputs of `length` tokens: the crop of longer ones, a fit where they are too short.

    A crop is what an input shorter than the constants gets anyway, renormalised after masking. The fit keeps, for each
    head, the average weight at each relative offset i − j, and of the first and the last key (which hold special
    tokens; of the first alone in causal attention) the average weight at that key instead. Layout "paper" holds its
    separators at fixed columns: it cannot be cropped, and is fitted to every other length.
    """
    if length < 1:
        raise UserError(f"length: expected at least 1, got {length}")
    if length == constants.length:
        return constants
    held = constants.origin.layout == "paper"
    if length < constants.length and not held:
        matrices = {place: m[:, :length, :length].clone() for place, m in constants.matrices.items()}
        return replace(constants, matrices=matrices, counts=_cropped(constants.counts, length), squares={})
    matrices = {
        (site, layer): fitted(matrix, constants.counts.get(site), length)
        for (site, layer), matrix in constants.matrices.items()
    }
    note = f"fitted from {constants.length} to {length} tokens by relative offset, first and last key"
    old = constants.length
    separators = tuple(min(round(column * length / old), length - 1) for column in constants.origin.separators)
    separators = tuple(
        length - 1 if c == old - 1 else s for c, s in zip(constants.origin.separators, separators, strict=True)
    )
    origin = replace(constants.origin, notes=(*constants.origin.notes, note), separators=separators)
    return Constants(matrices=matrices, origin=origin)


def _cropped(counts: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    return {site: count[:length, :length].clone() for site, count in counts.items()}


def fitted(
    matrix: Float[Tensor, "head query key"], counts: Int[Tensor, "query key"] | None, length: int
) -> Float[Tensor, "head length length"]:
    """Matrices of another length with the same average weight at each relative offset, first and last key apart."""
    queries, keys = matrix.shape[1:]
    weight = torch.ones(queries, keys) if counts is None else counts.float()
    offset = torch.arange(queries)[:, None] - torch.arange(keys)
    causal = not bool(matrix.triu(1).any())
    inner = torch.ones(keys, dtype=torch.bool)
    inner[0] = False
    inner[-1] = causal
    profile = _profile(matrix[:, :, inner], weight[:, inner], (offset + keys)[:, inner], queries + keys)
    wanted = (torch.arange(length)[:, None] - torch.arange(length)).clamp(-keys, queries - 1) + keys
    result = profile[:, wanted]
    for column in (0,) if causal else (0, -1):
        rows = weight[:, column]
        total = rows.sum().clamp(min=1)
        result[:, :, column] = ((matrix[:, :, column] * rows).sum(-1) / total)[:, None]
    return result


def _profile(matrix: Tensor, weight: Tensor, at: Tensor, size: int) -> Tensor:
    """The weighted mean of the entries that share a number in `at`: (head, size); 0 where there is none."""
    index = at.flatten()
    total = torch.zeros(size).index_add(0, index, weight.flatten())
    sums = torch.zeros(len(matrix), size).index_add(1, index, (matrix * weight).flatten(1))
    return sums / total.masked_fill(total == 0, 1)
