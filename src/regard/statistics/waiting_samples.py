"""Samples of several batches, which wait until a statistic computes of them at once.

What it computes of the reductions of some samples takes about as long as of many times as many.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.statistics.observation import Observation, join_observations

MAX_BATCHES = 32
MAX_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Most batches that wait, and most entries of their reductions."""
EARLY = "early_query_count"
"""What says how many queries see a key beside those behind it; no statistic names it among its needs."""


class WaitingSamples:
    """Observations of batches that differ in their samples alone."""

    def __init__(self) -> None:
        self._batches: list[list[Observation]] = []
        self._signature: Any = None
        self._entries = 0

    def add(self, layers: Sequence[Observation], needs: Set[str]) -> bool:
        """Let a batch wait with what a statistic needs of it; return whether it may, beside those that do already."""
        batch = [layer.select(lambda name: name in needs or name == EARLY) for layer in layers]
        tensors = [tensor for layer in batch for tensor in layer.tensors.values()]
        if not tensors or any(len(tensor) != len(layer.length) for layer in batch for tensor in layer.tensors.values()):
            return False
        entries = sum(tensor.numel() for tensor in tensors)
        signature = [(layer.layers, layer.signature) for layer in batch]
        is_first = not self._batches
        most = MAX_ENTRIES.get(tensors[0].device.type, MAX_ENTRIES["cpu"])
        if 2 * entries > most:
            return False
        if not is_first and (signature != self._signature or self._entries + entries > most):
            return False
        if len(self._batches) == MAX_BATCHES:
            return False
        self._batches.append(batch)
        self._signature, self._entries = signature, self._entries + entries
        return True

    def take(self) -> list[Observation]:
        """Return the batches as one; they wait no longer."""
        batches, self._batches, self._entries = self._batches, [], 0
        return [_join(parts) for parts in zip(*batches, strict=True)]


def _join(parts: Sequence[Observation]) -> Observation:
    """Return the samples of several observations of the same layers as one, those of each layer together."""
    join = partial(_join_rows, len(parts[0].layers))
    return join_observations(parts, join, parts[0].more_layers)


def _join_rows(layers: int, tensors: Sequence[Tensor]) -> Tensor:
    if layers == 1:
        return torch.cat(list(tensors))
    by_layer = [tensor.view(layers, len(tensor) // layers, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(by_layer, dim=1).flatten(0, 1)
