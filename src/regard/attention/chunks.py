"""What a call is cut into: some heads at a time, and of a causal matrix the tiles seen under a window and a prefix."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from regard.attention.call import slices
from regard.attention.device_choice import choose_for

BYTES = {"cpu": 512 << 10, "cuda": 64 << 20}
"""Size of what is computed together."""
RowChunk = tuple[slice, slice]
"""Some samples, and some key/value heads of each."""


class RowChunks:
    """Chunks of the key/value heads of a batch: less than all of a sample, or all of some samples.

    A chunk is contiguous, in float32 at least, with the queries of a shared key together.
    `queries_per_key` query heads share one of them; `like` is an empty tensor in the dtype of the computation.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.batch, self.groups, self.length, self.width = key.shape
        self.queries_per_key = query.shape[1] // self.groups
        self.like = query.new_empty(0, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
        self.num_groups = 1

    def fit(self, entries: int) -> None:
        """Choose `num_groups` so that `entries` for each query head fill about `BYTES`."""
        size = choose_for(self.like.device, BYTES)
        heads = max(1, size // (self.like.element_size() * entries * self.queries_per_key))
        samples = min(max(self.batch, 1), heads // self.groups)  # a batch may have no rows
        self.num_groups = samples * self.groups if heads >= self.groups else heads

    def __iter__(self) -> Iterator[RowChunk]:
        return product(slices(self.batch, max(1, self.num_groups // self.groups)), slices(self.groups, self.num_groups))

    def take(self, tensor: Tensor, chunk: RowChunk) -> Tensor:
        """Return a chunk of a (batch, head, token, width) as (sample · group, token · queries_per_key, width)."""
        part = self._view(tensor, chunk).to(self.like.dtype)
        return part.reshape(-1, part.shape[2] * part.shape[3], part.shape[4]).contiguous()

    def put(self, part: Tensor, tensor: Tensor, chunk: RowChunk) -> None:
        """Write into a tensor what `take` would give."""
        view = self._view(tensor, chunk)
        view.copy_(part.unflatten(1, (-1, view.shape[3])).unflatten(0, view.shape[:2]))

    def _view(self, tensor: Tensor, chunk: RowChunk) -> Tensor:
        sample, group = chunk
        return tensor[sample].unflatten(1, (self.groups, -1))[:, group].transpose(2, 3)


@dataclass(frozen=True)
class Stretch:
    """Consecutive keys of a tile, and those of them that some queries may not see: counted from the last key."""

    keys: slice
    columns: slice
    """Columns of the keys in the tile."""
    edges: tuple[slice, ...]

    def columns_of(self, edge: slice) -> slice:
        """Return the columns of some of its keys."""
        return _shift(edge, self.columns.start - self.keys.start)


@dataclass(frozen=True)
class Tile:
    """Queries, and the keys that they meet."""

    row: slice
    stretches: tuple[Stretch, ...]

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.stretches[-1].columns.stop


@dataclass(frozen=True, kw_only=True)
class AttentionSpan:
    """What the queries of a causal sequence see: the last `window` keys up to their own, and the first `prefix`."""

    length: int
    window: int
    prefix: int

    def tiles(self, num_rows: int, max_keys: int | None) -> list[Tile]:
        """Return tiles of so many queries with the keys that these meet and few others, at most `max_keys`."""
        tiles = []
        for row in slices(self.length, num_rows):
            stretches = self._stretches(row)
            if max_keys is None:
                tiles.append(self._tile(row, stretches))
                continue
            for keys in stretches:
                parts = slices(keys.stop - keys.start, max_keys)
                tiles += [self._tile(row, [_shift(part, keys.start)]) for part in parts]
        return tiles

    def _stretches(self, row: slice) -> list[slice]:
        begin = max(0, row.start - self.window + 1)
        if begin > self.prefix > 0:
            return [slice(0, self.prefix), slice(begin, row.stop)]
        return [slice(0, max(row.stop, self.prefix)) if self.prefix else slice(begin, row.stop)]

    def _tile(self, row: slice, ranges: list[slice]) -> Tile:
        column, stretches = 0, []
        for keys in ranges:
            columns = slice(column, column + keys.stop - keys.start)
            edges = tuple(self._from_last(edge) for edge in self._edges(row, keys))
            stretches.append(Stretch(self._from_last(keys), columns, edges))
            column = columns.stop
        return Tile(row, tuple(stretches))

    def _edges(self, row: slice, keys: slice) -> list[slice]:
        """Return the keys that only some queries see: future ones, and ones before a window; as one if they overlap."""
        future = slice(max(row.start + 1, self.prefix, keys.start), min(row.stop, keys.stop))
        past = slice(max(keys.start, self.prefix), min(row.stop - self.window, keys.stop))
        edges = [edge for edge in (past, future) if edge.start < edge.stop]
        if len(edges) == 2 and past.stop > future.start:
            return [slice(past.start, future.stop)]
        return edges

    def _from_last(self, keys: slice) -> slice:
        return slice(self.length - keys.stop, self.length - keys.start)


def _shift(keys: slice, distance: int) -> slice:
    return slice(keys.start + distance, keys.stop + distance)
