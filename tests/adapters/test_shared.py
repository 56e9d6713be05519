"""One model, many blocks: what is trained, how they come and go, copies, precisions, refusals."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import regard
from regard.adapters.lora import MixedLayer
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import (
    FAMILIES,
    LEARNT,
    blocks_of,
    fill,
    filled,
    logits,
    loss_of,
    made,
    plain_vectors,
    rows,
)

# -- training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_new_block_its_key_and_the_projection_train_and_nothing_else(family: str) -> None:
    adapters = filled(family)
    before = {name: value.clone() for name, value in adapters.state_dict().items()}
    trained = {name for name, value in adapters.named_parameters() if value.requires_grad}
    blocks = {f"model.{name}.adapters.{part}.2" for name in adapters.layers("look") for part in "AB"}
    maps = {f"router.{name}" for name in ("down", "up", "norm.weight", "norm.bias", "keys.2")}
    assert trained == blocks | maps
    optimizer = torch.optim.SGD([value for value in adapters.parameters() if value.requires_grad], lr=1.0)
    loss_of(adapters.train(), family).backward()
    assert {name for name, value in adapters.named_parameters() if value.grad is not None} == trained
    optimizer.step()
    changed = {name for name, value in adapters.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trained


def test_with_one_block_all_that_trains_takes_part() -> None:
    adapters = SharedAdapters(made("t5"), **LEARNT, r=2)
    adapters.add_adapter("one")
    loss_of(adapters.train(), "t5").backward()
    assert all(value.grad is not None for value in adapters.parameters() if value.requires_grad)


def test_training_lowers_the_loss_and_close_freezes_all() -> None:
    adapters = SharedAdapters(made("llama"), **LEARNT, r=4)
    for name in ("one", "two"):
        adapters.add_adapter(name)
        optimizer = torch.optim.Adam([value for value in adapters.parameters() if value.requires_grad], lr=0.02)
        first = loss_of(adapters, "llama").item()
        for _ in range(15):
            optimizer.zero_grad()
            loss_of(adapters, "llama").backward()
            optimizer.step()
        assert loss_of(adapters, "llama").item() < first - 0.01
    adapters.freeze()
    assert not any(value.requires_grad for value in adapters.parameters())
    assert adapters.active_adapter is None
    adapters.set_adapter("one")
    assert blocks_of(adapters)[0].trained == (0,)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bert", "t5", "bart", "llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(family: str) -> None:
    adapters = filled(family).train()

    def gradients() -> dict[str, Tensor]:
        adapters.zero_grad()
        (loss_of(adapters, family) + 2 * loss_of(adapters, family, seed=5)).backward()
        return {name: value.grad.clone() for name, value in adapters.named_parameters() if value.grad is not None}

    expected = gradients()
    adapters.model.config.use_cache = False
    model = adapters.model
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    found = gradients()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm()
    assert expected["router.keys.2"].any()


def test_checkpointing_that_cuts_the_graph_is_refused() -> None:
    adapters = filled("bert").train()
    model = adapters.model
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": True})
    with pytest.raises(UserError, match=r"use_reentrant=False"):
        adapters(**rows("bert"))


class Again(nn.Module):
    """A layer that is computed again by someone who knows nothing of weights, as FSDP's wrapper does it."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(self.layer, **kwargs), *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_that_someone_else_computes_again_is_refused(reentrant: bool) -> None:
    """It would be computed without its adapters, which would get no gradients."""
    adapters = filled("bert").train()
    layers: Any = adapters.model.get_submodule("bert.encoder.layer")
    for number, layer in enumerate(layers):
        layers[number] = Again(layer, reentrant=reentrant)
    adapters.model.enable_input_require_grads()
    with pytest.raises(UserError, match="a layer that is computed again without weights"):
        loss_of(adapters, "bert").backward()


def test_a_whole_model_may_be_computed_again() -> None:
    adapters = filled("bert").train()

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        adapters.zero_grad()
        run().backward()
        return [value.grad.clone() for value in adapters.parameters() if value.grad is not None]

    expected = gradients(lambda: loss_of(adapters, "bert") + 2 * loss_of(adapters, "bert", seed=5))
    found = gradients(
        lambda: (
            checkpoint(loss_of, adapters, "bert", use_reentrant=False)
            + 2 * checkpoint(partial(loss_of, seed=5), adapters, "bert", use_reentrant=False)
        )
    )
    torch.testing.assert_close(found, expected)


