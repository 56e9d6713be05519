"""Bases that are quantized or off-loaded: what works equals the whole base; the rest is refused before a change."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.attention.quantized import multiplies_by_its_weight, stored_part
from regard.errors import UserError
from tests.tiny_quantized import KINDS, ByteLinear, OwnLinear, PackedLinear, dequantize, quantize

IDS = torch.tensor([[5, 7, 9, 11, 4], [3, 8, 6, 2, 10]])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, hidden_size=16, intermediate_size=16, pad_token_id=0)).eval()


def quantized(kind: type[nn.Module]) -> Any:
    return quantize(llama(), kind, ("q_proj", "v_proj"))


def dequantized(model: Any) -> Any:
    return dequantize(model, llama())


def with_adapters(model: LlamaForCausalLM) -> regard.SharedAdapters:
    adapters = regard.SharedAdapters(model, r=4).eval()
    generator = torch.Generator().manual_seed(1)
    for name in ("a", "b"):
        adapters.add_adapter(name)
        with torch.no_grad():
            for parameter in adapters.pool.parameters_of(adapters.index_of(name)):
                parameter.normal_(0, 0.3, generator=generator)
        adapters.fit_router(name, [{"input_ids": torch.randint(1, 20, (8, 5), generator=generator)}])
    return adapters


@pytest.mark.every_value
@pytest.mark.parametrize("kind", [*KINDS, OwnLinear])
def test_adapters_and_router_on_a_quantized_base_equal_those_on_its_dequantized_weights(kind: type[nn.Module]) -> None:
    """Layers of a class of their own, as of GPTQ, were said to make no queries and values."""
    model = quantized(kind)
    expected, actual = with_adapters(dequantized(model)), with_adapters(model)
    with torch.no_grad():
        weights = actual.routing_weights(input_ids=IDS)
        torch.testing.assert_close(weights, expected.routing_weights(input_ids=IDS))
        torch.testing.assert_close(actual(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    actual(input_ids=IDS, labels=IDS).loss.backward()
    expected(input_ids=IDS, labels=IDS).loss.backward()
    for parameter, other in zip(actual.pool.parameters_of(1), expected.pool.parameters_of(1), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("kind", [PackedLinear, ByteLinear, OwnLinear])
def test_adapters_go_from_a_base_to_the_same_in_another_precision_if_one_says_so(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    model = quantized(kind)
    there = with_adapters(dequantized(model))
    there.save_pretrained(tmp_path / "saved")
    there.export_peft_set(tmp_path / "set")
    there.export_peft("a", tmp_path / "one")
    advice = r"got the weights \w+; any_model=True takes other weights, such as this base in another precision$"
    for load, name in ((regard.SharedAdapters.from_pretrained, "saved"), (regard.SharedAdapters.from_peft_set, "set")):
        with pytest.raises(UserError, match=advice):
            load(copy.deepcopy(model), tmp_path / name)
        here = load(copy.deepcopy(model), tmp_path / name, any_model=True)
        with torch.no_grad():
            torch.testing.assert_close(here.routing_weights(input_ids=IDS), there.routing_weights(input_ids=IDS))
            torch.testing.assert_close(here(input_ids=IDS).logits, there(input_ids=IDS).logits)
        here.save_pretrained(tmp_path / f"{name}-again")
        again = regard.SharedAdapters.from_pretrained(dequantized(model), tmp_path / f"{name}-again")
        with torch.no_grad():
            torch.testing.assert_close(again(input_ids=IDS).logits, there(input_ids=IDS).logits)
    here = regard.SharedAdapters(copy.deepcopy(model), r=4)
    with pytest.raises(UserError, match=advice):
        here.import_peft(tmp_path / "one", "a")
    assert here.import_peft(tmp_path / "one", "a", any_model=True) == 0


class TernaryLinear(nn.Linear):
    """As BitNet's `AutoBitLinear`: weights of floating point, which every forward rounds."""

    def forward(self, states: Tensor) -> Tensor:
        scale = self.weight.detach().abs().mean()
        rounded = (self.weight / scale).round().clamp(-1, 1) * scale
        return nn.functional.linear(states, self.weight + (rounded - self.weight).detach(), self.bias)


class TransposedLinear(nn.Linear):
    """As Falcon's `FalconLinear`: the product of a linear layer, written otherwise."""

    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight.T + (0 if self.bias is None else self.bias)


class ScaledLinear(nn.Linear):
    """As layers of maximal update parametrization: the product is scaled, by a little here."""

    def forward(self, states: Tensor) -> Tensor:
        return 0.96 * super().forward(states)


class GroupedLinear(nn.Linear):
    """As DeepSeek's: it reads states by group, and no rows."""

    def forward(self, states: Tensor) -> Tensor:
        rows, _groups, _width = states.shape
        return super().forward(states.view(rows, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_layer_multiplies_by_is_told_by_its_outputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for kind, does in (
        (nn.Linear, True),
        (TransposedLinear, True),
        (TernaryLinear, False),
        (ScaledLinear, False),
        (GroupedLinear, False),
    ):
        assert multiplies_by_its_weight(kind(24, 16).to(dtype)) is does


def of_class(model: Any, kind: type[nn.Linear]) -> Any:
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = kind
    return model


def ternary() -> Any:
    return of_class(llama(), TernaryLinear)


@pytest.mark.parametrize("kind", [*KINDS, OwnLinear])
def test_merged_adapters_are_not_loaded_into_weights_that_are_other_numbers(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    """They were added to the bytes that a weight is stored in."""
    adapters = with_adapters(llama())
    adapters.merge("a")
    adapters.save_pretrained(tmp_path / "a")
    for base, got in ((quantized(kind), "got (.*int8|ScaledTensor|OwnLinear) in"), (ternary(), "the TernaryLinear")):
        with pytest.raises(UserError, match=rf"^model: expected .* to merge into.*{got}"):
            regard.SharedAdapters.from_pretrained(base, tmp_path / "a", any_model=True)


@torch.no_grad()
def test_adapters_are_merged_only_into_layers_that_multiply_by_their_weights() -> None:
    adapters = with_adapters(ternary())
    with pytest.raises(UserError, match="multiply by their weights as they are, to merge into; the TernaryLinear"):
        adapters.merge("a")
    assert adapters.adapter_names == ("a", "b")
    adapters = with_adapters(of_class(llama(), TransposedLinear))
    adapters.delete_adapter("b")
    before = adapters(input_ids=IDS).logits
    adapters.merge("a")
    torch.testing.assert_close(adapters(input_ids=IDS).logits, before)


@pytest.mark.parametrize("kind", [*KINDS, OwnLinear])
def test_merging_into_a_quantized_base_is_refused_and_changes_nothing(kind: type[nn.Module]) -> None:
    adapters = with_adapters(quantized(kind))
    before = {name: stored_part(value).clone() for name, value in adapters.model.state_dict().items()}
    with pytest.raises(
        UserError,
        match=r"^model: expected weights of floating point to merge into, got (.*int8|ScaledTensor|OwnLinear) in",
    ):
        adapters.merge("a")
    assert adapters.adapter_names == ("a", "b")
    assert not adapters.merged
    assert adapters.base is None
    after = adapters.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], stored_part(after[name])) for name in before)
