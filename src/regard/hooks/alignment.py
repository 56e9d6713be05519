"""From rows of a batch, with padding and packing, to samples that begin at position 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class SampleAlignment:
    """Which entries of (batch, token) rows make up each sample.

    Attributes:
        row: Row of each sample.
        index: Its tokens in that row; behind its last token any.
        length: Its number of tokens.
        identity: Samples are the rows as they are.
    """

    row: Int[Tensor, " sample"]
    index: Int[Tensor, "sample longest"]
    length: Int[Tensor, " sample"]
    identity: bool

    @classmethod
    def from_masks(
        cls,
        batch: int,
        tokens: int,
        token_mask: Bool[Tensor, "batch known"] | None,
        segments: Int[Tensor, "batch token"] | None,
        device: torch.device,
    ) -> SampleAlignment:
        """Return one sample a row, or a packed sequence (`segments`), without padding on any side or inside."""
        if segments is not None:
            return cls._packed(segments)
        row = torch.arange(batch, device=device)
        if token_mask is None:
            index = torch.arange(tokens, device=device).expand(batch, tokens)
            return cls(row, index, torch.full((batch,), tokens, device=device), identity=True)
        missing = max(tokens - token_mask.shape[-1], 0)
        mask = torch.nn.functional.pad(token_mask, (0, missing))[:, :tokens].to(device)
        index = torch.argsort(~mask, dim=-1, stable=True)
        return cls(row, index, mask.sum(-1), identity=bool((index.diff(dim=-1) == 1).all()))

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

    def align_tokens(self, values: Shaped[Tensor, "batch token ..."]) -> Shaped[Tensor, "sample position ..."]:
        if self.identity:
            return values
        return values[self.row[:, None], self.index]

    def align_keys(self, values: Shaped[Tensor, "batch head token"]) -> Shaped[Tensor, "sample head position"]:
        if self.identity:
            return values
        rows = values.index_select(0, self.row)
        return rows.gather(2, self.index[:, None, :].expand(-1, values.shape[1], -1))

    def align_queries(
        self, values: Shaped[Tensor, "batch head token ..."]
    ) -> Shaped[Tensor, "sample head position ..."]:
        if self.identity:
            return values
        return self.align_tokens(values.transpose(1, 2)).transpose(1, 2)

    def sum_tokens(self, values: Shaped[Tensor, "batch token width"]) -> Shaped[Tensor, "sample width"]:
        valid = torch.arange(self.index.shape[1], device=values.device) < self.length[:, None]
        return (self.align_tokens(values) * valid[..., None]).sum(1)
