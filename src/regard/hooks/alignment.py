"""From rows of a batch, with padding and packing, to samples that begin at position 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampleAlignment:
    """Which entries of a (batch, token) row make each sample: `index` (sample, longest) into the row `row` (sample)."""

    row: Tensor
    index: Tensor
    length: Tensor
    identity: bool

    @classmethod
    def of(
        cls, batch: int, tokens: int, real: Tensor | None, segments: Tensor | None, device: torch.device
    ) -> SampleAlignment:
        """One sample per row, or per packed sequence; padding on any side, or inside, is left out."""
        if segments is not None:
            return cls._packed(segments)
        row = torch.arange(batch, device=device)
        if real is None:
            index = torch.arange(tokens, device=device).expand(batch, tokens)
            return cls(row, index, torch.full((batch,), tokens, device=device), identity=True)
        real = torch.nn.functional.pad(real, (0, max(tokens - real.shape[-1], 0)))[:, :tokens].to(device)
        index = torch.argsort(~real, dim=-1, stable=True)
        length = real.sum(-1)
        return cls(row, index, length, identity=bool((index.diff(dim=-1) == 1).all()))

    @classmethod
    def _packed(cls, segments: Tensor) -> SampleAlignment:
        rows, starts, lengths = [], [], []
        for row, numbers in enumerate(segments):
            _, counts = numbers.unique_consecutive(return_counts=True)
            rows += [row] * len(counts)
            starts.append(counts.cumsum(0) - counts)
            lengths.append(counts)
        start, length = torch.cat(starts), torch.cat(lengths)
        steps = torch.arange(int(length.max()), device=segments.device)
        index = (start[:, None] + steps).clamp(max=segments.shape[-1] - 1)
        return cls(torch.tensor(rows, device=segments.device), index, length, identity=False)

    def tokens(self, values: Tensor) -> Tensor:
        """(batch, token, …) as (sample, position, …)."""
        if self.identity:
            return values
        return values[self.row[:, None], self.index]

    def last_axis(self, values: Tensor) -> Tensor:
        """(batch, head, token) as (sample, head, position)."""
        if self.identity:
            return values
        chosen = values.index_select(0, self.row)
        return chosen.gather(2, self.index[:, None, :].expand(-1, values.shape[1], -1))

    def queries(self, values: Tensor) -> Tensor:
        """(batch, head, token, …) as (sample, head, position, …)."""
        if self.identity:
            return values
        return self.tokens(values.transpose(1, 2)).transpose(1, 2)

    def sums(self, values: Tensor, offset: int = 0) -> Tensor:
        """Sum over each sample's tokens of (batch, token, width), of which the first stands at `offset` of its row."""
        last = self.index.shape[1]
        steps = torch.arange(last, device=values.device) < self.length[:, None]
        inside = steps & (self.index >= offset) & (self.index < offset + values.shape[1])
        at = (self.index - offset).clamp(0, values.shape[1] - 1)
        return (values[self.row[:, None], at] * inside[..., None]).sum(1)