# -- growing and shrinking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("gone", ["task0", "task1", "task2"])
def test_a_block_that_is_removed_was_never_in_the_softmax(family: str, gone: str) -> None:
    adapters, batch = filled(family), rows(family)
    kept = [number for number, name in enumerate(adapters.adapter_names) if name != gone]
    scores = adapters.router.scores(adapters.query_vectors(**batch))[:, kept]
    weights = torch.zeros(3, 3)
    weights[:, kept] = scores.softmax(1).detach()
    with adapters.use_weights(weights):
        expected = logits(adapters, batch)
    adapters.delete_adapter(gone)
    assert adapters.adapter_names == tuple(f"task{number}" for number in kept)
    assert adapters.active_adapter == (None if gone == "task2" else "task2")
    assert_close(adapters.routing_weights(**batch), scores.softmax(1))
    assert_close(logits(adapters, batch), expected, atol=1e-5, rtol=1e-4)


def test_what_comes_after_a_removal_is_drawn_anew_and_trains() -> None:
    adapters = filled("bert")
    keys = [key.detach().clone() for key in adapters.router.keys]
    blocks = [down.detach().clone() for down in blocks_of(adapters)[0].A]
    adapters.delete_adapter("task0")
    assert adapters.add_adapter("task3") == 2
    assert adapters.provenance["task3"]["order"] == 3
    assert not any(torch.allclose(adapters.router.keys[2], key) for key in keys)
    assert not any(torch.allclose(blocks_of(adapters)[0].A[2], down) for down in blocks)
    loss_of(adapters, "bert").backward()
    assert blocks_of(adapters)[0].B[2].grad is not None


def test_all_blocks_may_go_and_come_again() -> None:
    adapters, batch = filled("bert", blocks=1), rows("bert")
    adapters.delete_adapter("task0")
    assert adapters.adapter_names == ()
    assert_close(logits(adapters, batch), logits(made("bert"), batch))
    assert adapters.add_adapter("task0") == 0
    loss_of(adapters, "bert").backward()


def test_unload_gives_the_model_back() -> None:
    adapters, batch = filled("llama"), rows("llama")
    model = adapters.unload()
    assert model is adapters.model
    assert not any(isinstance(module, MixedLayer) for module in model.modules())
    assert_close(logits(model, batch), logits(made("llama"), batch))


# -- copies, devices, precisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_a_copy_is_another(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    expected = logits(adapters, batch)
    twin = copy.deepcopy(adapters)
    assert_close(logits(twin, batch), expected)
    assert_close(logits(twin.model, batch), expected)
    twin.delete_adapter("task0")
    with torch.no_grad():
        twin.router.down.zero_()
    assert_close(logits(adapters, batch), expected)
    with adapters.use_only("task1"):
        assert not torch.allclose(logits(twin, batch), logits(adapters, batch), atol=1e-3)
    assert_close(twin.routing_weights(**batch), torch.full((3, 2), 0.5))


