"""Probes: small trained heads that read all hidden states of a frozen encoder (arXiv 2211.03495, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from regard.data.examples import IGNORE_INDEX as IGNORE_INDEX
from regard.data.examples import KINDS as KINDS
from regard.data.examples import TaskKind
from regard.errors import UserError

ProbeKind = TaskKind


@dataclass(frozen=True, eq=False)
class TokenStates:
    """Hidden states (token, layer, width) of selected tokens, with row and position (token,) in a batch of `rows`."""

    states: Tensor
    row: Tensor
    position: Tensor
    rows: int

    def to(self, device: torch.device) -> TokenStates:
        return TokenStates(self.states.to(device), self.row.to(device), self.position.to(device), self.rows)

    @classmethod
    def select(cls, states: Tensor, mask: Tensor) -> TokenStates:
        """Select tokens by a mask (row, position) from states (row, layer, position, width)."""
        row, position = mask.nonzero(as_tuple=True)
        return cls(states.transpose(1, 2)[row, position], row, position, len(mask))


class SequenceProbe(nn.Module):
    """Probe with one label for each sample.

    Tokens are pooled in each layer with learned weights of positions, Σ_t w[l, t] m[t] h[l, t], and layers are
    concatenated; then Linear → tanh → dropout → Linear. `position_weights` (layer, position) begin at 1/T.
    """

    def __init__(self, layers: int, length: int, width: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.position_weights = nn.Parameter(torch.full((layers, length), 1 / length))
        self.hidden = nn.Linear(layers * width, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, classes)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return logits (row, class) of states (row, layer, position, width) under a mask (row, position)."""
        return self.of_tokens(TokenStates.select(states, mask))

    def of_tokens(self, tokens: TokenStates) -> Tensor:
        """Return logits (row, class) of the tokens of a batch, without padding."""
        weighted = tokens.states * self.position_weights[:, tokens.position].T[:, :, None]
        pooled = weighted.new_zeros(tokens.rows, *weighted.shape[1:]).index_add(0, tokens.row, weighted)
        return self.out(self.dropout(self.hidden(pooled.flatten(1)).tanh()))


class TokenProbe(nn.Module):
    """Probe with one label for each token: its states of all layers; Linear → tanh → Linear."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(layers * width, width)
        self.activation: nn.Module = nn.Tanh()
        self.out = nn.Linear(width, classes)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return logits (row, position, class), 0 at padding, of states (row, layer, position, width)."""
        logits = self.of_tokens(TokenStates.select(states, mask))
        return logits.new_zeros(*mask.shape, logits.shape[-1]).index_put(mask.nonzero(as_tuple=True), logits)

    def of_tokens(self, tokens: TokenStates) -> Tensor:
        """Return logits (token, class) of selected tokens."""
        return self.out(self.activation(self.hidden(tokens.states.flatten(1))))


class MaskedProbe(TokenProbe):
    """Probe that predicts masked tokens: a `TokenProbe` over the vocabulary, with the activation of the model."""

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
    """Make a probe, initialized with the seed; the global generator is not changed.

    The number of `layers` includes the embeddings. `dropout` is of a sequence probe. An MLM probe needs the size of the
    vocabulary as `classes` and the model's `config.hidden_act` as `activation`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind == "sequence":
            return SequenceProbe(layers, length, width, classes, dropout)
        if kind == "token":
            return TokenProbe(layers, width, classes)
        if kind == "mlm":
            if activation is None:
                raise UserError("activation: an MLM probe needs the model's, which its config does not name")
            return MaskedProbe(layers, width, classes, activation)
    raise UserError(f"kind of probe: expected one of {', '.join(KINDS)}, got {kind!r}")
