"""Fitting a probe to kept hidden states, and predicting with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.training.probes import (
    IGNORE_INDEX,
    MaskedProbe,
    Probe,
    ProbeKind,
    SequenceProbe,
    TokenStates,
    make_probe,
)
from regard.training.states import States

OnEpoch = Callable[[int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How a probe is fitted: Adam at one constant rate. The paper's table 3 has the numbers for each task."""

    learning_rate: float
    batch_size: int
    epochs: int
    dropout: float = 0.1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check what can be checked without states."""
        for name in ("batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"learning-rate: expected a number above 0, got {self.learning_rate}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout: expected a share from 0 to below 1, got {self.dropout}")
        if not 0 <= self.weight_decay < float("inf"):
            raise UserError(f"weight-decay: expected a number from 0, got {self.weight_decay}")


def fit_probe(
    kind: ProbeKind,
    states: States,
    labels: Tensor,
    classes: int,
    settings: ProbeSettings,
    seed: int,
    *,
    activation: str | None = None,
    device: torch.device | str = "cpu",
    on_epoch: OnEpoch | None = None,
) -> Probe:
    """The probe, fitted from scratch; on the CPU the same for the same seed. The global generators are left alone.

    `labels`: (sample,) for a sequence probe, else (sample, position), −100 where there is none: such tokens are not
    computed. `classes` of an MLM probe is the vocabulary; its `activation` is the model's `config.hidden_act`. The loss
    of a batch is the mean over its labels. `on_epoch(done, all, mean loss)` is called after each epoch.
    """
    check_labels(kind, states, labels, classes)
    sizes = {"layers": states.layers, "length": states.length, "width": states.width, "classes": classes}
    probe = make_probe(kind, **sizes, dropout=settings.dropout, activation=activation, seed=seed).to(device)

    def losses(epoch: int) -> Iterator[Tensor]:
        for rows in batch_rows(len(states), settings.batch_size, seed, epoch):
            chosen = None if kind == "sequence" else labels[rows] != IGNORE_INDEX
            if chosen is None or bool(chosen.any()):
                yield loss_of(probe, states.tokens(rows, chosen), labels[rows])

    optimize(
        make_adam([{"params": list(probe.parameters())}], settings), losses, settings.epochs, seed, device, on_epoch
    )
    return probe.eval()


def check_labels(kind: ProbeKind, states: States, labels: Tensor, classes: int) -> None:
    """Nothing, or a UserError: the labels do not fit the states, or are none of the classes."""
    expected = states.mask.shape[: 1 if kind == "sequence" else 2]
    if labels.shape != expected:
        raise UserError(f"labels: expected {tuple(expected)} for these states, got {tuple(labels.shape)}")
    given = labels if kind == "sequence" else labels[labels != IGNORE_INDEX]
    if not given.numel():
        raise UserError("labels: expected at least one; every token is marked as having none")
    if not 0 <= int(given.min()) <= int(given.max()) < classes:
        raise UserError(f"labels: expected 0 to {classes - 1}, got {int(given.min())} to {int(given.max())}")
    if kind != "sequence" and bool(((labels != IGNORE_INDEX) & ~states.mask).any()):
        raise UserError("labels: expected labels on real tokens only, got some on padding")


def batch_rows(samples: int, size: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The rows of each batch of an epoch: shuffled over batches, rising within one, so that reading goes forward."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(samples, generator=generator)
    return tuple(rows.sort().values for rows in order.split(size))


def loss_of(probe: Probe, tokens: TokenStates, labels: Tensor) -> Tensor:
    """The mean cross entropy of a batch: `labels` (row,), or (row, position) of which those at the tokens count."""
    device = next(probe.parameters()).device
    labels = labels.to(device)
    placed = TokenStates(tokens.states.to(device), tokens.row.to(device), tokens.position.to(device), tokens.rows)
    wanted = labels if isinstance(probe, SequenceProbe) else labels[placed.row, placed.position]
    return nn.functional.cross_entropy(probe.of_tokens(placed), wanted)


def make_adam(groups: list[dict[str, object]], settings: ProbeSettings) -> torch.optim.Optimizer:
    """Adam over groups of parameters, at the settings' rate where a group names no `lr`."""
    return torch.optim.Adam(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)


def optimize(
    optimizer: torch.optim.Optimizer,
    losses: Callable[[int], Iterable[Tensor]],
    epochs: int,
    seed: int,
    device: torch.device | str,
    on_epoch: OnEpoch | None,
) -> list[float]:
    """The mean loss of each epoch, having taken a step for every loss that `losses(epoch)` gives."""
    history: list[float] = []
    with torch.enable_grad(), drawing(seed, device):
        for epoch in range(epochs):
            taken: list[Tensor] = []
            for loss in losses(epoch):
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                taken.append(loss.detach())
            if not taken:
                raise UserError("training: expected at least one batch with labels, got none")
            history.append(float(torch.stack(taken).mean()))
            if not history[-1] < float("inf"):
                raise UserError(f"training: the loss is no longer finite in epoch {epoch + 1}; choose a lower rate")
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, history[-1])
    return history


@contextlib.contextmanager
def drawing(seed: int, device: torch.device | str) -> Iterator[None]:
    """While it lasts dropout draws from the seed; afterwards the global generators stand where they stood."""
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[torch.device(device)] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


@torch.no_grad()
def predict(probe: Probe, states: States, *, labels: Tensor | None = None, batch_size: int = 64) -> Tensor:
    """What the probe says of each sample (sequence), or of each token (sample, position).

    Sequence and token probes give the number of the likeliest class. A token probe says it of the tokens that have a
    label where `labels` are given, else of all real ones, and −100 elsewhere. An MLM probe needs `labels`, and gives
    the log-likelihood of each in nats, 0 elsewhere: the distributions themselves would not fit the memory.
    """
    assert labels is not None or not isinstance(probe, MaskedProbe), "an MLM probe says how likely the labels are"
    device, training = next(probe.parameters()).device, probe.training
    probe.eval()
    try:
        batches = torch.arange(len(states)).split(batch_size)
        return torch.cat([_predicted(probe, states, rows, labels, device) for rows in batches])
    finally:
        probe.train(training)


def _predicted(probe: Probe, states: States, rows: Tensor, labels: Tensor | None, device: torch.device) -> Tensor:
    sequence = isinstance(probe, SequenceProbe)
    tokens = states.tokens(rows, None if sequence or labels is None else labels[rows] != IGNORE_INDEX)
    logits = probe.of_tokens(
        TokenStates(tokens.states.to(device), tokens.row.to(device), tokens.position.to(device), tokens.rows)
    ).cpu()
    if sequence:
        return logits.argmax(-1)
    if isinstance(probe, MaskedProbe):
        assert labels is not None
        told = -nn.functional.cross_entropy(logits, labels[rows][tokens.row, tokens.position], reduction="none")
        empty = told.new_zeros(len(rows), states.length)
    else:
        told = logits.argmax(-1)
        empty = told.new_full((len(rows), states.length), IGNORE_INDEX)
    empty[tokens.row, tokens.position] = told
    return empty
