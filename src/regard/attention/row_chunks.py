"""Sequences of a call, some heads at a time: contiguous, in at least float32, the queries of a shared key together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RowChunk = tuple[slice, slice]
"""Some samples, and some key/value heads of each."""


class RowChunks:
    """How the key/value heads of a batch are taken: `together` of them, or fewer, at a time."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.batch, self.groups, self.length, _ = key.shape
        self.shares = query.shape[1] // self.groups
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.like = query.new_empty(0, dtype=dtype)
        self.together = 1

    def fit(self, size: int, numbers: int) -> None:
        """Take so many heads together that `numbers` for each query head fill about `size` bytes."""
        heads = max(1, size // (self.like.element_size() * numbers * self.shares))
        self.together = min(self.batch, heads // self.groups) * self.groups if heads >= self.groups else heads

    def __iter__(self) -> Iterator[RowChunk]:
        samples = max(1, self.together // self.groups)
        for sample in range(0, self.batch, samples):
            for group in range(0, self.groups, self.together):
                yield (
                    slice(sample, min(sample + samples, self.batch)),
                    slice(group, min(group + self.together, self.groups)),
                )

    def take(self, whole: Tensor, piece: RowChunk) -> Tensor:
        """A piece of a (batch, head, token, width): (sample · group, token · share, width)."""
        part = self._part(whole, piece).to(self.like.dtype)
        return part.reshape(-1, part.shape[2] * part.shape[3], part.shape[4]).contiguous()

    def put(self, part: Tensor, whole: Tensor, piece: RowChunk) -> None:
        """Write what `take` would give."""
        room = self._part(whole, piece)
        room.copy_(part.unflatten(1, (-1, room.shape[3])).unflatten(0, room.shape[:2]))

    def _part(self, whole: Tensor, piece: RowChunk) -> Tensor:
        sample, group = piece
        return whole[sample].unflatten(1, (self.groups, -1))[:, group].transpose(2, 3)
