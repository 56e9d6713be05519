"""Gates between attention and constants, and constants that are trained, in every family of models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import regard
from regard.constants import Constants, Origin
from regard.hooks.layers import find_attention_layers, model_fingerprint

pytestmark = pytest.mark.sample(2)


def constants_for(model: Any, length: int = 24) -> Constants:
    here = find_attention_layers(model)
    generator = torch.Generator().manual_seed(3)
    matrices = {(p.site, p.layer): torch.rand(p.heads, length, length, generator=generator) for p in here}
    return Constants(matrices=matrices, origin=Origin(source="test", model=model_fingerprint(model, here)))


def padding_of(family: Any) -> str:
    return "right" if "right" in family.paddings else "none"


def test_a_gate_goes_from_attention_to_constants(family: Any, build: Callable, inputs: Callable, run: Callable) -> None:
    model = build(family, "", torch.float64)
    constants, batch = constants_for(model), inputs(family, "none")
    untouched = run(model, batch)
    with regard.replacing(model, constants):
        constant = run(model, batch)
    with regard.mixing(model, constants) as mixed:
        assert all(bool((share == 0.5).all()) for share in mixed.gate_values().values())
        found = {}
        for logit in (-40.0, 0.0, 40.0):
            with torch.no_grad():
                for gate in mixed.parameters():
                    gate.fill_(logit)
            found[logit] = run(model, batch)
    torch.testing.assert_close(found[40.0], untouched, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[-40.0], constant, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found[0.0], untouched, rtol=1e-2, atol=1e-2)
    assert torch.equal(run(model, batch), untouched)


@pytest.mark.parametrize("kind", ["gates", "matrices"])
def test_gradients_reach_every_head(kind: str, family: Any, build: Callable, inputs: Callable) -> None:
    model = build(family, "", torch.float64)
    constants = constants_for(model)
    state = regard.mixing(model, constants) if kind == "gates" else regard.replacing(model, constants, train=True)
    with state as held:
        loss = model(**inputs(family, padding_of(family)))[0].square().sum()
        found = torch.autograd.grad(loss, held.parameters())
    assert len(found) == len(find_attention_layers(model))
    for gradient in found:
        assert gradient.isfinite().all()
        by_head = gradient.abs().flatten(1).sum(1) if gradient.ndim > 1 else gradient.abs()
        assert (by_head > 0).all()


def test_training_causal_constants_does_not_let_them_see_the_future(
    build: Callable, inputs: Callable, families: Any
) -> None:
    model = build("GPT2", "", torch.float64)
    batch = inputs(families["GPT2"], "none")
    later = {**batch, "input_ids": batch["input_ids"].clone()}
    later["input_ids"][:, -1] = 5
    with regard.replacing(model, constants_for(model), train=True) as held:
        optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
        model(**batch)[0].square().sum().backward()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch)[0][:, :-1], model(**later)[0][:, :-1])
        assert all(not bool(matrix.triu(1).any()) for matrix in held.constants().matrices.values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(
    reentrant: bool, build: Callable, inputs: Callable, families: Any
) -> None:
    """A layer is then called twice for one forward of its stack."""
    batch = inputs(families["Bert"], "right")
    model = build("Bert", "", torch.float64)
    fixed = regard.replaced(model, constants_for(model), [(0, 1), (0, 2), (1, 0)]).train()
    fixed.config.hidden_dropout_prob = 0.0
    for module in fixed.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients() -> list[torch.Tensor]:
        fixed.zero_grad()
        fixed(**batch)[0].square().sum().backward()
        return [p.grad.clone() for p in fixed.parameters() if p.grad is not None]

    expected = gradients()
    enable = getattr(fixed, "activation_checkpointing_enable", None) or fixed.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    if reentrant:
        fixed.enable_input_require_grads()
    for found, right in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_trained_constants_are_read_back_and_serve(
    build: Callable, inputs: Callable, run: Callable, families: Any
) -> None:
    model, batch = build("Bert", "", torch.float64), inputs(families["Bert"], "right")
    constants = constants_for(model)
    with regard.replacing(model, constants, train=True) as held:
        with torch.no_grad():
            for parameter in held.parameters():
                parameter.sub_(0.05)  # some entries are negative from now on
        expected = run(model, batch)
        trained = held.constants()
    assert trained.origin.source == "trained from test"
    assert any(bool((matrix < 0).any()) for matrix in trained.matrices.values())
    with regard.replacing(model, trained):
        torch.testing.assert_close(run(model, batch), expected, rtol=1e-5, atol=1e-5)


def test_each_forward_uses_the_shortest_constants_that_serve_it(
    build: Callable, inputs: Callable, run: Callable, families: Any
) -> None:
    model = build("Bert", "", torch.float64)
    batch = inputs(families["Bert"], "right")
    length = batch["input_ids"].shape[1]
    short, long = constants_for(model, length), constants_for(model, length + 5)
    shorter = {name: values[:, : length - 3] for name, values in batch.items()}
    longer = {name: torch.cat([values, values[:, :3]], 1) for name, values in batch.items()}
    longer["attention_mask"] = torch.ones_like(longer["attention_mask"])
    longer["position_ids"] = torch.arange(length + 3).expand(len(longer["input_ids"]), -1)
    with regard.replacing(model, [long, short]):
        found = [run(model, each) for each in (shorter, batch, longer)]
    for each, constants, output in zip((shorter, batch, longer), (short, short, long), found, strict=True):
        with regard.replacing(model, constants):
            assert torch.equal(run(model, each), output)


def test_too_many_tokens_are_refused(build: Callable, inputs: Callable, families: Any) -> None:
    model, batch = build("Bert"), inputs(families["Bert"], "none")
    with (
        regard.replacing(model, constants_for(model, 5)),
        pytest.raises(regard.UserError, match="expected an input of at most 5 tokens, got"),
    ):
        model(**batch)


@pytest.mark.parametrize(
    "heads,message",
    [
        (1.5, "heads: expected a fraction from 0 to 1, got 1.5"),
        ([(0, 9)], "heads: these constants have no head .*; choose heads such as"),
        (0.5, "heads: expected averages as they were taken"),
    ],
    ids=str,
)
def test_heads_that_are_not_there(heads: Any, message: str, build: Callable) -> None:
    model = build("Bert")
    with pytest.raises(regard.UserError, match=message), regard.replacing(model, constants_for(model), heads):
        pass


def test_heads_of_several_sites_are_named_in_full(build: Callable) -> None:
    model = build("T5")
    constants = constants_for(model)
    with (
        pytest.raises(regard.UserError, match=r"names no site; pass \(site, layer, head\)"),
        regard.replacing(model, constants, [(0, 0)]),
    ):
        pass
    with regard.replacing(model, constants, [("cross", 1, 0), ("decoder", 0, 3)]) as held:
        assert held.heads == (("cross", 1, 0), ("decoder", 0, 3))


def test_a_fraction_takes_the_heads_that_depend_least_on_the_input(
    build: Callable, inputs: Callable, families: Any
) -> None:
    model = build("Bert")
    constants = regard.average_attention(model, [inputs(families["Bert"], "right")], 24)
    dependence = constants.input_dependence()
    with regard.replacing(model, constants, 0.5) as held:
        chosen = set(held.heads)
    values = {head: float(dependence[head[:2]][head[2]]) for head in constants.heads}
    assert len(chosen) == len(values) // 2
    assert max(values[head] for head in chosen) <= min(values[head] for head in values.keys() - chosen)


def test_replacing_does_not_nest(build: Callable) -> None:
    model = build("Bert")
    constants = constants_for(model)
    with (
        regard.replacing(model, constants),
        pytest.raises(regard.UserError, match="already replaced"),
        regard.replacing(model, constants),
    ):
        pass


def test_a_model_that_takes_no_tokens_alone_is_refused_in_a_line() -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=small | {"vocab_size": 20}, vision_config=small | {"image_size": 8, "patch_size": 4}
    )
    model = transformers.CLIPModel(config).eval()
    with pytest.raises(regard.UserError, match="replace the heads of the part of it that does"):
        find_attention_layers(model)
    assert {place.site for place in find_attention_layers(model.vision_model)} == {"encoder"}
    assert len(find_attention_layers(model.text_model)) == 1
