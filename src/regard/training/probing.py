"""Fitting a probe to stored hidden states or through a frozen encoder, and predicting with it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.gradients import enable_gradients
from regard.errors import UserError
from regard.models.model_files import eval_mode
from regard.runs.config import Config, config_field
from regard.training.probes import IGNORE_INDEX, MaskedProbe, Probe, ProbeKind, SequenceProbe, TokenStates, make_probe
from regard.training.states import States, get_encoder, hidden_states

OnEpoch = Callable[[int, int, float], None]
Batch = tuple[Mapping[str, Tensor], Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Config):
    """Hyperparameters of a probe: Adam with a constant learning rate (arXiv 2211.03495, table 3)."""

    command: ClassVar[str] = "probe"

    learning_rate: float = config_field(dataclasses.MISSING, "Learning rate.", exclusive_minimum=0)
    batch_size: int = config_field(dataclasses.MISSING, "Samples of a batch.")
    epochs: int = config_field(dataclasses.MISSING, "Passes over the samples.")
    dropout: float = config_field(0.1, "Dropout of a sequence probe.", minimum=0, exclusive_maximum=1)
    weight_decay: float = config_field(0.0, "L2 penalty of Adam.", minimum=0)


def fit_probe(
    kind: ProbeKind,
    states: States,
    labels: Tensor,
    classes: int,
    settings: ProbeConfig,
    seed: int,
    *,
    activation: str | None = None,
    device: torch.device | str = "cpu",
    on_epoch: OnEpoch | None = None,
) -> Probe:
    """Fit a new probe, and return it in evaluation mode; the global generators are not changed.

    Labels are (sample,) of a sequence probe, else (sample, position) with −100 for tokens without label. The seed is of
    weights, batches and dropout. `on_epoch` is called with epochs done, all epochs and mean loss.
    """
    check_labels(kind, states, labels, classes)
    sizes = {"layers": states.layers, "length": states.length, "width": states.width, "classes": classes}
    probe = make_probe(kind, **sizes, dropout=settings.dropout, activation=activation, seed=seed).to(device)

    def losses(epoch: int) -> Iterator[Tensor]:
        for rows in batch_rows(len(states), settings.batch_size, seed, epoch):
            token_mask = None if kind == "sequence" else labels[rows] != IGNORE_INDEX
            if token_mask is None or bool(token_mask.any()):
                yield loss_of(probe, states.tokens(rows, token_mask), labels[rows])

    optimize([{"params": list(probe.parameters())}], settings, losses, seed, device, on_epoch)
    return probe.eval()


def check_labels(kind: ProbeKind, states: States, labels: Tensor, classes: int) -> None:
    """Check that labels fit the states and the classes."""
    expected = states.mask.shape[: 1 if kind == "sequence" else 2]
    if labels.shape != expected:
        raise UserError(f"labels: expected {tuple(expected)} for these states, got {tuple(labels.shape)}")
    valid_labels = labels if kind == "sequence" else labels[labels != IGNORE_INDEX]
    if not valid_labels.numel():
        raise UserError("labels: expected at least one; every token is marked as having none")
    smallest, largest = int(valid_labels.min()), int(valid_labels.max())
    if not 0 <= smallest <= largest < classes:
        raise UserError(f"labels: expected 0 to {classes - 1}, got {smallest} to {largest}")
    if kind != "sequence" and bool(((labels != IGNORE_INDEX) & ~states.mask).any()):
        raise UserError("labels: expected labels on real tokens only, got some on padding")


def batch_rows(samples: int, size: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """Return the rows of each batch of an epoch: shuffled over batches, sorted within one for sequential reads."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(samples, generator=generator)
    return tuple(rows.sort().values for rows in order.split(size))


