"""Bases that accelerate off-loads, in memory or on disk: losses, gradients and files equal those of the whole base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.adapters.base_identity import base_sha256
from regard.adapters.peft_format import WEIGHTS
from regard.adapters.saving import read_safetensors
from regard.errors import UserError
from tests.adapters.model_families import filled, made, rows
from tests.adapters.test_big_models import IDS, llama, with_adapters
from tests.off_loading import CPU, a_layer_on_disk, accelerate, in_memory, on_disk

OffLoad = Callable[[Any, Path], Any]


def with_buffers(model: Any, _: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)


WAYS: tuple[OffLoad, ...] = (in_memory, with_buffers, on_disk, a_layer_on_disk)


def batch() -> dict[str, Tensor]:
    return {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


def off_loaded(way: OffLoad, folder: Path, *, first: str) -> regard.SharedAdapters:
    """Adapters that were there before, or come after off-loading."""
    if first == "adapters":
        adapters = with_adapters(llama())
        way(adapters.model, folder)
        return adapters
    return with_adapters(way(llama(), folder))


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", ["adapters", "off-loading"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_answers_and_losses_equal_those_of_the_base_in_memory(way: OffLoad, first: str, tmp_path: Path) -> None:
    expected, actual = with_adapters(llama()), off_loaded(way, tmp_path, first=first)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(actual(**batch()).logits, expected(**batch()).logits)
        assert torch.equal(actual(**batch()).loss, expected(**batch()).loss)
        assert torch.equal(actual.model(input_ids=IDS).logits, expected.model(input_ids=IDS).logits)
        assert torch.equal(actual.routing_weights(input_ids=IDS), expected.routing_weights(input_ids=IDS))
        with actual.use_only("a"), expected.use_only("a"):
            assert torch.equal(actual(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(actual.generate(IDS, **options), expected.generate(IDS, **options))
    assert any(value.is_meta for value in actual.model.parameters())  # still off-loaded


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", ["adapters", "off-loading"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_training_the_adapters_equals_that_on_the_base_in_memory(way: OffLoad, first: str, tmp_path: Path) -> None:
    expected, actual = with_adapters(llama()), off_loaded(way, tmp_path, first=first)
    results = [adapters.fit_task("c", [batch()], epochs=3, learning_rate=0.1) for adapters in (expected, actual)]
    # layers in memory are one step of autograd with their adapters, those that are fetched are several
    assert results[0].losses == pytest.approx(results[1].losses, rel=1e-6)
    assert results[0].losses[-1] < results[0].losses[0]
    for index in range(3):
        pairs = zip(actual.pool.parameters_of(index), expected.pool.parameters_of(index), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", ["adapters", "off-loading"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_files_are_those_of_the_base_in_memory(way: OffLoad, first: str, tmp_path: Path) -> None:
    """Also if nothing was computed since off-loading."""
    expected, actual = with_adapters(llama()), off_loaded(way, tmp_path, first=first)
    for name, adapters in (("expected", expected), ("actual", actual)):
        adapters.save_pretrained(tmp_path / name)
        adapters.export_peft("a", tmp_path / f"{name}-peft")
    for file in ("adapters.json", "adapters.safetensors"):
        assert (tmp_path / "actual" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()
    exported = [read_safetensors(tmp_path / f"{name}-peft" / WEIGHTS) for name in ("actual", "expected")]
    assert exported[0][1] == exported[1][1]
    assert exported[0][0].keys() == exported[1][0].keys()
    assert all(torch.equal(value, exported[1][0][name]) for name, value in exported[0][0].items())
    expected.freeze()  # as loaded adapters are
    again = regard.SharedAdapters.from_pretrained(way(llama(), tmp_path / "again"), tmp_path / "expected")
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, expected(input_ids=IDS).logits)


def test_the_identity_is_that_of_the_files_also_off_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    llama().save_pretrained(tmp_path / "base")
    adapters = with_adapters(in_memory(type(llama()).from_pretrained(tmp_path / "base"), tmp_path))
    assert adapters.known_identities.of_files(adapters.model).of == "files"
    assert base_sha256(adapters.model) == base_sha256(llama())


@pytest.mark.parametrize("options", [{}, {"adapter_type": "prompt", "num_virtual_tokens": 3}], ids=["lora", "prompt"])
def test_other_routers_and_soft_prompts_that_are_off_loaded_answer_the_same(options: dict[str, Any]) -> None:
    expected, actual, inputs = filled("llama", **options), filled("llama", **options), rows("llama")
    accelerate.cpu_offload(actual.model, execution_device=CPU)
    with torch.no_grad():
        assert torch.equal(actual(**inputs).logits, expected(**inputs).logits)
    actual.set_adapter("task1")
    expected.set_adapter("task1")
    for adapters in (actual, expected):
        adapters(**inputs).logits.sum().backward()
    gradients = [[value.grad for value in adapters.pool.parameters_of(1)] for adapters in (actual, expected)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_encoders_answer_the_same() -> None:
    expected, actual, inputs = filled("bert"), filled("bert"), rows("bert")
    accelerate.cpu_offload(actual.model, execution_device=CPU)
    with torch.no_grad():
        assert torch.equal(actual(**inputs).logits, expected(**inputs).logits)


@pytest.mark.parametrize("first", ["adapters", "off-loading"])
def test_blocks_that_come_and_go_as_a_whole_are_refused(first: str) -> None:
    """They are looked up by the names of their weights, which adapters change, and take adapters with them."""
    model = with_adapters(llama()) if first == "adapters" else llama()
    plain: Any = model.model if isinstance(model, regard.SharedAdapters) else model
    accelerate.cpu_offload(plain, execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"])
    problem = r"^model: expected weights that accelerate off-loads layer by layer, got model.layers.0 as a whole; leave"
    with pytest.raises(UserError, match=problem):
        model(input_ids=IDS) if first == "adapters" else regard.SharedAdapters(plain)


def test_what_is_off_loaded_with_the_adapters_around_it_is_refused() -> None:
    """Accelerate keeps their state, which has no base."""
    adapters = with_adapters(llama())
    accelerate.cpu_offload(adapters, execution_device=CPU)
    with pytest.raises(UserError, match=r"^adapters: expected that accelerate off-loads `adapters\.model`, .* is lost"):
        adapters(input_ids=IDS)


def test_what_has_no_values_is_refused_before_anything_is_computed() -> None:
    adapters, calls = with_adapters(llama()), []
    adapters.model.model.embed_tokens.register_forward_hook(lambda *_: calls.append(1))
    for part in adapters.pool.adapters:
        part.to("meta")
    with pytest.raises(UserError, match=r"^adapters: expected tensors in memory, got ones in meta"):
        adapters(input_ids=IDS)
    assert not calls


def test_merging_into_an_off_loaded_base_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    adapters = off_loaded(in_memory, tmp_path, first="adapters")
    with pytest.raises(UserError, match=r"^model: expected weights in memory to merge into, got off-loaded"):
        adapters.merge("a")
    assert adapters.adapter_names == ("a", "b")
    assert adapters.base is None


def test_soft_prompts_of_embeddings_that_are_off_loaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^adapter_type: expected 'lora' with input embeddings that are off-loaded"):
        regard.SharedAdapters(in_memory(llama(), tmp_path), adapter_type="prompt")


def test_a_model_in_meta_is_no_base_to_save(tmp_path: Path) -> None:
    adapters = regard.SharedAdapters(made("llama").to("meta"))
    assert isinstance(adapters, nn.Module)
    adapters.add_adapter("one")
    with pytest.raises(UserError, match=r"^(adapters|model): expected .* in memory"):
        adapters.save_pretrained(tmp_path / "saved")
