"""Blocks in which a model is observed: how they overlap, and one thread at a time."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import regard
from regard.constants import Constants, Origin
from regard.errors import UserError
from regard.hooks import patches, routing
from regard.hooks.attention_function import OBSERVERS
from regard.hooks.patches import patched

Block = Callable[[], AbstractContextManager[Any]]
IDS = torch.arange(4, 16).view(2, 6)


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, **sizes)).eval()


def deberta() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(vocab_size=20, relative_attention=True, pos_att_type=["c2p"], **sizes)
    return transformers.DebertaV2Model(config).eval()


MODELS = {"llama": llama, "deberta": deberta}


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state
    return hidden


def state(model: nn.Module) -> list[Any]:
    """All that a block may change in a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    return [
        (sorted(vars(module)), [list(getattr(module, name)) for name in hooks], vars(module).get("forward"))
        for module in model.modules()
    ] + [model.config._attn_implementation]


def is_untouched(model: nn.Module, before: list[Any]) -> bool:
    return state(model) == before and not OBSERVERS and not patches._PATCHES


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_overlapping_blocks_end_in_any_order(name: str, order: tuple[int, ...]) -> None:
    """The last block to end restores the model, and each sees its forwards until its own end."""
    model = MODELS[name]()
    before, expected = state(model), output(model)
    blocks = [ExitStack() for _ in order]
    watches = [block.enter_context(regard.watching(model, "column_mass")) for block in blocks]
    for number, index in enumerate(order):
        assert torch.allclose(output(model), expected, atol=1e-6)
        blocks[index].close()
        assert is_untouched(model, before) == (number == len(order) - 1)
    assert [watches[index].samples for index in order] == [2, 4, 6]
    assert torch.equal(output(model), expected)


@pytest.mark.parametrize("watch_ends_first", [False, True])
def test_a_watch_and_replaced_heads_end_in_any_order(watch_ends_first: bool) -> None:
    model = llama()
    before, expected = state(model), output(model)
    matrices = {("decoder", layer): torch.eye(8).expand(2, -1, -1) for layer in range(2)}
    replaced, watched = ExitStack(), ExitStack()
    replaced.enter_context(regard.replacing(model, Constants(matrices=matrices, origin=Origin(source="identity"))))
    watched.enter_context(regard.watching(model, "column_mass"))
    for block in (watched, replaced) if watch_ends_first else (replaced, watched):
        block.close()
    assert is_untouched(model, before)
    assert torch.equal(output(model), expected)


def test_blocks_end_in_any_order_after_an_exception() -> None:
    model = llama()
    before = state(model)
    outer = ExitStack()
    outer.enter_context(regard.watching(model, "entropy"))
    inner = ExitStack()
    inner.enter_context(regard.watching(model, "entropy"))
    outer.close()
    inner.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert is_untouched(model, before)


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returns or raises in another thread."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_second_thread_is_refused_in_a_line(name: str) -> None:
    model = MODELS[name]()
    before = state(model)

    def watch() -> int:
        with regard.watching(model, "column_mass") as watch:
            output(model)
        return watch.samples

    with regard.watching(model, "column_mass") as first:
        output(model)
        error = in_thread(watch)
        assert isinstance(error, UserError)
        assert "another thread is inside a watching or replacing block on this" in str(error)
        assert "\n" not in str(error)
        output(model)
    assert first.samples == 4
    assert is_untouched(model, before)
    assert in_thread(watch) == 2
    assert is_untouched(model, before)


def test_a_part_of_an_observed_model_is_refused_to_a_second_thread() -> None:
    model = transformers.T5Model(
        transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).eval()

    def watch_encoder() -> None:
        with regard.watching(model.encoder, "entropy"):
            pass

    with regard.watching(model, "entropy"):
        assert isinstance(in_thread(watch_encoder), UserError)
    assert in_thread(watch_encoder) is None


def test_threads_may_watch_models_of_their_own() -> None:
    model, other = llama(), llama()

    def watch_other() -> int:
        with regard.watching(other, "entropy") as watch:
            output(other)
        return watch.samples

    with regard.watching(model, "entropy") as first:
        assert in_thread(watch_other) == 2
    assert first.samples == 0
    assert not routing._OWNERS