def loss_of(probe: Probe, tokens: TokenStates, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch with labels (row,), or (row, position) at the tokens."""
    device = next(probe.parameters()).device
    labels = labels.to(device)
    tokens = tokens.to(device)
    targets = labels if isinstance(probe, SequenceProbe) else labels[tokens.row, tokens.position]
    return nn.functional.cross_entropy(probe.of_tokens(tokens), targets)


def optimize(
    groups: list[dict[str, object]],
    settings: ProbeConfig,
    losses: Callable[[int], Iterable[Tensor]],
    seed: int,
    device: torch.device | str,
    on_epoch: OnEpoch | None,
) -> list[float]:
    """Take a step of Adam for each loss of `losses(epoch)`, and return the mean loss of each epoch.

    The learning rate of a group of parameters is by default that of the settings.
    """
    optimizer = torch.optim.Adam(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    history: list[float] = []
    with enable_gradients(), seeded_dropout(seed, device):
        for epoch in range(settings.epochs):
            step_losses: list[Tensor] = []
            for loss in losses(epoch):
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                step_losses.append(loss.detach())
            if not step_losses:
                raise UserError("training: expected at least one batch with labels, got none")
            history.append(float(torch.stack(step_losses).mean()))
            if not history[-1] < float("inf"):
                raise UserError(f"training: the loss is no longer finite in epoch {epoch + 1}; choose a lower rate")
            if on_epoch is not None:
                on_epoch(epoch + 1, settings.epochs, history[-1])
    optimizer.zero_grad(set_to_none=True)
    return history


@contextlib.contextmanager
def seeded_dropout(seed: int, device: torch.device | str) -> Iterator[None]:
    """Seed the global generators for a while, then restore them."""
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[torch.device(device)] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


@torch.no_grad()
def predict(probe: Probe, states: States, *, labels: Tensor | None = None, batch_size: int = 64) -> Tensor:
    """Predict with a probe; with labels (sample, position), which an MLM probe needs, only tokens that have one.

    Returns:
        Classes (sample,) of a sequence probe. Classes (sample, position) of a token probe, −100 at other tokens. Of an
        MLM probe log-likelihoods of the labels in nats, (sample, position), 0 at other tokens.
    """
    assert labels is not None or not isinstance(probe, MaskedProbe), "an MLM probe says how likely the labels are"
    device, batches = next(probe.parameters()).device, torch.arange(len(states)).split(batch_size)
    with eval_mode(probe):
        return torch.cat([_predict_batch(probe, states, rows, labels, device) for rows in batches])


def _predict_batch(probe: Probe, states: States, rows: Tensor, labels: Tensor | None, device: torch.device) -> Tensor:
    sequence = isinstance(probe, SequenceProbe)
    tokens = states.tokens(rows, None if sequence or labels is None else labels[rows] != IGNORE_INDEX)
    logits = probe.of_tokens(tokens.to(device)).cpu()
    if sequence:
        return logits.argmax(-1)
    if isinstance(probe, MaskedProbe):
        assert labels is not None
        values = -nn.functional.cross_entropy(logits, labels[rows][tokens.row, tokens.position], reduction="none")
        result = values.new_zeros(len(rows), states.length)
    else:
        values = logits.argmax(-1)
        result = values.new_full((len(rows), states.length), IGNORE_INDEX)
    result[tokens.row, tokens.position] = values
    return result


def train_through_encoder(
    model: PreTrainedModel,
    probe: Probe,
    batches_of: Callable[[int, int], Iterable[Batch]],
    parameters: Iterable[nn.Parameter],
    settings: ProbeConfig,
    seed: int,
    *,
    parameters_rate: float | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[float]:
    """Train a probe and parameters inside the model together, and return the mean loss of each epoch.

    The model runs in evaluation mode, and its other weights are frozen meanwhile. Without parameters this is
    `fit_probe` with states computed again in each epoch.

    `batches_of` returns, for a seed and an epoch, batches of model inputs, mask (row, position) of tokens that are no
    padding, and labels as in `fit_probe`. `parameters_rate` is by default the learning rate of the probe.
    """
    trained_parameters = list({id(parameter): parameter for parameter in parameters}.values())
    encoder = get_encoder(model)
    probe.to(model.device).train()

    def losses(epoch: int) -> Iterator[Tensor]:
        for inputs, mask, labels in batches_of(seed, epoch):
            token_mask = (mask.bool() if isinstance(probe, SequenceProbe) else labels != IGNORE_INDEX).to(model.device)
            if bool(token_mask.any()):
                states = hidden_states(encoder, {name: value.to(model.device) for name, value in inputs.items()})
                yield loss_of(probe, TokenStates.select(states, token_mask), labels)

    groups: list[dict[str, object]] = [{"params": list(probe.parameters())}]
    if trained_parameters:
        rate = settings.learning_rate if parameters_rate is None else parameters_rate
        groups.append({"params": trained_parameters, "lr": rate, "weight_decay": 0.0})
    with eval_mode(model), only_trainable(model, trained_parameters):
        history = optimize(groups, settings, losses, seed, model.device, on_epoch)
    probe.eval()
    return history


@contextlib.contextmanager
def only_trainable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let only these parameters require gradients for a while."""
    trained = nn.ParameterList(parameters)
    previous = [(parameter, parameter.requires_grad) for parameter in (*model.parameters(), *trained)]
    try:
        model.requires_grad_(False)
        trained.requires_grad_(True)
        yield
    finally:
        for parameter, required in previous:
            parameter.requires_grad_(required)
