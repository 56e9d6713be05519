"""Output and reductions of softmax attention from the same tiles."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.reduction import ReductionRequest, unpadded_samples
from regard.attention.tiles import UNSEEN, Tile, max_rows, tiles
from regard.attention.tracing import cached_for


def one_pass(
    call: AttentionCall, request: ReductionRequest, *, output: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the output of a call (of float32 or float64) if asked for, and reductions by name, in linear memory."""
    result = None
    if output:  # in memory as the host wants it: (batch, query, head, width)
        batch, heads, queries, _ = call.query.shape
        result = call.query.new_empty(batch, queries, heads, call.value.shape[-1]).transpose(1, 2)
    rows, columns = _RowReductions(call, request), _ColumnReductions(call, request)
    for tile in tiles(call):
        inverse = tile.total.reciprocal()
        if result is not None:
            _write_output(tile, inverse, result)
        for visit in request.visitors:
            visit(tile, inverse)
        rows.add(tile)
        columns.add(tile, inverse)
    return result, rows.results() | columns.tensors


def _write_output(tile: Tile, inverse: Tensor, output: Tensor) -> None:
    samples, heads, rows, keys = tile.exps.shape
    product = tile.exps.new_empty(samples, heads, rows, tile.value.shape[-1])
    for sample in range(samples):
        value = tile.value[sample]
        flat = product[sample].view(len(value), -1, value.shape[-1])
        torch.bmm(tile.exps[sample].view(len(value), -1, keys), value, out=flat)
    torch.mul(product, inverse, out=output if tile.is_whole else output[tile.at_queries])


class _RowReductions:
    """Reductions by query: sums over keys, tile by tile. The last of them overwrite the scores of a tile."""

    def __init__(self, call: AttentionCall, request: ReductionRequest) -> None:
        self.call, self.names, self.num_first_keys = call, request.by_axis("query"), request.num_first_keys
        self.sums: dict[str, Tensor] = {}

    def add(self, tile: Tile) -> None:
        if not self.names:
            return
        sums = self._sums(tile)
        if tile.is_whole:
            self.sums = sums
            return
        for name, part in sums.items():
            if name not in self.sums:
                self.sums[name] = part.new_empty(*self.call.query.shape[:3], *part.shape[3:])
            self.sums[name][tile.at_queries] = part

    def _sums(self, tile: Tile) -> dict[str, Tensor]:
        sums = {"base": tile.base[..., 0], "total": tile.total[..., 0]}
        if "first_mass" in self.names:
            sums["first_mass"] = self._first(tile)
        if self.call.sink is not None:
            sums["tokens"] = tile.exps.sum(-1)
        if "entropy" in self.names:
            sums["entropy"] = tile.scores.mul_(tile.exps).sum(-1)
        if "distance" in self.names:
            sums["distance"] = torch.mul(tile.exps, self._distances(tile), out=tile.scores).sum(-1)
        return sums

    def _distances(self, tile: Tile) -> Tensor:
        """Return |i − j| of a tile: a part of the table of the call."""
        call, (rows, columns) = self.call, tile.exps.shape[-2:]
        queries, last = call.query.shape[2], call.offset + call.query.shape[2]
        shape, first = (min(max_rows(call), queries), queries + call.key.shape[2]), queries - tile.queries.start
        table = cached_for(tile.exps, _distance_table)(*shape, last, call.query.dtype, call.query.device)
        first += tile.keys.start
        return table[:rows, first : first + columns]

    def _first(self, tile: Tile) -> Tensor:
        width, starts, first = self.num_first_keys, self.call.starts, tile.keys.start
        out = tile.exps.new_zeros(*tile.exps.shape[:3], width)
        if starts is None or not any(starts):
            part = tile.exps[..., : max(width - first, 0)]
            out[..., first : first + part.shape[-1]] = part
            return out
        for exps, sample_start, sample_out in zip(tile.exps, starts[tile.samples], out, strict=True):
            start = sample_start - first
            part, skipped = exps[..., max(start, 0) : max(start + width, 0)], max(-start, 0)
            sample_out[..., skipped : skipped + part.shape[-1]] = part
        return out

    def results(self) -> dict[str, Tensor]:
        if not self.names:
            return {}
        sums, sees_keys = self.sums, self.sums["base"] > UNSEEN
        inverse, logs = sums["total"].reciprocal(), sums["total"].log2()
        tokens = sums["tokens"] * inverse if "tokens" in sums else sees_keys.to(inverse.dtype)
        results = {}
        if "lse" in self.names:
            results["lse"] = (logs + sums["base"]).mul_(math.log(2)).masked_fill_(~sees_keys, -math.inf)
        if "first_mass" in self.names:
            results["first_mass"] = sums["first_mass"] * inverse[..., None]
        if "distance" in self.names:
            results["distance"] = sums["distance"] * inverse
        if "row_sum" in self.names:
            results["row_sum"] = tokens
        if "virtual_sink_mass" in self.names:
            results["virtual_sink_mass"] = (1 - tokens) * sees_keys
        if "entropy" in self.names:
            results["entropy"] = (tokens * logs - sums["entropy"] * inverse) * math.log(2)
        return results


