"""Output and reductions of softmax attention from the same tiles."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, unpadded_samples
from regard.attention.tiles import UNSEEN, Tile, max_rows, tiles


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
    product = tile.exps.new_empty(*tile.exps.shape[:3], tile.value.shape[-1])
    for exps, v, out in zip(tile.exps, tile.value, product, strict=True):
        torch.bmm(exps.view(v.shape[0], -1, exps.shape[-1]), v, out=out.view(v.shape[0], -1, v.shape[-1]))
    torch.mul(product, inverse, out=output[tile.at_queries])


class _RowReductions:
    """Reductions by query: sums over keys, tile by tile. The last of them overwrite the scores of a tile."""

    def __init__(self, call: AttentionCall, request: ReductionRequest) -> None:
        self.call, self.names = call, request.by_axis("query")
        sums = {"base", "total"} | self.names & {"entropy", "distance"}
        sums |= set() if call.sink is None else {"tokens"}
        self.sums = {name: call.query.new_empty(call.query.shape[:3]) for name in sums}
        if "first_mass" in self.names:
            self.sums["first_mass"] = call.query.new_zeros(*call.query.shape[:3], request.num_first_keys)
        self.distances: Tensor | None = None
        if "distance" in self.names:
            queries, last = call.query.shape[2], call.offset + call.query.shape[2]
            shape = min(max_rows(call), queries), queries + call.key.shape[2]
            self.distances = _distance_table(*shape, last, call.query.dtype, call.query.device)

    def add(self, tile: Tile) -> None:
        if not self.names:
            return
        sums = {name: tensor[tile.at_queries] for name, tensor in self.sums.items()}
        sums["base"].copy_(tile.base[..., 0])
        sums["total"].copy_(tile.total[..., 0])
        if "first_mass" in sums:
            self._add_first(tile, sums["first_mass"])
        if "tokens" in sums:
            torch.sum(tile.exps, -1, out=sums["tokens"])
        if "entropy" in sums:
            torch.sum(tile.scores.mul_(tile.exps), -1, out=sums["entropy"])
        if self.distances is not None:
            first = self.call.query.shape[2] - tile.queries.start
            distances = self.distances[: tile.exps.shape[-2], first : first + tile.exps.shape[-1]]
            torch.sum(torch.mul(tile.exps, distances, out=tile.scores), -1, out=sums["distance"])

    def _add_first(self, tile: Tile, out: Tensor) -> None:
        width, starts = out.shape[-1], self.call.starts
        if starts is None or not any(starts):
            part = tile.exps[..., :width]
            out[..., : part.shape[-1]] = part
            return
        for exps, start, sample_out in zip(tile.exps, starts[tile.samples], out, strict=True):
            part, skipped = exps[..., max(start, 0) : max(start + width, 0)], max(-start, 0)
            sample_out[..., skipped : skipped + part.shape[-1]] = part

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
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        dtypes = {name: WEIGHT_REDUCTIONS[name].dtype for name in request.by_axis("key")}
        self.tensors = {name: call.query.new_zeros(batch, heads, keys, dtype=dtype) for name, dtype in dtypes.items()}
        self.by_key = frozenset(dtypes)
        if "weights" in request.names:
            self.tensors["weights"] = call.query.new_zeros(heads, queries, keys)
            self.is_whole = unpadded_samples(call)
        self.query_mask = None if call.query_mask is None else call.query_mask.to(call.query.dtype)[:, None, None]

    def add(self, tile: Tile, inverse: Tensor) -> None:
        if not self.tensors:
            return
        factor = inverse.mT
        if self.query_mask is not None:
            factor = factor * self.query_mask[tile.samples, ..., tile.queries]
        if "weights" in self.tensors:
            self._add_weights(tile, inverse)
        if not self.by_key:
            return
        mass = _column_sums(factor, tile.exps)
        if "column_mass" in self.by_key:
            self.tensors["column_mass"][tile.at_keys] += mass
        if self.by_key & {"column_sum", "column_square"}:
            for name, sums in self._exact_sums(tile, factor, mass).items():
                if name in self.by_key:
                    self.tensors[name][tile.at_keys] += sums

    def _add_weights(self, tile: Tile, inverse: Tensor) -> None:
        """Add the weights of samples without padding; what is not a number in the others is left out with them."""
        total, is_whole = self.tensors["weights"][tile.heads, tile.queries, tile.keys], self.is_whole[tile.samples]
        if total.device.type != "cpu":  # nothing is read from a GPU
            total += (tile.exps * inverse).masked_fill_(~is_whole[:, None, None, None], 0.0).sum(0)
            return
        for sample in is_whole.nonzero().flatten().tolist():
            total.addcmul_(tile.exps[sample], inverse[sample])

    def _exact_sums(self, tile: Tile, factor: Tensor, mass: Tensor) -> dict[str, Tensor]:
        """Return Σ a and Σ a² of the columns of a tile in float64, from sums around m ≈ the mean. Overwrites `exps`."""
        rows, count = torch.ones_like(factor), torch.tensor(float(factor.shape[-1]))
        if self.query_mask is not None:
            rows = self.query_mask[tile.samples, ..., tile.queries].expand_as(factor)
            count = rows.sum(-1).clamp(min=1)
        mean = mass / count
        deviations = torch.addcmul(mean[:, :, None].neg(), tile.exps, factor.mT, out=tile.exps)
        first = _column_sums(rows, deviations).double()
        second = _column_sums(rows, deviations.square_()).double()
        mean = mean.double()
        total = first + mean * count
        return {"column_sum": total, "column_square": second + mean * (first + total)}


def _column_sums(factor: Tensor, exps: Tensor) -> Tensor:
    """Return Σ_i factor_i exps_ij over the rows of a tile, (sample, head, key), of factors (sample, head, 1, query)."""
    return torch.bmm(factor.flatten(0, 1), exps.flatten(0, 1)).view(*exps.shape[:2], -1)
