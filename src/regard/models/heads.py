"""Heads that read classes from hidden states: a linear layer; pre-scaling, which weighs tokens; the labels' words."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard.errors import UserError, check_choice

HeadName = Literal["linear", "full", "uniform", "sink", "labels"]
HEADS: tuple[HeadName, ...] = get_args(HeadName)
Pooling = Literal["first", "last", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
LABEL_SCALE = 20.0
"""What cosines are multiplied by: the inverse temperature with which sentence models are usually trained."""
_HIDDEN = -1e30


class LinearHead(nn.Module):
    """One vector and a bias a class, read against the state of one token, or the mean of all.

    `reading`: "first" ([CLS]), "last" (causal models), or "mean", of the real tokens.
    """

    def __init__(self, width: int, classes: int, *, reading: Pooling = "first", dropout: float = 0.1) -> None:
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
        return self.dropout(pool_states(states, real, self.reading)) @ self.vectors.T + self.bias


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


class LabelTextHead(nn.Module):
    """Classes by what their labels say: scale · cos(h, E_c) for a text's pooled state h, E_c that of the label's words.

    `vectors` (class, width) are the states E of a model that nothing changes: a buffer, for no weight of this head is
    trained. They are not a number until they are given. All is computed in float32 at least.

    `others` (word, width) are the states of words that are no label. In training they are one more class, the last:
    that a text says any of them, as a model that generates its answer is trained against all that it could say. So a
    text comes to be near its label, and not only nearer than to the labels that are known by then.
    """

    vectors: Tensor
    others: Tensor

    def __init__(
        self, width: int, classes: int, *, reading: Pooling = "mean", scale: float = LABEL_SCALE, words: int = 0
    ) -> None:
        super().__init__()
        self.reading, self.scale = reading, scale
        exact = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("vectors", torch.empty(classes, width, dtype=exact))
        self.register_buffer("others", torch.empty(words, width, dtype=exact))
        self.reset()

    def reset(self) -> None:
        """Forget the vectors: they become what is no number."""
        nn.init.constant_(self.vectors, math.nan)
        nn.init.constant_(self.others, math.nan)

    def forward(self, states: Tensor, real: Tensor, common: Tensor | None = None) -> Tensor:
        """The logits (row, class), from −scale to scale, of states (row, token, width); `real` as of `LinearHead`.

        In training that of all other words follows, log Σ exp of theirs, where there are any.
        """
        with torch.autocast(states.device.type, enabled=False):
            exact = states.to(torch.promote_types(states.dtype, torch.float32))
            read = nn.functional.normalize(pool_states(exact, real, self.reading), dim=-1)
            logits = self._against(read, self.vectors)
            if not self.training or not len(self.others):
                return logits
            return torch.cat([logits, self._against(read, self.others).logsumexp(-1, keepdim=True)], dim=-1)

    def _against(self, read: Tensor, vectors: Tensor) -> Tensor:
        return self.scale * read @ nn.functional.normalize(vectors.to(read.dtype), dim=-1).T


def split_label(label: str) -> str:
    """The words of a label: underscores, and capitals within a word, are where one ends.

    "EducationalInstitution" is "Educational Institution", "not_entailment" is "not entailment".
    """
    parts = []
    for number, sign in enumerate(label):
        before, behind = label[number - 1 : number], label[number + 1 : number + 2]
        begins = before.islower() or before.isdigit() or (before.isupper() and behind.islower())
        parts.append(f" {sign}" if sign.isupper() and begins else sign)
    return " ".join("".join(parts).replace("_", " ").split())


def pool_states(states: Tensor, real: Tensor, reading: Pooling) -> Tensor:
    """One state a row, (row, width), out of (row, token, width): of its first or last real token, or their mean."""
    if reading == "mean":
        share = real.to(states.dtype) / real.sum(-1, keepdim=True)
        return (share[:, None] @ states).squeeze(1)
    position = torch.arange(real.shape[1], device=real.device)
    far = real.shape[1]
    ends = (position - far * ~real).argmax(-1) if reading == "last" else (position + far * ~real).argmin(-1)
    return states[torch.arange(len(states), device=states.device), ends]


def make_head(
    name: HeadName,
    width: int,
    classes: int,
    *,
    reading: Pooling,
    dropout: float,
    label_scale: float = LABEL_SCALE,
    label_words: int = 0,
) -> nn.Module:
    """The head of that name; `label_scale` and `label_words` are of the head "labels". Raises UserError."""
    check_choice("head", name, HEADS)
    if name == "linear":
        return LinearHead(width, classes, reading=reading, dropout=dropout)
    if name == "labels":
        return LabelTextHead(width, classes, reading=reading, scale=label_scale, words=label_words)
    return PreScalingHead(width, classes, kind=name, dropout=dropout)
