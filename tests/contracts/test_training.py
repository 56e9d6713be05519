"""In train mode: the gradients are those of the model alone, the statistics those without dropout."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.hooks import watching

pytestmark = pytest.mark.sample(2)


@contextmanager
def training(model: Any, dropout: float) -> Iterator[None]:
    """The model in train mode with this dropout everywhere, and afterwards as it was."""
    before = [(m, name, value) for m in model.modules() for name, value in _dropouts(m)]
    for module, name, _ in before:
        setattr(module, name, dropout)
    model.train()
    try:
        yield
    finally:
        model.eval()
        model.zero_grad()
        for module, name, value in before:
            setattr(module, name, value)


def _dropouts(module: nn.Module) -> list[tuple[str, float]]:
    if isinstance(module, nn.Dropout):
        return [("p", module.p)]
    names = ("attention_dropout", "dropout", "dropout_prob", "activation_dropout")
    values = [(name, getattr(module, name, None)) for name in names]
    return [(name, value) for name, value in values if isinstance(value, float)]


def loss_of(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)[0]
    real = given.get("decoder_attention_mask", given.get("attention_mask"))
    if real is not None:
        output = output[real.bool()]
    return (output * torch.sin(torch.arange(output.shape[-1]))).square().mean()


def gradients(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, given).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_the_model_alone(family: Any, build: Any, inputs: Any) -> None:
    model, given = build(family), inputs(family, family.paddings[-1])
    with training(model, dropout=0.0):
        alone = gradients(model, given)
        with watching(model, "all") as seen:
            watched = gradients(model, given)
    assert seen.samples == 3
    assert watched.keys() == alone.keys()
    for name, gradient in alone.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (watched[name] - gradient).abs().max() <= 1e-4 * scale, name


def test_statistics_are_those_without_dropout(
    family: Any, build: Any, inputs: Any, table: Any, assert_same: Any
) -> None:
    """Recorded weights of train mode carry the dropout: their rows do not sum to 1."""
    model, given = build(family), inputs(family, "none")
    with watching(model, ["column_mass", "row_sum"]) as expected:
        loss_of(model, given)
    with training(model, dropout=0.5):
        torch.manual_seed(1)
        with torch.no_grad(), watching(model, ["column_mass", "row_sum"]) as seen:
            loss_of(model, given)
    # The input of the first layer has its dropout too, where a family drops embeddings: rows still sum to 1.
    rows = {key: value for key, value in table(seen).items() if key[0] == "row_sum"}
    if family.column:
        assert_same(
            {k: v for k, v in rows.items() if k[2] == 0},
            {k: v for k, v in table(expected).items() if k[0] == "row_sum" and k[2] == 0},
            rtol=1e-5,
            atol=1e-5,
        )
    else:
        assert all(abs(value - 1) < 1e-5 for value, _ in rows.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Bert", "Bart", "T5", "Gemma2", "GptOss", "ViT"])
def test_the_forward_drops_what_it_would_alone(name: str, families: Any, build: Any, inputs: Any) -> None:
    model, given = build(name), inputs(families[name], families[name].paddings[-1])
    losses = []
    with training(model, dropout=0.3):
        for watched in (False, True):
            torch.manual_seed(5)
            if watched:
                with watching(model, "all"):
                    losses.append(loss_of(model, given))
            else:
                losses.append(loss_of(model, given))
        other = loss_of(model, given)
    assert torch.allclose(losses[0], losses[1], rtol=1e-4)
    assert (other - losses[0]).abs() > 10 * (losses[1] - losses[0]).abs()


# DeBERTa's shared position embeddings allow no reentrant checkpoints, watched or not.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name, reentrant",
    [*itertools.product(["GPT2", "Llama", "Bert", "T5"], [False, True]), ("DebertaV2", False)],
)
def test_checkpointing_counts_once(
    name: str, reentrant: bool, families: Any, build: Any, inputs: Any, table: Any, assert_same: Any
) -> None:
    model, given = build(name), inputs(families[name], "right")
    with training(model, dropout=0.0):
        alone = gradients(model, given)
        with watching(model, "all") as expected:
            loss_of(model, given)
        # Renamed within Transformers 5, with a warning for the old name.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with watching(model, "all") as seen:
            watched = gradients(model, given)
        model.disable_input_require_grads()
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    assert seen.samples == 3
    assert_same(table(seen), table(expected), rtol=1e-5, atol=1e-5)
    for key, gradient in alone.items():
        assert (watched[key] - gradient).abs().max() <= 1e-4 * gradient.abs().max().clamp(min=1e-3), key
