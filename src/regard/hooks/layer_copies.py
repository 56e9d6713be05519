"""Tensors of several layers, copied behind each other, as those of one layer with more samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


class LayerCopies:
    """Tensors of several layers by name, copied behind each other, in room for so many layers."""

    def __init__(self, room: int, tensors: Mapping[str, Tensor]) -> None:
        self.buffers = {name: tensor.new_empty(room, *tensor.shape) for name, tensor in tensors.items()}
        self.count, self.room = 0, room

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.buffers[name][self.count].copy_(tensor)
        self.count += 1

    def join(self) -> dict[str, Tensor]:
        """Return the rows of each layer in turn as rows of one batch."""
        return {name: buffer[: self.count].flatten(0, 1) for name, buffer in self.buffers.items()}


def split_samples(tensors: Mapping[str, Tensor], calls: int) -> Iterator[dict[str, Tensor]]:
    """Yield the reductions of each of the calls that were joined."""
    parts = {name: tensor.unflatten(0, (calls, -1)).unbind() for name, tensor in tensors.items()}
    return ({name: part[index] for name, part in parts.items()} for index in range(calls))
