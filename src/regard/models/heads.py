"""Classification heads on hidden states: linear, pre-scaling (which weights tokens), and by the labels' words."""

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
"""Factor of cosines: the inverse temperature with which sentence models are usually trained."""
_MASKED = -1e30


class ClassVectorHead(nn.Module):
    """A head with a trained vector (width,) and a bias for each class."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.vectors = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))
        self.reset()

    def reset(self) -> None:
        """Initialize the class vectors with N(0, 0.02), like BERT, and all else with zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.normal_(self.vectors, std=0.02)


class LinearHead(ClassVectorHead):
    """A linear layer on the state of the first token ([CLS]) or the last (causal models), or on their mean."""

    def __init__(self, width: int, classes: int, *, pooling: Pooling = "first", dropout: float = 0.1) -> None:
        super().__init__(width, classes, dropout)
        self.pooling = pooling

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class) of states (row, token, width); `mask` (row, token) is False at padding."""
        return self.dropout(pool_states(states, mask, self.pooling)) @ self.vectors.T + self.bias


class PreScalingHead(ClassVectorHead):
    """Class vectors that weight the tokens of a text before they read it.

    A = softmax over tokens of V f(H)ᵀ / √d and s_c = ⟨V_c, (A H)_c⟩ + b_c. V is both query and read-out; f is a linear
    map initialized to zero, so that all tokens start with the same weight. `kind`: "full" as above, "uniform" with
    A = 1/n, "sink" with the softmax over common tokens only (over all tokens of a text without any). Dropout is on A.

    Since f(h) = W h + b, V f(H)ᵀ = (V W) Hᵀ + V b, and V b cancels in the softmax. So no token is mapped.

    Source:
        Pre-scaling (arXiv 2410.05648, section 4).
    """

    def __init__(
        self, width: int, classes: int, *, kind: Literal["full", "uniform", "sink"] = "full", dropout: float = 0.1
    ) -> None:
        super().__init__(width, classes, dropout)
        self.kind = kind
        self.key = None if kind == "uniform" else nn.Parameter(torch.zeros(width, width))

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class) of states; `common` (row, token) marks common tokens, for the kind "sink"."""
        scores = self.vectors @ states.transpose(1, 2)
        return (self.dropout(self.scales(states, mask, common)) * scores).sum(-1) + self.bias

    def scales(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return A, the weights (row, class, token), which sum to 1 over the tokens and are 0 at padding."""
        allowed = self._allowed_tokens(mask, common)
        if self.key is None:
            uniform = allowed.to(states.dtype) / allowed.sum(-1, keepdim=True)
            return uniform[:, None].expand(-1, len(self.vectors), -1)
        scores = (self.vectors @ self.key) @ states.transpose(1, 2) / math.sqrt(states.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores.masked_fill(~allowed[:, None], _MASKED).softmax(-1).to(states.dtype)

    def _allowed_tokens(self, mask: Tensor, common: Tensor | None) -> Tensor:
        if self.kind != "sink":
            return mask
        if common is None:
            raise UserError("head: sink scaling needs to know which tokens are common, got none")
        common = mask & common
        return torch.where(common.any(-1, keepdim=True), common, mask)


class LabelTextHead(nn.Module):
    """Classes by their labels' words: scale · cos(h, E_c) for a text's pooled state h and the label's state E_c.

    `vectors` (class, width) are the states E of the untrained model: buffers, NaN until they are set. Everything is
    computed in float32 or wider. `others` (word, width) are the states of words that are no labels. In training they
    form one more class, the last, so that a text comes to be near its label, not only nearer than to other labels.
    """

    vectors: Tensor
    others: Tensor

    def __init__(
        self, width: int, classes: int, *, pooling: Pooling = "mean", scale: float = LABEL_SCALE, words: int = 0
    ) -> None:
        super().__init__()
        self.pooling, self.scale = pooling, scale
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("vectors", torch.empty(classes, width, dtype=dtype))
        self.register_buffer("others", torch.empty(words, width, dtype=dtype))
        self.reset()

    def reset(self) -> None:
        nn.init.constant_(self.vectors, math.nan)
        nn.init.constant_(self.others, math.nan)

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class), from −scale to scale; in training log Σ exp of other words follows."""
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(torch.promote_types(states.dtype, torch.float32))
            pooled = nn.functional.normalize(pool_states(states, mask, self.pooling), dim=-1)
            logits = self._scaled_cosines(pooled, self.vectors)
            if not self.training or not len(self.others):
                return logits
            return torch.cat([logits, self._scaled_cosines(pooled, self.others).logsumexp(-1, keepdim=True)], dim=-1)

    def _scaled_cosines(self, pooled: Tensor, vectors: Tensor) -> Tensor:
        return self.scale * pooled @ nn.functional.normalize(vectors.to(pooled.dtype), dim=-1).T


def split_label(label: str) -> str:
    """Split a label into words at underscores and at capitals within a word.

    "EducationalInstitution" becomes "Educational Institution", "not_entailment" becomes "not entailment".
    """
    signs = []
    for index, sign in enumerate(label):
        previous, following = label[index - 1 : index], label[index + 1 : index + 2]
        begins = previous.islower() or previous.isdigit() or (previous.isupper() and following.islower())
        signs.append(f" {sign}" if sign.isupper() and begins else sign)
    return " ".join("".join(signs).replace("_", " ").split())


def pool_states(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool states (row, token, width) to (row, width): those of the first or last real token, or their mean."""
    if pooling == "mean":
        weights = mask.to(states.dtype) / mask.sum(-1, keepdim=True)
        return (weights[:, None] @ states).squeeze(1)
    position = torch.arange(mask.shape[1], device=mask.device)
    length = mask.shape[1]
    index = (position - length * ~mask).argmax(-1) if pooling == "last" else (position + length * ~mask).argmin(-1)
    return states[torch.arange(len(states), device=states.device), index]


def make_head(
    name: HeadName,
    width: int,
    classes: int,
    *,
    pooling: Pooling,
    dropout: float,
    label_scale: float = LABEL_SCALE,
    label_words: int = 0,
) -> nn.Module:
    """Make a head by name; `label_scale` and `label_words` are of the head "labels"."""
    check_choice("head", name, HEADS)
    if name == "linear":
        return LinearHead(width, classes, pooling=pooling, dropout=dropout)
    if name == "labels":
        return LabelTextHead(width, classes, pooling=pooling, scale=label_scale, words=label_words)
    return PreScalingHead(width, classes, kind=name, dropout=dropout)
