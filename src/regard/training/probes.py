"""The probes: small trained heads that read all hidden states of a frozen encoder (arXiv 2211.03495, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from regard.errors import UserError

ProbeKind = Literal["sequence", "token", "mlm"]
KINDS: tuple[ProbeKind, ...] = ("sequence", "token", "mlm")
IGNORE_INDEX = -100  # the label of what has none


@dataclass(frozen=True, eq=False)
class TokenStates:
    """All layers' states of chosen tokens, and where each token stands.

    `states`: (token, layer, width); `row` and `position` (token,): its sample within the batch, and its place there;
    `rows`: samples of the batch.
    """

    states: Tensor
    row: Tensor
    position: Tensor
    rows: int

    @classmethod
    def chosen(cls, states: Tensor, mask: Tensor) -> TokenStates:
        """Those of the tokens that the mask (row, position) names, from states (row, layer, position, width)."""
        row, position = mask.nonzero(as_tuple=True)
        return cls(states.transpose(1, 2)[row, position], row, position, len(mask))


class SequenceProbe(nn.Module):
    """One label a sample: each layer's tokens are added with learned weights of their positions.

    `pooled[l] = Σ_t w[l, t] m[t] h[l, t]`; all layers joined; Linear → tanh → dropout → Linear. `position_weights` are
    (layer, position), 1/T at the start.
    """

    def __init__(self, layers: int, length: int, width: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.position_weights = nn.Parameter(torch.full((layers, length), 1 / length))
        self.hidden = nn.Linear(layers * width, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, classes)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Logits (row, class) from states (row, layer, position, width) and the mask (row, position) of real tokens."""
        return self.of_tokens(TokenStates.chosen(states, mask))

    def of_tokens(self, tokens: TokenStates) -> Tensor:
        """The same from the real tokens alone, so that padding costs nothing."""
        weighted = tokens.states * self.position_weights[:, tokens.position].T[:, :, None]
        pooled = weighted.new_zeros(tokens.rows, *weighted.shape[1:]).index_add(0, tokens.row, weighted)
        return self.out(self.dropout(self.hidden(pooled.flatten(1)).tanh()))


class TokenProbe(nn.Module):
    """One label a token: its states of all layers joined; Linear → tanh → Linear."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(layers * width, width)
        self.activation: nn.Module = nn.Tanh()
        self.out = nn.Linear(width, classes)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Logits (row, position, class), 0 at padding, from states (row, layer, position, width) and the mask."""
        logits = self.of_tokens(TokenStates.chosen(states, mask))
        return logits.new_zeros(*mask.shape, logits.shape[-1]).index_put(mask.nonzero(as_tuple=True), logits)

    def of_tokens(self, tokens: TokenStates) -> Tensor:
        """Logits (token, class) of the chosen tokens alone: what is not chosen costs nothing."""
        return self.out(self.activation(self.hidden(tokens.states.flatten(1))))


class MaskedProbe(TokenProbe):
    """One word of the vocabulary a masked token: as `TokenProbe`, with the model's own activation."""

    def __init__(self, layers: int, width: int, vocabulary: int, activation: str) -> None:
        super().__init__(layers, width, vocabulary)
        if activation not in ACT2FN:
            raise UserError(f"activation: expected one that Transformers knows, got {activation!r}; usually gelu")
        self.activation = ACT2FN[activation]


Probe = SequenceProbe | TokenProbe


def make_probe(
    kind: ProbeKind,
    *,
    layers: int,
    length: int,
    width: int,
    classes: int,
    dropout: float = 0.1,
    activation: str | None = None,
    seed: int = 0,
) -> Probe:
    """A fresh probe, the same for the same seed; PyTorch's global generator is left as it was.

    `layers` counts the embeddings, `width` is the model's and also the probe's. `classes` of an MLM probe is the
    vocabulary, and its `activation` the model's `config.hidden_act`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind == "sequence":
            return SequenceProbe(layers, length, width, classes, dropout)
        if kind == "token":
            return TokenProbe(layers, width, classes)
        if kind == "mlm":
            if activation is None:
                raise UserError("activation: an MLM probe needs the model's, as config.hidden_act names it; got none")
            return MaskedProbe(layers, width, classes, activation)
    raise UserError(f"kind of probe: expected one of {', '.join(KINDS)}, got {kind!r}")
