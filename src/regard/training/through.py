"""Training through a frozen encoder: gates and constants inside it, together with the probe behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.training.probes import IGNORE_INDEX, Probe, SequenceProbe, TokenStates
from regard.training.probing import OnEpoch, ProbeSettings, loss_of, make_adam, optimize
from regard.training.states import eval_mode, get_encoder, hidden_states

Batch = tuple[Mapping[str, Tensor], Tensor, Tensor]


def train_through_encoder(
    model: PreTrainedModel,
    probe: Probe,
    batches_of: Callable[[int, int], Iterable[Batch]],
    parameters: Iterable[nn.Parameter],
    settings: ProbeSettings,
    seed: int,
    *,
    parameters_rate: float | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[float]:
    """The mean loss of each epoch, having trained the probe and the given parameters inside the model together.

    `batches_of(seed, epoch)` gives batches: the model's inputs, the mask (row, position) of real tokens, and the labels
    as `fit_probe` has them. `parameters_rate` is the learning rate of the parameters, None for the probe's. The model's
    other weights stay as they are, and nothing in it is dropped out; which weights require gradients is afterwards as
    it was. With no parameters this is `fit_probe` with the states computed anew in each epoch.
    """
    trained = list({id(one): one for one in parameters}.values())
    encoder = get_encoder(model)
    probe.to(model.device).train()

    def losses(epoch: int) -> Iterator[Tensor]:
        for inputs, mask, labels in batches_of(seed, epoch):
            chosen = (mask.bool() if isinstance(probe, SequenceProbe) else labels != IGNORE_INDEX).to(model.device)
            if bool(chosen.any()):
                states = hidden_states(encoder, {name: value.to(model.device) for name, value in inputs.items()})
                yield loss_of(probe, TokenStates.chosen(states, chosen), labels)

    groups: list[dict[str, object]] = [{"params": list(probe.parameters())}]
    if trained:
        groups.append({"params": trained, "lr": parameters_rate or settings.learning_rate, "weight_decay": 0.0})
    optimizer = make_adam(groups, settings)
    with eval_mode(model), only_trainable(model, trained):
        history = optimize(optimizer, losses, settings.epochs, seed, model.device, on_epoch)
        optimizer.zero_grad(set_to_none=True)
    probe.eval()
    return history


@contextlib.contextmanager
def only_trainable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While it lasts only the given parameters require gradients; afterwards each is as it was."""
    trained = list(parameters)
    before = [(one, one.requires_grad) for one in (*model.parameters(), *trained)]
    try:
        for one, _ in before:
            one.requires_grad_(False)
        for one in trained:
            one.requires_grad_(True)
        yield
    finally:
        for one, required in before:
            one.requires_grad_(required)
