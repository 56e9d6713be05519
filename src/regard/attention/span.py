"""Which tiles of a causal matrix are computed under a window and a prefix."""

from dataclasses import dataclass

from regard.attention.call import slices


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
