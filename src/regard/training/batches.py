"""Batches of a training run on their device; on a GPU the next one is made and copied while a step is computed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import UserError
from regard.training.placement import Placement, Rows, micro_batches
from regard.training.plan import TrainingConfig


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of a step for all processes, and the micro-batches of this process on its device."""

    rows: Rows
    pieces: tuple[Rows, ...]


class BatchLoader:
    """Makes the batch of each step, and puts the micro-batches of this process on its device.

    On a GPU `prepare` makes the next batch and begins its copy. Its kernels run beside the host, which waits for them
    only where it reads the loss; so a call before that costs no time as long as the host is the faster. Elsewhere a
    batch is made when its step begins.

    Args:
        make: Returns the rows of a step; it depends on the step alone.
        placed: The model on its device.
        plan: Sizes of batches and micro-batches.
        trim: Changes the rows of a micro-batch before they are copied, or None.
    """

    def __init__(
        self,
        make: Callable[[int], Rows],
        placed: Placement,
        plan: TrainingConfig,
        trim: Callable[[Rows], Rows] | None = None,
    ) -> None:
        self.make, self.placed, self.plan, self.trim = make, placed, plan, trim
        self._next: tuple[int, Batch | Exception] | None = None

    def at(self, step: int) -> Batch:
        """Return the batch of a step, the prepared one if it is of this step; raise what was raised in making it."""
        prepared, self._next = self._next, None
        if prepared is None or prepared[0] != step:
            return self._load(step)
        if isinstance(prepared[1], Exception):
            raise prepared[1]
        return prepared[1]

    def prepare(self, step: int) -> None:
        """Make the batch of a later step and begin its copy, on a GPU; an error waits until the step begins."""
        if not copies_ahead(self.placed.device):
            return
        try:
            self._next = step, self._load(step)
        except Exception as error:  # the step in progress shall end and be saved first, as it is on a CPU
            self._next = step, error

    def row(self, rows: Rows, row: int) -> Rows:
        """Return one row of a batch on the device, as it is in a micro-batch of its own."""
        return self._move(rows, slice(row, row + 1))

    def _load(self, step: int) -> Batch:
        rows = self.make(step)
        lengths = {name: len(value) for name, value in rows.items()}
        if set(lengths.values()) != {self.plan.batch_size}:
            raise UserError(f"batch of step {step}: expected {self.plan.batch_size} rows in each tensor, got {lengths}")
        pieces = micro_batches(self.placed.share(rows), self.plan.micro_batch_size)
        return Batch(rows, tuple(self._move(rows, piece) for piece in pieces))

    def _move(self, rows: Rows, part: slice) -> Rows:
        piece = {name: value[part] for name, value in rows.items()}
        piece = piece if self.trim is None else self.trim(piece)
        return {name: _copy(value, self.placed.device) for name, value in piece.items()}


def copies_ahead(device: torch.device) -> bool:
    """Return whether copies to a device run beside the host: to a GPU, from memory that is pinned."""
    return device.type == "cuda"


def _copy(value: Tensor, device: torch.device) -> Tensor:
    if copies_ahead(device) and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)
