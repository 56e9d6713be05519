"""Some heads of a call at a time: contiguous, in float32 at least, with the queries of a shared key together."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from regard.attention.call import slices

RowChunk = tuple[slice, slice]
"""Some samples, and some key/value heads of each."""


class RowChunks:
    """How the key/value heads of a batch are cut into chunks: less than all of a sample, or all of some samples.

    `queries_per_key` query heads share one of them; `like` is an empty tensor in the dtype of the computation.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.batch, self.groups, self.length, _ = key.shape
        self.queries_per_key = query.shape[1] // self.groups
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.like = query.new_empty(0, dtype=dtype)
        self.num_groups = 1

    def fit(self, size: int, entries: int) -> None:
        """Choose `num_groups` so that `entries` for each query head fill about `size` bytes."""
        heads = max(1, size // (self.like.element_size() * entries * self.queries_per_key))
        self.num_groups = min(self.batch, heads // self.groups) * self.groups if heads >= self.groups else heads

    def __iter__(self) -> Iterator[RowChunk]:
        samples = max(1, self.num_groups // self.groups)
        return product(slices(self.batch, samples), slices(self.groups, self.num_groups))

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
