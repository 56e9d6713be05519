"""Fitting and predicting: deterministic, from the kept states, and able to learn."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import UserError
from regard.training import (
    ProbeConfig,
    SequenceProbe,
    States,
    batch_rows,
    fit_probe,
    make_probe,
    predict,
    score,
)
from regard.training.probing import optimize
from tests.training.dense import dense_rows

from .conftest import LENGTH, SAMPLES, WORDS, Inputs

SETTINGS = ProbeConfig(learning_rate=5e-3, batch_size=4, epochs=3)
LONG = ProbeConfig(learning_rate=1e-2, batch_size=6, epochs=60)
CLASSES = {"sequence": 3, "token": 3, "mlm": WORDS}


def labels_of(kind: str, inputs: Inputs) -> Tensor:
    """Labels that the states tell: by the word of the first real token, or of the token itself."""
    if kind == "sequence":
        return inputs.ids[torch.arange(SAMPLES), inputs.mask.int().argmax(1)] % 3
    words = inputs.ids % 3 if kind == "token" else inputs.ids
    labelled = inputs.mask & (torch.arange(LENGTH) % 4 != 1)
    labelled[2] = False
    return torch.where(labelled, words, -100)


def fitted(kind: Any, states: States, inputs: Inputs, settings: ProbeConfig, seed: int = 0, **options: Any) -> Any:
    return fit_probe(kind, states, labels_of(kind, inputs), CLASSES[kind], settings, seed, activation="gelu", **options)


def weights(probe: torch.nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in probe.parameters()])


def test_steps_are_those_of_adam_with_an_l2_penalty() -> None:
    """Two steps an epoch of a (w − b)², of two weights, the second with a rate and a penalty of its own."""
    batches, settings = ((1.0, 3.0), (2.0, -1.0)), replace(SETTINGS, learning_rate=0.1, weight_decay=0.5, epochs=2)
    parts = [torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (2.0, -1.0)]

    def losses(epoch: int) -> Iterator[Tensor]:
        for a, b in batches:
            yield sum((a * (part - b).square() for part in parts), torch.zeros(()))

    groups: list[dict[str, object]] = [{"params": parts[:1]}, {"params": parts[1:], "lr": 0.2, "weight_decay": 0.0}]
    history = optimize(groups, settings, losses, 0, "cpu", None)
    expected = [0.0, 0.0]
    for part, start, rate, penalty in zip(parts, (2.0, -1.0), (0.1, 0.2), (0.5, 0.0), strict=True):
        w, mean, square = start, 0.0, 0.0
        for step, (a, b) in enumerate(batches * 2, start=1):
            expected[(step - 1) // 2] += a * (w - b) ** 2 / 2
            gradient = 2 * a * (w - b) + penalty * w
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            w -= rate * mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)) ** 0.5 + 1e-8)
        assert float(part.detach()) == pytest.approx(w, rel=1e-9)
    assert history == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_seed_gives_the_same_weights(kind: str, states: States, inputs: Inputs) -> None:
    torch.manual_seed(1)
    first = fitted(kind, states, inputs, SETTINGS)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = fitted(kind, states, inputs, SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(fitted(kind, states, inputs, SETTINGS, seed=1)))
    assert not first.training


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_kept_on_disk_scores_as_what_is_in_memory(
    kind: str, encode: Callable[..., States], inputs: Inputs
) -> None:
    kept = encode(dtype=torch.float32)
    labels = labels_of(kind, inputs)
    given = None if kind == "sequence" else labels
    fresh = States.of(dense_rows(kept, torch.arange(SAMPLES)), inputs.mask)
    cached, recomputed = (fitted(kind, each, inputs, SETTINGS) for each in (kept, fresh))
    assert torch.equal(weights(cached), weights(recomputed))
    assert torch.equal(predict(cached, kept, labels=given), predict(recomputed, fresh, labels=given))


@pytest.mark.exhaustive
def test_every_kind_learns_what_the_states_tell(states: States, inputs: Inputs) -> None:
    metrics = {"sequence": ("accuracy", 0.95), "token": ("token_f1", 0.95), "mlm": ("negative_log_perplexity", -0.2)}
    for kind, (metric, least) in metrics.items():
        labels = labels_of(kind, inputs)
        probe = fitted(kind, states, inputs, LONG)
        told = predict(probe, states, labels=None if kind == "sequence" else labels)
        assert score(metric, labels, told) >= least, kind


def adam_by_hand(states: Tensor, labels: Tensor, probe: SequenceProbe, epochs: int, rate: float) -> list[float]:
    """The loss of each epoch of one batch, by Kingma and Ba's algorithm 1 in float64."""
    probe = probe.double()
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in probe.parameters()]
    losses = []
    mask = torch.ones(states.shape[0], states.shape[2]).bool()
    for step in range(1, epochs + 1):
        loss = -probe(states.double(), mask).log_softmax(-1)[torch.arange(len(labels)), labels].mean()
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(probe.parameters()))
        with torch.no_grad():
            for one, gradient, (mean, square) in zip(probe.parameters(), gradients, moments, strict=True):
                mean.mul_(0.9).add_(0.1 * gradient)
                square.mul_(0.999).add_(0.001 * gradient**2)
                one -= rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    return losses


