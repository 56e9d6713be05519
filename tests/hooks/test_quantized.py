"""Models with quantized weights: what is measured and replaced is that of the weights that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)

import regard
from regard.attention.quantized import is_quantized, multiplied_weight, read_entries
from regard.errors import UserError
from tests.tiny_quantized import KINDS, OwnLinear, PackedLinear, dequantize, quantize

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
IDS = torch.tensor([[5, 7, 9, 11, 4], [3, 8, 6, 2, 10]])


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, hidden_size=16, intermediate_size=16)).eval()


@pytest.fixture(params=[*KINDS, OwnLinear])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model = quantize(llama(), request.param, NAMES)
    return model, dequantize(model, llama())


def values(model: Any, statistics: Any, **inputs: Tensor) -> list[float]:
    with torch.no_grad(), regard.watching(model, statistics) as watch:
        model(**(inputs or {"input_ids": IDS}))
    found: list[float] = watch.frame()["value"].tolist()
    return found


def test_all_statistics_are_those_of_the_weights_that_are_multiplied_by(pair: tuple[Any, Any]) -> None:
    model, whole = pair
    expected = values(whole, "all")
    assert len(expected) > 100
    assert values(model, "all") == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("heads", [None, [("decoder", 0, 0), ("decoder", 1, 0), ("decoder", 1, 3)]])
def test_constants_of_either_model_replace_heads_of_both(pair: tuple[Any, Any], heads: Any) -> None:
    model, whole = pair
    for source in pair:
        constants = regard.average_attention(source, [{"input_ids": IDS}], length=5)
        outputs = []
        for host in pair:
            with torch.no_grad(), regard.replacing(host, constants, heads):
                outputs.append(host(input_ids=IDS).logits)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    constants = regard.average_attention(llama(), [{"input_ids": IDS}], length=5)
    with pytest.raises(UserError, match="another one: their weights are alike"), regard.replacing(model, constants):
        pass
    with pytest.raises(UserError, match="constants of this LlamaForCausalLM, whose weights are quantized"):
        regard.replaced(model, regard.average_attention(model, [{"input_ids": IDS}], length=5))
    torch.testing.assert_close(model(input_ids=IDS).logits, whole(input_ids=IDS).logits)


def neox() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, hidden_size=16, intermediate_size=16)).eval()


@pytest.mark.parametrize("kind", [*KINDS, OwnLinear])
def test_a_quantized_projection_of_queries_keys_and_values_stays_whole(kind: type[nn.Module]) -> None:
    model = quantize(neox(), kind, ("query_key_value",))
    whole = dequantize(model, neox())
    constants, outputs = regard.average_attention(model, [{"input_ids": IDS}], length=5), []
    for host in (model, whole):
        with torch.no_grad(), regard.replacing(host, constants, [("decoder", 0, 1), ("decoder", 1, 2)]):
            outputs.append(host(input_ids=IDS).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_what_is_no_one_matrix_is_refused() -> None:
    class Squared(PackedLinear):
        def forward(self, states: Tensor) -> Tensor:
            return super().forward(states * states.abs())

    layer = Squared(16, 8)
    with pytest.raises(UserError, match="cannot tell what a Squared multiplies by: its outputs are not linear"):
        multiplied_weight(layer, torch.float32)
    linear = PackedLinear(16, 8, bias=True)
    torch.testing.assert_close(multiplied_weight(linear, torch.float32), linear.whole())


def test_a_large_bias_does_not_round_what_is_read() -> None:
    layer = PackedLinear(16, 8, bias=True)
    layer.bias = nn.Parameter(torch.full((8,), 100.0, dtype=torch.bfloat16))
    expected = layer.whole()  # of few bits, so that it is the same in bfloat16
    torch.testing.assert_close(multiplied_weight(layer, torch.bfloat16).float(), expected, rtol=0, atol=0)
    assert read_entries(layer, [0, 17, 127], torch.bfloat16) == [expected.flatten()[i] for i in (0, 17, 127)]
    assert layer(torch.zeros(1, 16, dtype=torch.bfloat16)).unique().tolist() == [100]


def test_what_weights_are_is_told_of_those_that_are_vectorized() -> None:
    weights = torch.randn(3, 2, 2)
    found = torch.func.vmap(lambda weight: weight * (1 + is_quantized(weight)))(weights)
    torch.testing.assert_close(found, weights)


def bits(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
    return BitsAndBytesConfig(**options)


def torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="the package torchao is not installed")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


def quanto() -> Any:
    pytest.importorskip("optimum.quanto", reason="the package optimum-quanto is not installed")
    return QuantoConfig(weights="int8")


LIBRARIES: dict[str, Callable[[], Any]] = {
    "4 bits": lambda: bits(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "8 bits": lambda: bits(load_in_8bit=True),
    "torchao": torchao,
    "quanto": quanto,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_libraries_themselves(library: str, tmp_path: Path) -> None:
    """What their layers make of unit vectors is written into a whole model, which must measure and compute the same."""
    config, ids = LIBRARIES[library](), torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    source = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, hidden_size=64, intermediate_size=64))
    source.save_pretrained(tmp_path / "source")
    model, whole = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32, **options).eval()
        for options in ({"quantization_config": config}, {})
    )
    with torch.no_grad():
        for path, layer in whole.named_modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(model.get_submodule(path)(torch.eye(layer.in_features)).T)
    near = 3e-2 if library.endswith("bits") else 1e-4  # rounds what it receives as well; 4 bits on a CPU alone
    expected = values(whole, ["default", "head_output_norm", "value_weighted_mass"], input_ids=ids)
    assert values(model, ["default", "head_output_norm", "value_weighted_mass"], input_ids=ids) == pytest.approx(
        expected, rel=near, abs=near, nan_ok=True
    )
    constants = regard.average_attention(whole, [{"input_ids": ids}], length=16)
    outputs = []
    for host in (model, whole):
        with torch.no_grad(), regard.replacing(host, constants, [("decoder", 0, 1), ("decoder", 1, 2)]):
            outputs.append(host(input_ids=ids).logits)
    torch.testing.assert_close(*outputs, rtol=near, atol=near)
    if library != "quanto":  # whose models are not saved by Transformers
        replaced = regard.replaced(model, "softmax+window=4")
        replaced.save_pretrained(tmp_path / "replaced")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "replaced", dtype=torch.float32).eval()
        with torch.no_grad(), regard.replacing(model, "softmax+window=4"):
            torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    adapters = regard.SharedAdapters(model, r=4)
    adapters.add_adapter("a")
    adapters.save_pretrained(tmp_path / "adapters")
    with pytest.raises(UserError, match="expected weights of floating point to merge into"):
        adapters.merge("a")
