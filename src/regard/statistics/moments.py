"""Mean and variance that can be added to and merged in any order."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class RunningMoments:
    """Count, mean and sum of squared deviations of samples of a tensor, each entry on its own, in float64.

    Merging is that of Chan, Golub and LeVeque (1983): as exact as one pass over all samples. The last axis grows to the
    longest sample seen; entries that a sample lacks do not count for it.
    """

    def __init__(self) -> None:
        self.count = torch.zeros(0, dtype=torch.float64)
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.deviation = torch.zeros(0, dtype=torch.float64)

    def add(self, values: Float[Tensor, "sample ..."], present: Bool[Tensor, "sample ..."] | None = None) -> None:
        """Count in each sample (first axis) where `present`, which broadcasts from the left."""
        values = values.detach().to("cpu", torch.float64)
        here = torch.ones_like(values) if present is None else _spread(present.cpu(), values).double()
        values = values.masked_fill(here == 0, 0.0)
        count = here.sum(0)
        mean = values.sum(0) / count.clamp(min=1)
        deviation = ((values - mean).square() * here).sum(0)
        self._merge(count, mean, deviation)

    def merge(self, other: RunningMoments) -> None:
        """Count in all that the other has seen."""
        self._merge(other.count, other.mean, other.deviation)

    def _merge(self, count: Tensor, mean: Tensor, deviation: Tensor) -> None:
        if self.count.numel() == 0:
            self.count, self.mean, self.deviation = count.clone(), mean.clone(), deviation.clone()
            return
        if count.numel() == 0:
            return
        mine = _same_size([self.count, self.mean, self.deviation], count)
        theirs = _same_size([count, mean, deviation], self.count)
        total = mine[0] + theirs[0]
        share = theirs[0] / total.clamp(min=1)
        gap = theirs[1] - mine[1]
        self.count = total
        self.mean = mine[1] + gap * share
        self.deviation = mine[2] + theirs[2] + gap.square() * mine[0] * share

    def standard_error(self) -> Tensor:
        """Standard error of the mean over samples; NaN where there are fewer than two."""
        variance = self.deviation / (self.count - 1)
        return (variance / self.count).sqrt().masked_fill(self.count < 2, torch.nan)

    def state(self) -> Tensor:
        """All there is to know, as one tensor (3, …)."""
        return torch.stack([self.count, self.mean, self.deviation])

    @classmethod
    def from_state(cls, state: Tensor) -> RunningMoments:
        """The moments that gave this state."""
        moments = cls()
        moments.count, moments.mean, moments.deviation = (part.clone() for part in state)
        return moments


def _spread(present: Tensor, values: Tensor) -> Tensor:
    """A mask that lacks middle axes (sample, position) spread over (sample, head, position)."""
    if present.ndim == 2 and values.ndim == 3:
        present = present[:, None, :]
    while present.ndim < values.ndim:
        present = present[..., None]
    return present.expand_as(values)


def _same_size(parts: list[Tensor], like: Tensor) -> list[Tensor]:
    """The tensors, their last axis padded with zeros to at least that of `like`."""
    if parts[0].ndim == 0 or parts[0].shape[-1] >= like.shape[-1]:
        return parts
    return [torch.nn.functional.pad(part, (0, like.shape[-1] - part.shape[-1])) for part in parts]
