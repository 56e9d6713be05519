"""The attention matrices of one sample, read layer by layer of a forward: what is wanted of each, never all at once."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall
from regard.attention.operator import expand_bias, simplify
from regard.attention.reduction import ReductionRequest
from regard.attention.tiles import Tile, tiles
from regard.errors import UserError
from regard.hooks.attention_function import Observer
from regard.hooks.modules import attention_kind
from regard.hooks.numbering import CallPosition
from regard.hooks.sites import find_site
from regard.hooks.watch import Watch

Block = tuple[slice, slice, Float[Tensor, "head query key"]]
"""Rows and columns of a layer's matrices, and the weights that stand there."""
Read = Callable[[str, int, AttentionCall, Tensor | None], None]
"""What is done with a layer: its site, its number, its call of the first sample, whose values mean nothing, and the
means of tiles, if they are known."""


class MatrixReader(Observer):
    """Shows the call of each layer of a forward to `read`, while the model runs.

    It is opened inside of a block of `watching` that has seen a whole forward, from which sites are known:

        with watching(model) as watch:
            model(**inputs)
            with observing(model, MatrixReader(watch, read), list(watch.locations)):
                model(**inputs)

    Of a batch it reads the first sample. Raises UserError for layers that attend several times in a forward.
    """

    def __init__(self, watch: Watch, read: Read) -> None:
        self._watch, self._read = watch, read

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, _ = self._watch.locations[module]
        position = self._watch.latest
        if sequences.forward is not None and not position.is_repeat:
            _show(self._watch, self._read, module, position, call)
        return None


