"""Mean and variance that can be added to and merged in any order."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class RunningMoments:
    """Count, mean and sum of squared deviations of each entry of a tensor over samples, in float64.

    The last axis grows to that of the longest sample. Entries that a sample lacks do not count for it.

    Source:
        Chan, Golub and LeVeque (1983): merging is as exact as one pass over all samples.
    """

    def __init__(self) -> None:
        self.count = self.mean = self.deviation = torch.zeros(0, dtype=torch.float64)

    def add(self, values: Float[Tensor, "sample ..."], present: Bool[Tensor, "sample ..."] | None = None) -> None:
        """Add samples where `present`, which lacks trailing axes, or the axis of heads."""
        values = values.detach().to("cpu", torch.float64)
        mask = torch.ones_like(values) if present is None else _expand_mask(present.cpu(), values).double()
        values = values.masked_fill(mask == 0, 0.0)
        count = mask.sum(0)
        mean = values.sum(0) / count.clamp(min=1)
        deviation = ((values - mean).square() * mask).sum(0)
        self._merge(count, mean, deviation)

    def merge(self, other: RunningMoments) -> None:
        """Add the samples of other moments."""
        self._merge(other.count, other.mean, other.deviation)

    def _merge(self, count: Tensor, mean: Tensor, deviation: Tensor) -> None:
        if self.count.numel() == 0:
            self.count, self.mean, self.deviation = count.clone(), mean.clone(), deviation.clone()
            return
        if count.numel() == 0:
            return
        count_a, mean_a, deviation_a = _pad_last_axis([self.count, self.mean, self.deviation], count)
        count_b, mean_b, deviation_b = _pad_last_axis([count, mean, deviation], self.count)
        self.count = count_a + count_b
        share = count_b / self.count.clamp(min=1)
        difference = mean_b - mean_a
        self.mean = mean_a + difference * share
        self.deviation = deviation_a + deviation_b + difference.square() * count_a * share

    def standard_error(self) -> Tensor:
        """Return the standard error of the mean over samples; NaN for fewer than two."""
        variance = self.deviation / (self.count - 1)
        return (variance / self.count).sqrt().masked_fill(self.count < 2, torch.nan)

    def state(self) -> Tensor:
        """Return count, mean and deviation as one tensor (3, …)."""
        return torch.stack([self.count, self.mean, self.deviation])

    @classmethod
    def from_state(cls, state: Tensor) -> RunningMoments:
        moments = cls()
        moments.count, moments.mean, moments.deviation = (part.clone() for part in state)
        return moments


def _expand_mask(present: Tensor, values: Tensor) -> Tensor:
    """Expand a mask to the shape of values; (sample, position) to (sample, head, position)."""
    if present.ndim == 2 and values.ndim == 3:
        present = present[:, None, :]
    while present.ndim < values.ndim:
        present = present[..., None]
    return present.expand_as(values)


def _pad_last_axis(parts: list[Tensor], like: Tensor) -> list[Tensor]:
    """Pad the last axis of tensors with zeros to at least that of `like`."""
    missing = like.shape[-1] - parts[0].shape[-1] if parts[0].ndim else 0
    return [torch.nn.functional.pad(part, (0, missing)) for part in parts] if missing > 0 else parts
