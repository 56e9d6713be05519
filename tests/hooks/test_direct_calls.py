"""Callers that take `model.forward(…)`, past the hooks of a model, as sentence-transformers does."""

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.testing import assert_close
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import regard
from regard.adapters.shared import SharedAdapters

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
LENGTH = 12


@pytest.fixture(params=[BertModel, LlamaModel])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = BertConfig if request.param is BertModel else LlamaConfig
    return request.param(config(**SIZES, initializer_range=0.5, pad_token_id=0)).eval()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two rows, the second padded on the left, so that constants stand elsewhere in it."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :5] = 0
    ids = torch.randint(1, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask}


def states(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return outputs.last_hidden_state.detach()[batch["attention_mask"].bool()]


def test_they_are_watched(model: Any, batch: dict[str, Tensor]) -> None:
    tables = []
    for call in (model, lambda **inputs: model.forward(**inputs)):
        with torch.no_grad(), regard.watching(model, ["entropy", "column_mass"]) as watch:
            for _ in range(2):
                call(**batch)
        assert watch.samples == 4
        tables.append(watch.frame())
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("changes", ["constants", "window"])
def test_replaced_heads_read_their_masks(changes: str, model: Any, batch: dict[str, Tensor]) -> None:
    given: Any = "softmax+window=4" if changes == "window" else regard.average_attention(model, [batch], LENGTH)
    fixed = regard.replaced(model, given)
    with torch.no_grad():
        expected = states(fixed(**batch), batch)
        fixed(batch["input_ids"])  # of which nothing stays
        for one in (fixed, copy.deepcopy(fixed), pickle.loads(pickle.dumps(fixed))):  # noqa: S301
            assert_close(states(one.forward(**batch), batch), expected)
        with regard.replacing(model, given):
            assert_close(states(model.forward(**batch), batch), expected)
    assert inspect.signature(fixed.forward) == inspect.signature(model.forward)


def test_adapters_are_mixed(model: Any, batch: dict[str, Tensor]) -> None:
    adapters = SharedAdapters(model, r=4)
    adapters.add_adapter("one")
    with torch.no_grad():
        for name, value in adapters.named_parameters():
            if value.requires_grad and ".B." in name:
                value.normal_()
    expected = states(adapters(**batch), batch)
    with adapters.use_weights(None):
        plain = states(model.forward(**batch), batch)
    assert not torch.allclose(plain, expected, atol=0.1)
    again = pickle.loads(pickle.dumps(adapters))  # noqa: S301
    alone = pickle.loads(pickle.dumps(model))  # noqa: S301  as sentence-transformers hands a model to processes
    for one in (model, copy.deepcopy(adapters).model, again.model, alone):
        assert_close(states(one.forward(**batch), batch), expected)
    assert inspect.signature(again.forward) == inspect.signature(adapters.forward)
    assert "forward" not in vars(again.unload())
    assert "forward" not in vars(adapters.unload())
    assert_close(states(model.forward(**batch), batch), plain)


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("kind", ["adapters", "replaced"])
def test_what_accelerate_unwraps_keeps_its_forward(kind: str, model: Any, batch: dict[str, Tensor]) -> None:
    """It looks for the forward of before mixed precision among those that a function names as wrapped."""
    if kind == "replaced":
        unwrapped = regard.replaced(model, regard.average_attention(model, [batch], LENGTH))
    else:
        adapters, unwrapped = SharedAdapters(model, r=4), model
        adapters.add_adapter("one")
        for name, value in adapters.named_parameters():
            if ".B." in name:
                torch.nn.init.normal_(value)
    expected = states(unwrapped(**batch), batch)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(unwrapped)
    rounded = states(prepared(**batch), batch)
    prepared(batch["input_ids"])
    assert_close(states(prepared.forward(**batch), batch), rounded)
    assert not torch.is_autocast_enabled("cpu")  # the one that it enters was entered twice, and left on
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    unwrapped(batch["input_ids"])  # of which nothing stays
    assert_close(states(unwrapped.forward(**batch), batch), expected)
    assert_close(states(unwrapped(**batch), batch), expected)
    if kind == "adapters":
        assert "forward" not in vars(adapters.unload())


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_block_leaves_nothing(model: Any, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with regard.watching(model, "entropy") as watch:
        copied = copy.deepcopy(model)
        copied.forward(**batch)
        assert inspect.signature(model.forward) == inspect.signature(type(model)(model.config).forward)
        with pytest.raises(IndexError):
            model.forward(torch.tensor([[SIZES["vocab_size"]]]))
        with monkeypatch.context() as broken_off:
            broken_off.setattr(type(model), "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(**batch)
        model.forward(**batch)
    assert watch.samples == 2
    assert "forward" not in vars(model)
    assert_close(copied.forward(**batch).last_hidden_state, model.forward(**batch).last_hidden_state)


def test_a_forward_that_a_library_puts_into_the_class_is_called(
    model: Any, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    plain = type(model).forward

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        called.append(self)
        return plain(self, *args, **inputs)

    for patched in (False, True):
        if patched:
            monkeypatch.setattr(type(model), "forward", forward)
        with torch.no_grad(), regard.watching(model, ["entropy"]) as watch:
            model(**batch)
            model.forward(**batch)
        assert (watch.samples, len(called)) == (4, 2 * patched)


def test_a_forward_that_a_trainer_wraps_inside_a_block_goes_on_behind_it(model: Any, batch: dict[str, Tensor]) -> None:
    """As Accelerate does for mixed precision: each of the two called the other without end."""
    expected, calls = states(model(**batch), batch), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with regard.watching(model, "entropy") as watch:
        model.forward = MethodType(torch.no_grad()(model.forward.__func__), model)
        assert_close(states(model(**batch), batch), expected)
    assert watch.samples == 2
    calls.clear()
    assert_close(states(model(**batch), batch), expected)
    assert len(calls) == 1


def test_a_copy_that_shares_attributes_computes_with_its_own_weights(model: Any, batch: dict[str, Tensor]) -> None:
    """DataParallel makes such copies for other devices: they were computed by the model that was copied."""
    with regard.replacing(model, "softmax+window=4"):
        replica, called = model._replicate_for_data_parallel(), []
        replica._modules = dict(model._modules)
        model.register_forward_pre_hook(lambda module, _args: called.append(module))
        replica(**batch)
        assert called == [replica]


def test_they_have_what_exports_and_libraries_read_of_a_method(batch: dict[str, Tensor]) -> None:
    adapters = SharedAdapters(BertModel(BertConfig(**SIZES)).eval(), r=4)
    adapters.add_adapter("task")
    model, given = adapters.model, {"input_ids": batch["input_ids"]}
    forward, method = vars(model)["forward"], MethodType(BertModel.forward, model)
    assert (forward.__name__, forward.__qualname__) == (method.__name__, method.__qualname__)
    with adapters.use_only("task"), torch.no_grad():
        program = torch.export.export(model, (), given, strict=False).module()
        assert_close(program(**given).last_hidden_state, model(**given).last_hidden_state)
    with pytest.raises(AttributeError, match="nothing"):
        forward.nothing  # noqa: B018
    assert not hasattr(object.__new__(type(forward)), "__name__")
