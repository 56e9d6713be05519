"""The batches of a phase: a function of the step alone, of rows that are padded together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from regard.training.placement import Rows

BATCHES_PER_SORT = 16
"""Batches whose rows are sorted by length with one another."""


class ExampleRef(NamedTuple):
    """A training example of a stream: its task, counted from 0 in their order, and its row."""

    task: int
    row: int


@dataclass(frozen=True)
class Batches:
    """How many steps there are, and the rows of each; a batch is `size` rows, of which some may count for nothing."""

    steps: int
    size: int
    rows: Callable[[int], Rows]


class Epochs:
    """Items in batches, each item once an epoch, the last batch of an epoch shorter; a function of seed and step.

    The order is drawn for each epoch. `BATCHES_PER_SORT` batches at a time are sorted by length and then dealt out, so
    that little padding is needed.
    """

    def __init__(
        self,
        items: Sequence[ExampleRef],
        lengths: Sequence[int],
        *,
        size: int,
        epochs: int,
        seed: int,
        max_steps: int | None = None,
    ) -> None:
        self.items, self.size, self.seed = list(items), size, seed
        self.lengths = np.asarray(lengths)
        self.per_epoch = -(-len(self.items) // size)
        steps = self.per_epoch * epochs
        self.steps = steps if max_steps is None else min(steps, max_steps)
        self._epoch, self._batches = -1, list[list[int]]()

    def at(self, step: int) -> list[ExampleRef]:
        """Return the items of a step: `size` of them, or fewer at the end of an epoch."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffle(epoch)
        return [self.items[number] for number in self._batches[index]]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.items))
        batches: list[list[int]] = []
        for start in range(0, len(order), BATCHES_PER_SORT * self.size):
            chunk = order[start : start + BATCHES_PER_SORT * self.size]
            chunk = chunk[np.argsort(self.lengths[chunk], kind="stable")]
            chunk_batches = [chunk[first : first + self.size].tolist() for first in range(0, len(chunk), self.size)]
            batches += [chunk_batches[number] for number in random.permutation(len(chunk_batches))]
        return batches
