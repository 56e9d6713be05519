"""Means and variances over samples that come one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

MAX_WAITING, MAX_WAITING_NUMBERS = 32, 1 << 17
"""Most batches that wait to be added to moments, and most numbers of them, in float64: 1 MiB, which caches hold."""


class RunningMoments:
    """Count, mean and sum of squared deviations of each entry of a tensor over samples, in float64.

    The last axis grows to that of the longest sample. Entries that a sample lacks do not count for it. Merging is as
    exact as one pass over all samples (Chan, Golub and LeVeque 1983). The count has an axis of 1 where all entries have
    the same, such as all heads.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._parts: Sequence[Tensor] = parts or [torch.zeros(0, dtype=torch.float64)] * 3
        self._waiting: list[tuple[Tensor, Tensor | None]] = []

    @property
    def count(self) -> Tensor:
        """How many samples have each entry."""
        return self._settled()[0]

    @property
    def mean(self) -> Tensor:
        """Their mean; 0 where none has it."""
        return self._settled()[1]

    @property
    def deviation(self) -> Tensor:
        """The sum of their squared deviations from it."""
        return self._settled()[2]

    def add(self, values: Float[Tensor, "sample ..."], present: Bool[Tensor, "sample ..."] | None = None) -> None:
        """Add samples where `present`, which may lack trailing axes, or the axis of heads.

        They wait until there are some to add at once: of a few numbers that takes as long as of many.
        """
        device = "cpu" if values.device.type == "mps" else values.device  # which has no float64
        values = values.detach().to(device, torch.float64, copy=True)
        self._waiting.append((values, None if present is None else present.to(device, copy=True)))
        if len(self._waiting) >= MAX_WAITING or sum(part.numel() for part, _ in self._waiting) >= MAX_WAITING_NUMBERS:
            self.settle()

    def settle(self) -> None:
        groups: dict[Any, list[tuple[Tensor, Tensor | None]]] = {}
        for values, present in self._waiting:
            shape = None if present is None else present.shape[1:]
            groups.setdefault((values.device, values.shape[1:], shape), []).append((values, present))
        self._waiting = []
        for group in groups.values():
            values, masks = torch.cat([part[0] for part in group]), [part[1] for part in group if part[1] is not None]
            self.merge(RunningMoments(*_moments_of(values, torch.cat(masks) if masks else None)))

    def _settled(self) -> Sequence[Tensor]:
        if self._waiting:
            self.settle()
        return self._parts

    def merge(self, other: RunningMoments) -> None:
        self._parts = self.merged(other)._parts

    def merged(self, other: RunningMoments) -> RunningMoments:
        """Return the moments of the samples of both."""
        parts = [other.count, other.mean, other.deviation]
        if self.count.numel() == 0:
            return RunningMoments(*parts)
        if other.count.numel() == 0:
            return self
        parts = [part.to(self.count.device) for part in parts]
        count_a, mean_a, deviation_a = _pad_last_axis([self.count, self.mean, self.deviation], other.count)
        count_b, mean_b, deviation_b = _pad_last_axis(parts, self.count)
        count = count_a + count_b
        share = count_b / count.clamp(min=1)
        difference = mean_b - mean_a
        deviation = deviation_a + deviation_b + difference.square() * count_a * share
        return RunningMoments(count, mean_a + difference * share, deviation)

    def split(self) -> Iterator[RunningMoments]:
        """Yield the moments of each index of the first axis."""
        for parts in zip(*self._expanded(), strict=True):
            yield RunningMoments(*parts)

    def standard_error(self) -> Tensor:
        """Return the standard error of the mean over samples; NaN for fewer than two."""
        return (self.deviation / (self.count - 1) / self.count).sqrt().masked_fill(self.count < 2, torch.nan)

    def state(self) -> Tensor:
        """Return count, mean and deviation as one tensor (3, …)."""
        return torch.stack(self._expanded())

    def _expanded(self) -> list[Tensor]:
        return [self.count.expand_as(self.mean), self.mean, self.deviation]


def _moments_of(
    values: Float64[Tensor, "sample ..."], present: Bool[Tensor, "sample ..."] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations of each entry over samples."""
    if present is None and len(values):
        mean = values.sum(0) / len(values)
        deviation = (values - mean).square_().sum(0)
        shape = (1,) * (values.ndim - 2) + values.shape[-1:] if values.ndim > 1 else ()
        return values.new_full(shape, len(values)), mean, deviation
    present = values.new_ones(len(values), dtype=torch.bool) if present is None else present
    mask = expand_mask(present, values)
    values = values.masked_fill(~mask, 0.0)
    count = mask.sum(0, dtype=torch.float64)
    mean = values.sum(0) / count.clamp(min=1)
    return count, mean, (values - mean).square_().mul_(mask).sum(0)


def expand_mask(present: Tensor, values: Tensor) -> Tensor:
    """Give a mask the axes of values: (sample, position) becomes (sample, 1, position); the last one is expanded."""
    if present.ndim == 2 and values.ndim == 3:
        present = present[:, None, :]
    while present.ndim < values.ndim:
        present = present[..., None]
    return present.expand(*present.shape[:-1], values.shape[-1])


def _pad_last_axis(parts: list[Tensor], like: Tensor) -> list[Tensor]:
    """Pad the last axis of tensors with zeros to at least that of `like`."""
    missing = like.shape[-1] - parts[0].shape[-1] if parts[0].ndim else 0
    return [torch.nn.functional.pad(part, (0, missing)) for part in parts] if missing > 0 else parts
