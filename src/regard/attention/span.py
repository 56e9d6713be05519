"""Which tiles of the matrix of a causal sequence are computed, where some pairs are beyond a window or in a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Keys of a tile that follow each other, where they stand in it, and which of them some queries may not see.

    Keys are counted from the last.
    """

    keys: slice
    columns: slice
    edges: tuple[slice, ...]

    def inside(self, edge: slice) -> slice:
        """Where some of its keys stand in the tile."""
        begin = self.columns.start - self.keys.start
        return slice(edge.start + begin, edge.stop + begin)


@dataclass(frozen=True)
class Tile:
    """Queries, and the keys they meet."""

    row: slice
    stretches: tuple[Stretch, ...]

    @property
    def width(self) -> int:
        """How many keys these are."""
        return self.stretches[-1].columns.stop


@dataclass(frozen=True, kw_only=True)
class AttentionSpan:
    """What queries see: the last `window` keys up to their own, and the first `prefix` of all."""

    length: int
    window: int
    prefix: int

    def tiles(self, rows: int, keys: int | None) -> list[Tile]:
        """Tiles of so many queries, with all that these meet and few others, or with so many keys at most."""
        found = []
        for first in range(0, self.length, rows):
            row = slice(first, min(first + rows, self.length))
            stretches = self._stretches(row)
            if keys is None:
                found.append(self._tile(row, stretches))
            else:
                found += [self._tile(row, [part]) for whole in stretches for part in _parts(whole, keys)]
        return found

    def _stretches(self, row: slice) -> list[slice]:
        begin = max(0, row.start - self.window + 1)
        if begin > self.prefix > 0:
            return [slice(0, self.prefix), slice(begin, row.stop)]
        return [slice(0, max(row.stop, self.prefix)) if self.prefix else slice(begin, row.stop)]

    def _tile(self, row: slice, stretches: list[slice]) -> Tile:
        column, found = 0, []
        for keys in stretches:
            columns = slice(column, column + keys.stop - keys.start)
            edges = tuple(self._backwards(edge) for edge in self._edges(row, keys))
            found.append(Stretch(self._backwards(keys), columns, edges))
            column = columns.stop
        return Tile(row, tuple(found))

    def _edges(self, row: slice, keys: slice) -> list[slice]:
        """The keys that some queries may see and others not: future ones, and ones before a window.

        The two are one where they would overlap.
        """
        future = slice(max(row.start + 1, self.prefix, keys.start), min(row.stop, keys.stop))
        past = slice(max(keys.start, self.prefix), min(row.stop - self.window, keys.stop))
        edges = [edge for edge in (past, future) if edge.start < edge.stop]
        if len(edges) == 2 and past.stop > future.start:
            return [slice(past.start, future.stop)]
        return edges

    def _backwards(self, keys: slice) -> slice:
        return slice(self.length - keys.stop, self.length - keys.start)


def _parts(whole: slice, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, whole.stop)) for start in range(whole.start, whole.stop, most))
