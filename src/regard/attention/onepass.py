"""Output and reductions from the same tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import PER_KEY, PER_QUERY, AttentionCall, ReductionRequest
from regard.attention.reference import unpadded_samples
from regard.attention.tiles import BLIND, ROWS, Tile, tiles


def one_pass(call: AttentionCall, wanted: ReductionRequest, *, output: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The output (batch, head, query, value_width), if asked for, and the wanted reductions by name.

    Computed in the dtype of the call, which must be float32 or float64. Linear in the number of keys in memory.
    """
    result = _output_room(call) if output else None
    rows = _Rows(call, wanted.names & PER_QUERY, wanted.num_first_keys)
    columns = _Columns(call, wanted.names & PER_KEY, wanted.names)
    for tile in tiles(call):
        inverse = tile.total.reciprocal()
        if result is not None:
            _write_output(tile, inverse, result)
        rows.add(tile)
        columns.add(tile, inverse)
    return result, rows.found() | columns.found


def _output_room(call: AttentionCall) -> Tensor:
    """Room for the output, laid out in memory as the host wants it next: (batch, query, head, width)."""
    batch, heads, queries, _ = call.query.shape
    return call.query.new_empty(batch, queries, heads, call.value.shape[-1]).transpose(1, 2)


def _write_output(tile: Tile, inverse: Tensor, output: Tensor) -> None:
    product = tile.exps.new_empty(*tile.exps.shape[:3], tile.value.shape[-1])
    for exps, v, out in zip(tile.exps, tile.value, product, strict=True):
        torch.bmm(exps.view(v.shape[0], -1, exps.shape[-1]), v, out=out.view(v.shape[0], -1, v.shape[-1]))
    torch.mul(product, inverse, out=output[tile.at_queries])


class _Rows:
    """What is wanted of each query: sums over its keys, taken tile by tile; put together for all rows at once.

    The last sums overwrite the scores of a tile.
    """

    def __init__(self, call: AttentionCall, names: frozenset[str], first: int) -> None:
        self.call, self.names = call, names
        batch, heads, queries, _ = call.query.shape

        def room(*more: int) -> Tensor:
            return call.query.new_empty(batch, heads, queries, *more)

        self.base, self.total = room(), room()
        self.tokens = room() if call.sink is not None else None
        self.entropy = room() if "entropy" in names else None
        self.distance = room() if "distance" in names else None
        self.gaps = _gaps(call) if "distance" in names else None
        self.first = room(first).zero_() if "first_mass" in names else None

    def add(self, tile: Tile) -> None:
        if not self.names:
            return
        at = tile.at_queries
        self.base[at], self.total[at] = tile.base[..., 0], tile.total[..., 0]
        if self.first is not None:
            self._add_first(tile, self.first[at])
        if self.tokens is not None:
            torch.sum(tile.exps, -1, out=self.tokens[at])
        if self.entropy is not None:
            torch.sum(tile.scores.mul_(tile.exps), -1, out=self.entropy[at])
        if self.distance is not None and self.gaps is not None:
            first = self.call.query.shape[2] - tile.queries.start
            gaps = self.gaps[: tile.exps.shape[-2], first : first + tile.exps.shape[-1]]
            torch.sum(torch.mul(tile.exps, gaps, out=tile.scores), -1, out=self.distance[at])

    def _add_first(self, tile: Tile, room: Tensor) -> None:
        width, starts = room.shape[-1], self.call.starts
        if starts is None or not any(starts):
            part = tile.exps[..., :width]
            room[..., : part.shape[-1]] = part
            return
        for exps, start, own in zip(tile.exps, starts[tile.samples], room, strict=True):
            part, skipped = exps[..., max(start, 0) : max(start + width, 0)], max(-start, 0)
            own[..., skipped : skipped + part.shape[-1]] = part

    def found(self) -> dict[str, Tensor]:
        """What is wanted, by name."""
        if not self.names:
            return {}
        sees = self.base > BLIND
        inverse = self.total.reciprocal()
        logs = self.total.log2()
        found = {}
        if "lse" in self.names:
            found["lse"] = (logs + self.base).mul_(math.log(2)).masked_fill_(~sees, -math.inf)
        if self.first is not None:
            found["first_mass"] = self.first * inverse[..., None]
        if self.distance is not None:
            found["distance"] = self.distance * inverse
        tokens = sees.to(inverse.dtype) if self.tokens is None else self.tokens * inverse
        if "row_sum" in self.names:
            found["row_sum"] = tokens
        if "virtual_sink_mass" in self.names:
            found["virtual_sink_mass"] = (1 - tokens) * sees
        if self.entropy is not None:
            found["entropy"] = (tokens * logs - self.entropy * inverse) * math.log(2)
        return found


def _gaps(call: AttentionCall) -> Tensor:
    """|i − j| as a table from which a tile takes its part: row r and column m hold |r − m + offset + queries|."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    new: dict[str, Any] = {"device": call.query.device, "dtype": call.query.dtype}
    table = torch.arange(min(ROWS, queries), **new)[:, None] - torch.arange(queries + keys, **new)
    return table.add_(call.offset + queries).abs_()


class _Columns:
    """What is wanted of each key: sums over the real queries; and of the whole matrix: its sum over whole samples.

    The last of them overwrites the exponentials of a tile.
    """

    def __init__(self, call: AttentionCall, names: frozenset[str], all_names: frozenset[str]) -> None:
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        self.found: dict[str, Tensor] = {n: call.query.new_zeros(batch, heads, keys) for n in names}
        if "weights" in all_names:
            self.found["weights"] = call.query.new_zeros(heads, queries, keys)
            self.whole = unpadded_samples(call)
        self.real = None if call.query_mask is None else call.query_mask.to(call.query.dtype)[:, None, None]

    def add(self, tile: Tile, inverse: Tensor) -> None:
        if not self.found:
            return
        factor = inverse.mT
        if self.real is not None:
            factor = factor * self.real[tile.samples, ..., tile.queries]
        if "weights" in self.found:
            matrix = (tile.exps * inverse)[self.whole[tile.samples]].sum(0)
            self.found["weights"][tile.heads, tile.queries, tile.keys] += matrix
        if "column_mass" in self.found:
            self.found["column_mass"][tile.at_keys] += column_sums(factor, tile.exps)
        if "column_square" in self.found:
            self.found["column_square"][tile.at_keys] += column_sums(factor.square(), tile.exps.square_())


def column_sums(factor: Tensor, exps: Tensor) -> Tensor:
    """Σ_i factor_i exps_ij over the rows of a tile: (sample, head, 1, query) and (…, query, key) give (…, key)."""
    return torch.bmm(factor.flatten(0, 1), exps.flatten(0, 1)).view(*exps.shape[:2], -1)