def test_a_thread_that_ended_inside_a_block_keeps_nobody_out() -> None:
    """Also not a thread that gets its identifier; the block it left open may still be closed."""
    model = llama()
    before = state(model)
    left_open = ExitStack()
    in_thread(lambda: left_open.enter_context(regard.watching(model, "column_mass")))

    def watch() -> int:
        with regard.watching(model, "column_mass") as watch:
            output(model)
        return watch.samples

    assert watch() == 2
    assert in_thread(watch) == 2
    with regard.watching(model, "column_mass"):
        assert isinstance(in_thread(watch), UserError)
    left_open.close()
    assert is_untouched(model, before)
    assert not routing._OWNERS


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}  # noqa: S301


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_an_observed_model_is_a_model_of_its_own(name: str, how: str) -> None:
    """It works inside and after the block, and the watch of the original goes on."""
    model = MODELS[name]()
    expected = output(model)
    with regard.watching(model, "column_mass") as watch:
        output(model)
        copied = COPIES[how](model)
        assert torch.allclose(output(copied), expected, atol=1e-6)
        with regard.watching(copied, "column_mass") as other:
            output(copied)
        output(model)
    assert (watch.samples, other.samples) == (4, 2)
    assert torch.allclose(output(copied), expected, atol=1e-6)
    assert torch.equal(output(model), expected)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("operation", ["sigmoid", "sigmoid+window=2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_keeps_the_operation_of_the_block(name: str, operation: str, how: str) -> None:
    model = MODELS[name]()
    before, softmax = state(model), output(model)
    with regard.replacing(model, operation):
        replaced = output(model)
        copied = COPIES[how](model)
        assert torch.equal(output(copied), replaced)
    assert is_untouched(model, before)
    assert torch.equal(output(model), softmax)
    assert torch.equal(output(copied), replaced)
    assert not torch.allclose(replaced, softmax, atol=1e-4)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_observed_model_generates(how: str) -> None:
    """Also by beam search, which is refused where the copy is observed itself."""
    model: Any = transformers.LlamaForCausalLM(llama().config).eval()
    options = {"num_beams": 2, "max_new_tokens": 2, "do_sample": False}
    with regard.watching(model, "entropy"):
        copied = COPIES[how](model)
    assert torch.equal(copied.generate(IDS, **options), model.generate(IDS, **options))
    with regard.watching(copied, "entropy") as watch:
        copied.generate(IDS, max_new_tokens=2, do_sample=False)
        with pytest.raises(UserError, match="beam search"):
            copied.generate(IDS, **options)
    assert watch.samples == 2


class Target:
    value = "class"


def test_attributes_are_restored_by_the_last_block() -> None:
    """One that the object did not have itself is deleted; the first block decides the value."""
    target = Target()
    first, second = ExitStack(), ExitStack()
    first.enter_context(patched([(target, "value", "first")]))
    second.enter_context(patched([(target, "value", "second")]))
    first.close()
    assert target.value == "first"
    second.close()
    assert vars(target) == {}
    assert target.value == "class"


def test_a_change_inside_the_block_stays() -> None:
    target, model = Target(), llama()
    with patched([(target, "value", "block")]):
        target.value = "user"
    assert target.value == "user"
    with patched([(target, "value", "block")]):
        del target.value
    assert target.value == "class"
    with regard.watching(model, "entropy"):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("what", ["constants", "operation", "heads", "watch"])
def test_attention_that_is_set_inside_the_block_is_told_in_the_next_forward(what: str) -> None:
    """Replaced heads were left out without a word, and read queries that had been taken out of the projections."""
    model, ids = llama(), torch.arange(6)[None]
    constants = regard.average_attention(model, [{"input_ids": ids}], length=6)
    block: Any = {
        "constants": lambda: regard.replacing(model, constants, [("decoder", 0, 0)]),
        "operation": lambda: regard.replacing(model, "softmax+window=2"),
        "heads": lambda: regard.replacing(model, "softmax+window=2", heads=[(0, 0)]),
        "watch": lambda: regard.watching(model, "entropy"),
    }[what]
    with torch.no_grad():
        expected = model(ids)[0]
        with block():
            model(ids)
            other = copy.deepcopy(model)
            model.set_attn_implementation("eager")
            with pytest.raises(UserError, match="its attention was set to eager inside the block; set it before the"):
                model(ids)
        torch.testing.assert_close(model(ids)[0], expected)
        other.set_attn_implementation("eager")
        other(ids)  # a copy is a model of its own


def bert() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).eval()


@pytest.mark.parametrize("build", [llama, bert])
def test_a_precision_set_inside_the_block_is_that_of_all_weights(build: Callable[[], PreTrainedModel]) -> None:
    """Projections that were out of the model follow, as do frozen weights; they stay the same parameters."""
    model = build()
    site = "decoder" if build is llama else "encoder"
    parameters = dict(model.named_parameters())
    matrices = {(site, layer): torch.eye(8).expand(2, -1, -1) for layer in range(2)}
    with regard.replacing(model, Constants(matrices=matrices, origin=Origin(source="identity")), [(0, 0), (1, 1)]):
        model.double().requires_grad_(False)
        output(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(output(model), output(build().double()))
