"""Training through the encoder: only what is named learns, and everything else is as before."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import UserError
from regard.training import ProbeConfig, States, batch_rows, fit_probe, make_probe, train_through_encoder
from regard.training.probing import Batch

from .conftest import LAYERS, LENGTH, SAMPLES, WIDTH, Inputs

SETTINGS = ProbeConfig(learning_rate=5e-3, batch_size=4, epochs=3)
Batches = Callable[[int, int], Iterator[Batch]]


def probe_of(kind: Any, classes: int = 2, seed: int = 0) -> Any:
    return make_probe(kind, layers=LAYERS, length=LENGTH, width=WIDTH, classes=classes, seed=seed)


@pytest.fixture
def labels() -> Tensor:
    return torch.arange(SAMPLES) % 2


@pytest.fixture
def batches(inputs: Inputs, labels: Tensor) -> Batches:
    def of(seed: int, epoch: int) -> Iterator[Batch]:
        for rows in batch_rows(SAMPLES, SETTINGS.batch_size, seed, epoch):
            yield inputs.batch(rows), inputs.mask[rows], labels[rows]

    return of


@pytest.fixture
def gated(model: Any) -> nn.Parameter:
    """A factor on the output of the first layer, inside the model and 1 at the start, as a gate would be."""
    gate = nn.Parameter(torch.ones(()))
    layer = model.bert.encoder.layer[0]
    layer.output.gate = gate
    layer.output.register_forward_hook(lambda module, given, output: output * gate)
    return gate


def test_with_nothing_inside_it_is_fitting_to_kept_states(
    model: Any, encode: Callable[..., States], batches: Batches, labels: Tensor
) -> None:
    kept = encode(dtype=torch.float32)
    told: list[float] = []
    cached = fit_probe("sequence", kept, labels, 2, SETTINGS, 3, on_epoch=lambda *of: told.append(of[2]))
    probe = probe_of("sequence", seed=3)
    history = train_through_encoder(model, probe, batches, (), SETTINGS, 3)
    assert history == pytest.approx(told, rel=1e-5)
    for one, other in zip(probe.parameters(), cached.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_only_what_is_named_learns(model: Any, batches: Batches, gated: nn.Parameter) -> None:
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    probe = probe_of("sequence")
    fresh = [one.detach().clone() for one in probe.parameters()]
    history = train_through_encoder(model, probe, batches, [gated], SETTINGS, 0)
    assert len(history) == SETTINGS.epochs
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert changed == ["bert.encoder.layer.0.output.gate"]
    assert all(not torch.equal(one, old) for one, old in zip(probe.parameters(), fresh, strict=True))


def test_the_gradient_is_that_of_the_loss(model: Any, inputs: Inputs, labels: Tensor, gated: nn.Parameter) -> None:
    """The gate goes where a difference quotient says that the loss falls, by one rate (Adam's first step)."""
    probe = probe_of("sequence").eval()
    rows = torch.arange(SAMPLES)

    def loss(at: float) -> float:
        with torch.no_grad():
            gated.fill_(at)
            shown = model.eval()(**inputs.batch(rows), output_hidden_states=True).hidden_states
            gated.fill_(1.0)
            logits = probe(torch.stack(shown, 1), inputs.mask)
            return float(-logits.double().log_softmax(-1)[rows, labels].mean())

    slope = (loss(1.01) - loss(0.99)) / 0.02
    probe.dropout.p = 0.0
    settings = ProbeConfig(learning_rate=1e-9, batch_size=SAMPLES, epochs=1)
    train_through_encoder(
        model,
        probe,
        lambda seed, epoch: [(inputs.batch(rows), inputs.mask, labels)],
        [gated],
        settings,
        0,
        parameters_rate=0.1,
    )
    assert abs(slope) > 1e-4
    assert float(gated.detach()) == pytest.approx(1 - 0.1 * (1 if slope > 0 else -1), rel=1e-3)


def test_a_rate_of_their_own(model: Any, batches: Batches, gated: nn.Parameter) -> None:
    once = ProbeConfig(learning_rate=1e-4, batch_size=4, epochs=1)
    train_through_encoder(model, probe_of("sequence"), batches, [gated], once, 0)
    slow = abs(float(gated.detach()) - 1)
    with torch.no_grad():
        gated.fill_(1.0)
    train_through_encoder(model, probe_of("sequence"), batches, [gated], once, 0, parameters_rate=1e-2)
    assert 0 < slow <= 5.1e-4
    assert abs(float(gated.detach()) - 1) > 10 * slow


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_gradients_are_put_back(
    model: Any, batches: Batches, gated: nn.Parameter, labels: Tensor, fails: bool
) -> None:
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    gated.requires_grad_(False)
    model.bert.encoder.layer[1].eval()
    modes = [module.training for module in model.modules()]
    required = [one.requires_grad for one in model.parameters()]
    random = torch.get_rng_state()

    def breaking(seed: int, epoch: int) -> Iterator[Batch]:
        yield from batches(seed, epoch)
        raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            train_through_encoder(model, probe_of("sequence"), breaking, [gated], SETTINGS, 0)
    else:
        train_through_encoder(model, probe_of("sequence"), batches, [gated], SETTINGS, 0)
        assert all(one.grad is None for one in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert [one.requires_grad for one in model.parameters()] == required
    assert torch.equal(torch.get_rng_state(), random)


def test_the_same_seed_gives_the_same_gates(model: Any, batches: Batches, gated: nn.Parameter) -> None:
    ends = []
    for seed in (0, 0, 1):
        with torch.no_grad():
            gated.fill_(1.0)
        history = train_through_encoder(model, probe_of("sequence", seed=seed), batches, [gated], SETTINGS, seed)
        ends.append((history, float(gated.detach())))
    assert ends[0] == ends[1] != ends[2]


def test_tokens_learn_too(model: Any, inputs: Inputs, gated: nn.Parameter) -> None:
    labels = torch.where(inputs.mask, inputs.ids % 2, -100)
    labels[4:8] = -100

    def batches(seed: int, epoch: int) -> Iterator[Batch]:
        for rows in torch.arange(SAMPLES).split(4):
            yield inputs.batch(rows), inputs.mask[rows], labels[rows]

    settings = ProbeConfig(learning_rate=1e-2, batch_size=4, epochs=12)
    history = train_through_encoder(model, probe_of("token"), batches, [gated], settings, 0)
    assert history[-1] < 0.5 * history[0]


def test_no_batches_are_refused(model: Any) -> None:
    with pytest.raises(UserError, match="expected at least one batch with labels"):
        train_through_encoder(model, probe_of("sequence"), lambda seed, epoch: [], (), SETTINGS, 0)


def test_a_rate_of_zero_is_a_rate(model: Any, batches: Batches, gated: nn.Parameter) -> None:
    before = gated.detach().clone()
    settings = ProbeConfig(learning_rate=0.1, batch_size=4, epochs=1)
    train_through_encoder(model, probe_of("sequence"), batches, [gated], settings, 0, parameters_rate=0.0)
    assert gated.equal(before)