@lru_cache(maxsize=1)  # that of the layer before
def _distance_table(rows: int, columns: int, last: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table of |i − j| that every tile is a part of: row r, column m is |last + r − m|; never write to it."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    return (torch.arange(rows, **options)[:, None] - torch.arange(columns, **options)).add_(last).abs_()


class _ColumnReductions:
    """Reductions by key, over real queries, and by call. The last of them overwrites the exponentials of a tile."""

    def __init__(self, call: AttentionCall, request: ReductionRequest) -> None:
        self.call, self.by_key = call, request.by_axis("key")
        self.tensors: dict[str, Tensor] = {}
        if "weights" in request.names:
            _, heads, queries, _ = call.query.shape
            self.tensors["weights"] = call.query.new_zeros(heads, queries, call.key.shape[2])
            self.is_whole = unpadded_samples(call)
        self.query_mask = None if call.query_mask is None else call.query_mask.to(call.query.dtype)[:, None, None]

    def add(self, tile: Tile, inverse: Tensor) -> None:
        if "weights" in self.tensors:
            self._add_weights(tile, inverse)
        if not self.by_key:
            return
        sums = self._sums(tile, inverse)
        if tile.is_whole:
            self.tensors |= sums
            return
        for name, part in sums.items():
            if name not in self.tensors:
                self.tensors[name] = part.new_zeros(*self.call.query.shape[:2], self.call.key.shape[2])
            self.tensors[name][tile.at_keys] += part

    def _sums(self, tile: Tile, inverse: Tensor) -> dict[str, Tensor]:
        rows = None if self.query_mask is None else self.query_mask[tile.samples, ..., tile.queries]
        factor = inverse.mT if rows is None else inverse.mT * rows
        sums = {"column_mass": _column_sums(factor, tile.exps)}
        if self.by_key & {"column_sum", "column_square"}:
            sums |= _exact_sums(tile, factor, rows, sums["column_mass"])
        return {name: sums[name] for name in self.by_key}

    def _add_weights(self, tile: Tile, inverse: Tensor) -> None:
        """Add the weights of samples without padding; what is not a number in the others is left out with them."""
        total, is_whole = self.tensors["weights"][tile.heads, tile.queries, tile.keys], self.is_whole[tile.samples]
        if total.device.type != "cpu":  # nothing is read from a GPU
            total += (tile.exps * inverse).masked_fill_(~is_whole[:, None, None, None], 0.0).sum(0)
            return
        for sample in is_whole.nonzero().flatten().tolist():
            total.addcmul_(tile.exps[sample], inverse[sample])


def _exact_sums(tile: Tile, factor: Tensor, rows: Tensor | None, mass: Tensor) -> dict[str, Tensor]:
    """Return Σ a and Σ a² of the columns of a tile in float64, from sums around m ≈ the mean. Overwrites `exps`.

    `rows` are 1 where a query counts; None: all do.
    """
    if rows is None:
        rows, count = torch.ones_like(factor), torch.tensor(float(factor.shape[-1]))
    else:
        count = rows.sum(-1).clamp_(min=1)
        rows = rows.expand_as(factor)
    mean = mass / count
    deviations = torch.addcmul(mean[:, :, None].neg(), tile.exps, factor.mT, out=tile.exps)
    first = _column_sums(rows, deviations).double()
    second = _column_sums(rows, deviations.square_()).double()
    mean = mean.double()
    total = first + mean * count
    return {"column_sum": total, "column_square": second + mean * (first + total)}


def _column_sums(factor: Tensor, exps: Tensor) -> Tensor:
    """Return Σ_i factor_i exps_ij over the rows of a tile, (sample, head, key), of factors (sample, head, 1, query)."""
    return torch.bmm(factor.flatten(0, 1), exps.flatten(0, 1)).view(*exps.shape[:2], exps.shape[-1])