@pytest.mark.parametrize("family", ["bert", "t5", "llama", "gpt2"])
def test_a_base_in_bfloat16_has_weights_in_full_precision(family: str) -> None:
    adapters = SharedAdapters(made(family).bfloat16(), **LEARNT, r=4)
    for name in ("one", "two"):
        adapters.add_adapter(name)
    fill(adapters)
    batch = rows(family)
    loss_of(adapters, family).backward()
    assert adapters.routing_weights(**batch).dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in adapters.pool.parameters_of(0))
    found = logits(adapters, batch)
    assert found.dtype == torch.bfloat16
    full = SharedAdapters(made(family), **LEARNT, r=4)
    for name in ("one", "two"):
        full.add_adapter(name)
    plain = logits(full, batch)
    fill(full)
    expected = logits(full, batch)
    assert (found.float() - expected).norm() < 0.03 * expected.norm()
    assert (plain - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_under_autocast_the_weights_are_the_same(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    expected = adapters.routing_weights(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(adapters.routing_weights(**batch), expected)
        loss = loss_of(adapters, family)
    loss.backward()
    assert_close(loss.float(), loss_of(adapters, family), atol=0.05, rtol=0.05)


def test_it_moves_to_another_precision_as_a_whole() -> None:
    adapters, batch = filled("bert"), rows("bert")
    expected = logits(adapters, batch)
    assert_close(logits(adapters.to(torch.float64), batch).float(), expected, atol=1e-5, rtol=1e-4)


def test_options_reach_what_they_are_of() -> None:
    adapters = filled(
        "bert",
        projection_order="paper",
        router_hidden_size=5,
        temperature=2.0,
        top_k=1,
        detach_old=True,
        dropout=0.1,
        seed=3,
    )
    assert (adapters.router.projection_order, adapters.router.temperature) == ("paper", 2.0)
    assert adapters.router.down.shape == (5, 16)
    assert adapters.pool.mixture.top_k == 1
    assert blocks_of(adapters)[0].detach_old
    assert blocks_of(adapters)[0].dropout.p == 0.1
    only = filled("bert", target_modules=["layer.1.attention.self.key"])
    assert list(only.layers("look")) == ["bert.encoder.layer.1.attention.self.key"]


def test_the_name_is_exported() -> None:
    assert regard.SharedAdapters is SharedAdapters


# -- prompts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_soft_prompts_are_mixed_as_blocks_are(family: str) -> None:
    adapters = SharedAdapters(
        made(family), **LEARNT, adapter_type="prompt", num_virtual_tokens=3, encoder_hidden_size=8
    )
    batch = rows(family)
    expected = logits(made(family), batch)
    assert_close(logits(adapters, batch), expected)
    adapters.add_adapter("one")
    adapters.add_adapter("two")
    weights = adapters.routing_weights(**batch).detach()
    assert_close(weights, adapters.router(plain_vectors(made(family), batch, batch["attention_mask"])))
    found = logits(adapters, batch)
    with adapters.use_weights(weights):
        assert_close(logits(adapters, batch), found)
    assert not torch.allclose(found, expected, atol=1e-4)
    loss_of(adapters.train(), family).backward()
    trained = [value for value in adapters.parameters() if value.requires_grad]
    assert trained
    assert all(value.grad is not None for value in trained)
    adapters.eval().delete_adapter("one")
    assert_close(adapters.routing_weights(**batch), torch.ones(3, 1))


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_soft_prompts_are_read_once_when_words_are_generated(family: str) -> None:
    adapters = SharedAdapters(
        made(family), **LEARNT, adapter_type="prompt", num_virtual_tokens=3, encoder_hidden_size=8
    )
    adapters.add_adapter("one")
    adapters.add_adapter("two")
    batch = rows(family)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    found = adapters.generate(**given, **options)
    assert torch.equal(adapters.model.generate(**given, **options), found)
    assert torch.equal(adapters.generate(**given, **options, use_cache=False), found)


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"target_modules": "nothing"},
            "target_modules: expected names of linear layers, got 'nothing'; the model has query, key, value",
        ),
        ({"adapter_type": "prefix"}, "adapter_type: expected one of lora, prompt, got 'prefix'"),
        ({"r": 0}, "r: expected a whole number of at least 1, got 0"),
        ({"lora_alpha": 0}, "lora_alpha: expected a number above 0, got 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number above 0, got nan"),
        ({"router_hidden_size": 0}, "router_hidden_size: expected a whole number of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected a number above 0, got -1.0"),
        ({"dropout": 1.0}, "dropout: expected a number from 0 to below 1, got 1.0"),
        ({"projection_order": "other"}, "projection_order: expected one of published, paper, got 'other'"),
        ({"adapter_type": "prompt", "top_k": 2}, "top_k: expected None with adapter_type='prompt', got 2"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        SharedAdapters(made("bert"), **{**LEARNT, **options})
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model: expected a PreTrainedModel of Transformers, got Linear"):
        SharedAdapters(nn.Linear(2, 2))  # type: ignore[arg-type]
    adapters = filled("bert")
    with pytest.raises(UserError, match=r"model: expected one without adapters"):
        SharedAdapters(adapters.model)


def test_wrong_names_are_refused() -> None:
    adapters = filled("bert", blocks=2)
    with pytest.raises(UserError, match=r"name: expected a new one, got 'task0'; the adapters are task0, task1"):
        adapters.add_adapter("task0")
    with pytest.raises(UserError, match=r"name: expected a text, got ''"):
        adapters.add_adapter("")
    for use in (adapters.delete_adapter, adapters.set_adapter, adapters.use_only, adapters.index_of):
        with pytest.raises(UserError, match=r"name: expected one of task0, task1, got 'other'"):
            use("other")
    with pytest.raises(UserError, match=r"lineage: expected names with values that JSON holds"):
        adapters.add_adapter("new", lineage={"data": object()})
    assert adapters.adapter_names == ("task0", "task1")


def test_wrong_inputs_are_refused() -> None:
    adapters, batch = filled("llama"), rows("llama")
    with pytest.raises(UserError, match=r"weights: expected a shape \(row, 3\) or \(3,\), got \(2,\)"):
        adapters.use_weights(torch.ones(2))
    with pytest.raises(UserError, match=r"prompt_mask: expected at least one token of the prompt in each row"):
        adapters(**batch, prompt_mask=torch.zeros(3, 7))
    with pytest.raises(UserError, match=r"attention_mask: expected at least one token"):
        adapters.routing_weights(input_ids=batch["input_ids"], attention_mask=torch.zeros(3, 7))
    with pytest.raises(UserError, match=r"prompt_mask: expected a mask \(row, token\) of \(3, 7\), got \(3, 2\)"):
        adapters(**batch, prompt_mask=torch.ones(3, 2))
    with pytest.raises(UserError, match=r"input_ids: expected the tokens"):
        adapters.routing_weights()
    with pytest.raises(UserError, match=r"adapters: expected at least one"):
        SharedAdapters(made("llama")).routing_weights(**batch)
    assert_close(logits(adapters, batch), logits(filled("llama"), batch))
