"""Heads that read classes from hidden states: a linear layer, and pre-scaling, which weighs tokens class by class."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard.errors import UserError

HeadName = Literal["linear", "full", "uniform", "sink"]
HEADS: tuple[HeadName, ...] = get_args(HeadName)
Reading = Literal["first", "last", "mean"]
READINGS: tuple[Reading, ...] = get_args(Reading)
_HIDDEN = -1e30


class LinearHead(nn.Module):
    """One vector and a bias a class, read against the state of one token, or the mean of all.

    `reading`: "first" ([CLS]), "last" (causal models), or "mean", of the real tokens.
    """

    def __init__(self, width: int, classes: int, *, reading: Reading = "first", dropout: float = 0.1) -> None:
        super().__init__()
        self.reading, self.dropout = reading, nn.Dropout(dropout)
        self.vectors = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))
        self.reset()

    def reset(self) -> None:
        """Draw the class vectors, as BERT does: N(0, 0.02)."""
        nn.init.normal_(self.vectors, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor, real: Tensor, common: Tensor | None = None) -> Tensor:
        """The logits (row, class) of states (row, token, width), of which `real` (row, token) are no padding."""
        return self.dropout(pooled(states, real, self.reading)) @ self.vectors.T + self.bias


class PreScalingHead(nn.Module):
    """Class vectors that weigh the tokens of a text before they read it (pre-scaling, arXiv 2410.05648, section 4).

    A = softmax over tokens of V f(H)ᵀ / √d and s_c = ⟨V_c, (A H)_c⟩ + b_c, V being both query and read-out, and f a
    linear map that begins at zero, so that all tokens weigh the same. `kind`: "full" as above, "uniform" with A = 1/n
    for good, "sink" with the softmax over common tokens alone (a text without any uses all its tokens). `dropout` is of
    A.

    Since f(h) = W h + b, V f(H)ᵀ = (V W) Hᵀ + V b, and V b, the same for all tokens, leaves the softmax as it is. So
    no token is ever mapped, and the head costs two products of classes × width × tokens.
    """

    def __init__(
        self, width: int, classes: int, *, kind: Literal["full", "uniform", "sink"] = "full", dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        self.vectors = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))
        self.key = None if kind == "uniform" else nn.Parameter(torch.zeros(width, width))
        self.reset()

    def reset(self) -> None:
        """Draw the class vectors, N(0, 0.02), and set the key map to zero."""
        nn.init.normal_(self.vectors, std=0.02)
        nn.init.zeros_(self.bias)
        if self.key is not None:
            nn.init.zeros_(self.key)

    def forward(self, states: Tensor, real: Tensor, common: Tensor | None = None) -> Tensor:
        """The logits (row, class) of states (row, token, width).

        `real` (row, token): which tokens are no padding; `common`: which are common, needed for the kind "sink".
        """
        read = self.vectors @ states.transpose(1, 2)
        return (self.dropout(self.scales(states, real, common)) * read).sum(-1) + self.bias

    def scales(self, states: Tensor, real: Tensor, common: Tensor | None = None) -> Tensor:
        """A: the weights (row, class, token), which are 0 at padding and sum to 1 over the tokens."""
        allowed = self._allowed(real, common)
        if self.key is None:
            share = allowed.to(states.dtype) / allowed.sum(-1, keepdim=True)
            return share[:, None].expand(-1, len(self.vectors), -1)
        scores = (self.vectors @ self.key) @ states.transpose(1, 2) / math.sqrt(states.shape[-1])
        exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return exact.masked_fill(~allowed[:, None], _HIDDEN).softmax(-1).to(states.dtype)

    def _allowed(self, real: Tensor, common: Tensor | None) -> Tensor:
        """(row, token): the tokens that are weighed."""
        if self.kind != "sink":
            return real
        if common is None:
            raise UserError("head: sink scaling needs to know which tokens are common, got none")
        among = real & common
        return torch.where(among.any(-1, keepdim=True), among, real)


def pooled(states: Tensor, real: Tensor, reading: Reading) -> Tensor:
    """One state a row, (row, width), out of (row, token, width): of its first or last real token, or their mean."""
    if reading == "mean":
        share = real.to(states.dtype) / real.sum(-1, keepdim=True)
        return (share[:, None] @ states).squeeze(1)
    position = torch.arange(real.shape[1], device=real.device)
    far = real.shape[1]
    ends = (position - far * ~real).argmax(-1) if reading == "last" else (position + far * ~real).argmin(-1)
    return states[torch.arange(len(states), device=states.device), ends]


def make_head(name: HeadName, width: int, classes: int, *, reading: Reading, dropout: float) -> nn.Module:
    """The head of that name. Raises UserError."""
    if name not in HEADS:
        raise UserError(f"head: expected one of {', '.join(HEADS)}, got {name!r}")
    if name == "linear":
        return LinearHead(width, classes, reading=reading, dropout=dropout)
    return PreScalingHead(width, classes, kind=name, dropout=dropout)
