"""Output and reductions from the same tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attention.call import PER_KEY, PER_QUERY, Call, Wanted
from regard.attention.reference import whole
from regard.attention.tiles import Tile, tiles


def one_pass(call: Call, wanted: Wanted, *, output: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The output (batch, head, query, value_width), if asked for, and the wanted reductions by name.

    Computed in the dtype of the call, which must be float32 or float64. Linear in the number of keys in memory.
    """
    result = _Result(call, wanted, output)
    for tile in tiles(call):
        result.add(tile)
    return result.output, result.reductions


class _Result:
    """The tensors that the tiles of one call are added to."""

    def __init__(self, call: Call, wanted: Wanted, output: bool) -> None:
        self.call, self.wanted = call, wanted
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        new = call.query.new_zeros
        self.output = _empty_output(call) if output else None
        self.reductions: dict[str, Tensor] = {n: new(batch, heads, queries) for n in wanted.names & PER_QUERY}
        self.reductions |= {n: new(batch, heads, keys) for n in wanted.names & PER_KEY}
        if "first_mass" in wanted.names:
            self.reductions["first_mass"] = new(batch, heads, queries, wanted.first)
        if "lse" in wanted.names:
            self.reductions["lse"].fill_(-math.inf)
        if "weights" in wanted.names:
            self.reductions["weights"] = new(heads, queries, keys)
            self.whole = whole(call).tolist()
        self.real = None if call.query_real is None else call.query_real.to(call.query.dtype)

    def add(self, tile: Tile) -> None:
        """Everything that is wanted of one tile. Order matters: the last steps overwrite the tile."""
        if self.output is not None:
            self._output(tile)
        names = self.wanted.names
        if names & PER_QUERY:
            self._rows(tile)
        if names & PER_KEY or "weights" in names:
            self._columns(tile)

    def _output(self, tile: Tile) -> None:
        assert self.output is not None
        groups = self.call.value.shape[1] * (tile.heads.stop - tile.heads.start) // self.call.query.shape[1]
        first = tile.heads.start // self.call.shares
        value = self.call.value[tile.batch, first : first + groups, tile.keys]
        product = torch.bmm(tile.exps.view(groups, -1, tile.exps.shape[-1]), value)
        torch.mul(product.view(*tile.exps.shape[:2], -1), tile.inverse, out=self.output[tile.at_queries])

    def _rows(self, tile: Tile) -> None:
        r, at = self.reductions, tile.at_queries
        inverse = tile.inverse[..., 0]
        if "lse" in r:
            r["lse"][at] = tile.total.log2().add_(tile.base)[..., 0] * math.log(2)
        if "first_mass" in r:
            start = self.call.starts[tile.batch] if self.call.starts else 0
            first = tile.exps[..., max(start, 0) : max(start + self.wanted.first, 0)] * tile.inverse
            skipped = max(-start, 0)
            r["first_mass"][at][..., skipped : skipped + first.shape[-1]] = first
        if "distance" in r:
            r["distance"][at] = (tile.exps * self._gaps(tile)).sum(-1) * inverse
        if r.keys() & {"row_sum", "virtual_sink_mass", "entropy"}:
            tokens = tile.exps.sum(-1) * inverse if self.call.sink is not None else (inverse > 0).to(inverse.dtype)
            if "row_sum" in r:
                r["row_sum"][at] = tokens
            if "virtual_sink_mass" in r:
                r["virtual_sink_mass"][at] = (1 - tokens) * (inverse > 0)
            if "entropy" in r:
                logs = tile.total.log2()[..., 0].masked_fill_(inverse == 0, 0.0)
                r["entropy"][at] = (tokens * logs - tile.scores.mul_(tile.exps).sum(-1) * inverse) * math.log(2)

    def _columns(self, tile: Tile) -> None:
        r, at = self.reductions, tile.at_keys
        factor = tile.inverse.mT
        if self.real is not None:
            factor = factor * self.real[tile.batch, tile.queries]
        if "column_mass" in r:
            r["column_mass"][at] += torch.bmm(factor, tile.exps)[:, 0]
        if "weights" in r and self.whole[tile.batch]:
            r["weights"][tile.heads, tile.queries, tile.keys] += tile.exps * tile.inverse
        if "column_square" in r:
            r["column_square"][at] += torch.bmm(factor.square(), tile.exps.square_())[:, 0]

    def _gaps(self, tile: Tile) -> Tensor:
        """|i − j| of a tile, in keys."""
        device, dtype = tile.exps.device, tile.exps.dtype
        queries = torch.arange(tile.queries.start, tile.queries.stop, device=device, dtype=dtype) + self.call.offset
        return (queries[:, None] - torch.arange(tile.exps.shape[-1], device=device, dtype=dtype)).abs_()


def _empty_output(call: Call) -> Tensor:
    """Room for the output, laid out in memory as the host wants it next: (batch, query, head, width)."""
    batch, heads, queries, _ = call.query.shape
    return call.query.new_empty(batch, queries, heads, call.value.shape[-1]).transpose(1, 2)