class CallRecorder(Observer):
    """Records the calls of a forward without their values, to read them when it is over instead of in another one.

    It is opened like a `MatrixReader`, for the forward from which sites are known. Where tiles of a softmax are
    computed in this forward anyway, it sums them to `num_tiles` × `num_tiles` means of each matrix.

    Attributes:
        is_complete: Whether all calls were recorded, as their operands take no more than `limit` bytes together.
    """

    def __init__(self, watch: Watch, limit: int, num_tiles: int) -> None:
        self._watch, self._limit, self._num_tiles = watch, limit, num_tiles
        self._calls: list[tuple[nn.Module, CallPosition, AttentionCall, TileSums]] = []
        self._bytes: dict[int, int] = {}
        self.is_complete = True

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, _ = self._watch.locations[module]
        position = self._watch.latest
        if not self.is_complete or sequences.forward is None or position.is_repeat:
            return None
        recorded = replace(call.detach(), value=call.key.detach())
        for tensor in (getattr(recorded, part.name) for part in fields(recorded)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._bytes[storage.data_ptr()] = storage.nbytes()
        if sum(self._bytes.values()) > self._limit:
            self.is_complete = False
            self._calls.clear()
            return None
        sums = TileSums(call, self._num_tiles)
        self._calls.append((module, position, recorded, sums))
        return call, ReductionRequest(visitors=(sums.add,))

    def after_attention(self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: Any) -> None:
        self._calls[-1][-1].finish()

    def replay(self, read: Read) -> None:
        """Show all calls to `read`, as a `MatrixReader` would. Raises UserError like it."""
        assert self.is_complete
        for module, position, call, sums in self._calls:
            _show(self._watch, read, module, position, call, sums.means)


def _show(
    watch: Watch,
    read: Read,
    module: nn.Module,
    position: CallPosition,
    call: AttentionCall,
    tiles: Tensor | None = None,
) -> None:
    if position.part:
        name = type(module).__name__
        raise UserError(
            f"cannot show the matrices of {name}, which attends several times in a forward; choose another part of the "
            "model (part, --part)"
        )
    sequences, path = watch.locations[module]
    site = find_site(sequences, watch.stacks.values(), attention_kind(path, module))
    read(site, position.layer, call.select_samples(slice(0, 1)), tiles)


def weight_blocks(call: AttentionCall) -> Iterator[Block]:
    """Yield the weights of a call's only sample by blocks of rows, as statistics measure them."""
    call = call.detach().to_acc_dtype()
    whole, row = slice(0, call.key.shape[2]), 0
    for block, columns in blocks(call) if call.constant is None else [(expand_bias(call), whole)]:
        weights = (reference.weights(block) if _is_softmax(block) else reference.distribution(block)[0])[0]
        rows = slice(row, row + weights.shape[1])
        yield rows, columns, weights
        row = rows.stop


class TileSums:
    """Sums of the first sample's matrices over parts of queries and keys, as even as whole numbers allow.

    A softmax is never normalized: its exponentials are summed over queries with the normalizers as factors.

    Attributes:
        means: What the queries of a part give to the keys of a part together, on average: (head, part, part). None
            until it is finished, and if nothing was added.
    """

    def __init__(self, call: AttentionCall, count: int) -> None:
        (_, heads, queries, _), keys = call.query.shape, call.key.shape[2]
        like = call.query[:0].to(torch.promote_types(call.query.dtype, torch.float32))
        self._of_query, self._of_key = _parts(queries, count, like), _parts(keys, count, like)
        self._size = heads, self._of_query.shape[1], keys
        self._sums: Tensor | None = None
        self.means: Float[Tensor, "head tall wide"] | None = None

    def add(self, tile: Tile, inverse: Tensor) -> None:
        """Add a tile of a softmax and the reciprocal of its totals."""
        if tile.samples.start:
            return
        (tall, queries), rows = self._of_query.mT.shape, tile.queries
        parts = slice(rows.start * tall // queries, (rows.stop - 1) * tall // queries + 1)
        factor = self._of_query[rows, parts].mT * inverse[0].mT
        self.add_columns(tile.heads, parts, tile.keys, torch.bmm(factor, tile.exps[0]))

    def add_weights(self, rows: slice, columns: slice, weights: Float[Tensor, "head query key"]) -> None:
        """Add weights of some rows of all heads."""
        self.add_columns(slice(None), slice(None), columns, self._of_query[rows].mT @ weights)

    def add_columns(self, heads: slice, parts: slice, columns: slice, sums: Tensor) -> None:
        """Add sums over the queries of some parts."""
        if self._sums is None:
            self._sums = self._of_query.new_zeros(self._size)
        self._sums[heads, parts, columns] += sums

    def finish(self) -> None:
        if self._sums is not None:
            self.means = (self._sums @ self._of_key) / self._of_query.sum(0)[:, None]
            self._sums = None


def tile_means(call: AttentionCall, count: int) -> Float[Tensor, "head tall wide"]:
    """Return the `means` of `TileSums` of a call's only sample."""
    call = simplify(call.detach().to_acc_dtype())[0]
    sums = TileSums(call, count)
    if _is_softmax(call):
        for tile in tiles(call):
            sums.add(tile, tile.total.reciprocal())
    else:
        for block in weight_blocks(call):
            sums.add_weights(*block)
    sums.finish()
    assert sums.means is not None
    return sums.means


def strongest_keys(
    call: AttentionCall, heads: list[int], count: int
) -> tuple[Int[Tensor, "head query {count}"], Float[Tensor, "head query {count}"]]:
    """Return the keys to which each query of some heads of a call's only sample gives most, and their weights.

    They are in order of the weights; 0 with the weight 0 where a query sees fewer.
    """
    call = simplify(call.detach().to_acc_dtype())[0]
    weight = call.query.new_zeros(len(heads), call.query.shape[2], count)
    index = torch.zeros_like(weight, dtype=torch.long)
    if _is_softmax(call):
        for tile in tiles(call.select_heads(heads)):
            top = tile.exps[0].topk(min(count, tile.exps.shape[-1]))
            at = tile.heads, tile.queries, slice(top.values.shape[-1])
            index[at], weight[at] = top.indices + tile.keys.start, top.values / tile.total[0]
    else:
        for rows, columns, weights in weight_blocks(call):
            top = weights[heads].topk(min(count, weights.shape[-1]))
            at = slice(None), rows, slice(top.values.shape[-1])
            index[at], weight[at] = top.indices + columns.start, top.values
    return index.masked_fill(weight == 0, 0), weight


def _is_softmax(call: AttentionCall) -> bool:
    return call.operation is None and call.constant is None


def _parts(size: int, count: int, like: Tensor) -> Float[Tensor, "{size} parts"]:
    """Return 1 where an index is in a part of its range, 0 elsewhere; at most `count` parts."""
    count = min(size, count)
    parts = torch.arange(size, device=like.device) * count // size
    return torch.nn.functional.one_hot(parts, count).to(like)