def test_fitting_is_adam_at_a_constant_rate_on_the_mean_cross_entropy() -> None:
    hidden = torch.randn(6, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 0, 2, 1])
    settings = ProbeConfig(learning_rate=1e-2, batch_size=6, epochs=8, dropout=0.0)
    told: list[tuple[int, int, float]] = []
    states = States.of(hidden, torch.ones(6, 3).bool())
    fit_probe("sequence", states, labels, 3, settings, 4, on_epoch=lambda *of: told.append(of))
    fresh = make_probe("sequence", layers=2, length=3, width=4, classes=3, dropout=0.0, seed=4)
    assert isinstance(fresh, SequenceProbe)
    assert [line[:2] for line in told] == [(epoch, 8) for epoch in range(1, 9)]
    expected = adam_by_hand(hidden, labels, fresh, 8, 1e-2)
    assert [line[2] for line in told] == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_an_epoch_is_the_mean_over_labelled_tokens(states: States, inputs: Inputs) -> None:
    labels = labels_of("token", inputs)
    settings = ProbeConfig(learning_rate=1e-12, batch_size=SAMPLES, epochs=1)
    told: list[float] = []
    probe = fit_probe("token", states, labels, 3, settings, 0, on_epoch=lambda *of: told.append(of[2]))
    logits = probe(dense_rows(states, torch.arange(SAMPLES)), inputs.mask)
    by_token = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert told == pytest.approx([float(by_token.detach()[labels != -100].mean())], rel=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_predictions_do_not_depend_on_the_batch_size(kind: str, states: States, inputs: Inputs) -> None:
    probe = fitted(kind, states, inputs, SETTINGS)
    given = None if kind == "sequence" else labels_of(kind, inputs)
    whole, *parts = (predict(probe, states, labels=given, batch_size=size) for size in (SAMPLES, 1, 5))
    for part in parts:
        torch.testing.assert_close(part, whole)


def test_predictions_are_the_likeliest_classes(states: States, inputs: Inputs) -> None:
    dense = dense_rows(states, torch.arange(SAMPLES))
    probe = fitted("sequence", states, inputs, SETTINGS)
    assert torch.equal(predict(probe, states), probe(dense, inputs.mask).argmax(-1))
    probe = fitted("token", states, inputs, SETTINGS)
    classes = probe(dense, inputs.mask).argmax(-1)
    assert torch.equal(predict(probe, states), torch.where(inputs.mask, classes, -100))
    labels = labels_of("token", inputs)
    assert torch.equal(predict(probe, states, labels=labels), torch.where(labels != -100, classes, -100))


def test_an_mlm_probe_tells_the_likelihood_of_the_labels(states: States, inputs: Inputs) -> None:
    labels = labels_of("mlm", inputs)
    probe = fitted("mlm", states, inputs, SETTINGS)
    told = predict(probe, states, labels=labels)
    all_words = probe(dense_rows(states, torch.arange(SAMPLES)), inputs.mask).log_softmax(-1)
    expected = all_words.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(told, torch.where(labels != -100, expected, 0.0))


def test_predicting_leaves_the_mode_as_it_was(states: States, inputs: Inputs) -> None:
    probe = fitted("sequence", states, inputs, SETTINGS).train()
    first = predict(probe, states)
    assert probe.training
    assert torch.equal(first, predict(probe, states))


def test_an_epoch_sees_every_row_once_in_an_order_of_its_own() -> None:
    epochs = [batch_rows(10, 4, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    for batches in epochs:
        assert [len(rows) for rows in batches] == [4, 4, 2]
        assert torch.cat(batches).sort().values.tolist() == list(range(10))
        assert all(bool((rows.diff() > 0).all()) for rows in batches)
    orders = [torch.cat(batches).tolist() for batches in epochs]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("sequence", lambda labels: labels[1:], r"expected \(18,\) for these states, got \(17,\)"),
        ("token", lambda labels: labels[:, 1:], r"expected \(18, 9\) for these states, got \(18, 8\)"),
        ("sequence", lambda labels: labels + 1, "expected 0 to 2, got 1 to 3"),
        ("sequence", lambda labels: labels - 1, "expected 0 to 2, got -1 to 1"),
        ("token", lambda labels: torch.full_like(labels, -100), "expected at least one"),
        ("token", lambda labels: torch.zeros_like(labels), "expected labels on real tokens only"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    kind: Any, change: Callable[[Tensor], Tensor], message: str, states: States, inputs: Inputs
) -> None:
    with pytest.raises(UserError, match=message):
        fit_probe(kind, states, change(labels_of(kind, inputs)), 3, SETTINGS, 0)


def test_a_rate_that_diverges_is_told(states: States, inputs: Inputs) -> None:
    settings = ProbeConfig(learning_rate=1e38, batch_size=4, epochs=3)
    with pytest.raises(UserError, match="loss is no longer finite in epoch"):
        fitted("sequence", states, inputs, settings)


def test_probes_train_where_gradients_are_off_but_not_in_inference_mode(states: States, inputs: Inputs) -> None:
    probe = fitted("sequence", states, inputs, SETTINGS)
    with torch.no_grad():
        assert all(map(torch.equal, fitted("sequence", states, inputs, SETTINGS).parameters(), probe.parameters()))
    with torch.inference_mode(), pytest.raises(UserError, match=r"outside of torch\.inference_mode\(\)"):
        fitted("sequence", states, inputs, SETTINGS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"learning_rate": 0.0}, "learning-rate: expected a number over 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning-rate"),
        ({"batch_size": 0}, "batch-size: expected a whole number of at least 1, got 0"),
        ({"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"weight_decay": -1.0}, "weight-decay"),
    ],
)
def test_settings_outside_their_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProbeConfig(**{"learning_rate": 1e-3, "batch_size": 4, "epochs": 1, **change})
