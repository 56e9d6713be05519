"""Training through a frozen encoder: gates and constants inside it, together with a probe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.training.probes import IGNORE_INDEX, Probe, SequenceProbe, TokenStates
from regard.training.probing import OnEpoch, ProbeConfig, loss_of, make_adam, optimize
from regard.training.states import eval_mode, get_encoder, hidden_states

Batch = tuple[Mapping[str, Tensor], Tensor, Tensor]


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
        rate = parameters_rate or settings.learning_rate
        groups.append({"params": trained_parameters, "lr": rate, "weight_decay": 0.0})
    optimizer = make_adam(groups, settings)
    with eval_mode(model), only_trainable(model, trained_parameters):
        history = optimize(optimizer, losses, settings.epochs, seed, model.device, on_epoch)
        optimizer.zero_grad(set_to_none=True)
    probe.eval()
    return history


@contextlib.contextmanager
def only_trainable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let only these parameters require gradients for a while."""
    trained = list(parameters)
    previous = [(parameter, parameter.requires_grad) for parameter in (*model.parameters(), *trained)]
    try:
        for parameter, _ in previous:
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in previous:
            parameter.requires_grad_(required)
