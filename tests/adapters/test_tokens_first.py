"""Layers of Longformer and LED read states (token, row, inputs): each token has the weights of its row all the same."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

import regard
from regard.continual.adapter_network import LoraConfig, PoolNetwork, capture_layer_inputs
from regard.models.classifier import Classifier
from tests.adapters.model_families import fill_two
from tests.continual import small_tasks

TOKENS, WINDOW = 10, 4
_HEADS = {"attention_window": WINDOW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 50}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    if family == "longformer":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        config: Any = transformers.LongformerConfig(**_HEADS, **sizes, max_position_embeddings=64)
        return transformers.LongformerModel(config).double().eval()
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2}
    return transformers.LEDForConditionalGeneration(transformers.LEDConfig(**_HEADS, **sizes)).double().eval()


def make_rows(family: str, count: int) -> dict[str, torch.Tensor]:
    """Rows of ten tokens, which the models lengthen to twelve: three windows."""
    random = torch.Generator().manual_seed(1)
    rows = {"input_ids": torch.randint(3, 50, (count, TOKENS), generator=random)}
    if family == "led":
        rows["decoder_input_ids"] = torch.randint(3, 50, (count, 3), generator=random)
    return rows


def output(model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**rows)[0]
    return found


@pytest.mark.parametrize("family", ["longformer", "led"])
@pytest.mark.parametrize("count", [4, 5])
def test_rows_together_have_each_its_own_weights(family: str, count: int) -> None:
    """The expected output is of a plain model with Σ w (α/r) B A added to its matrices, a row at a time."""
    plain = make_model(family)
    adapters = regard.SharedAdapters(copy.deepcopy(plain), r=2)
    random = fill_two(adapters)
    adapters.freeze()
    adapters.double()
    rows, weights = make_rows(family, count), torch.rand(count, 2, generator=random, dtype=torch.float64)
    with adapters.use_weights(weights):
        found = output(adapters, rows)
    for row in range(count):
        merged = copy.deepcopy(plain)
        for name, layer in adapters.layers("look").items():
            for number, weight in enumerate(weights[row].tolist()):
                delta = weight * 32 / 2 * layer.adapters.B[number].detach() @ layer.adapters.A[number].detach()
                merged.get_submodule(name).weight.data += delta
        expected = output(merged, {name: values[row : row + 1] for name, values in rows.items()})
        assert_close(found[row : row + 1], expected)


def test_what_layers_read_is_seen_without_padding() -> None:
    model = make_model("longformer")
    classifier = Classifier.from_loaded(replace(small_tasks.loaded(), model=copy.deepcopy(model)), ["a", "b"])
    network = PoolNetwork(classifier, tasks=1, config=LoraConfig(r=2), seed=0).eval()
    rows = make_rows("longformer", 3)
    mask = torch.tensor([[1] * 10, [1] * 7 + [0] * 3, [1] * 4 + [0] * 6])
    rows |= {"attention_mask": mask, "labels": torch.zeros(3, dtype=torch.long)}
    seen = list[torch.Tensor]()
    with torch.no_grad(), capture_layer_inputs(network, rows, lambda _, states: seen.append(states)):
        network(rows)
    with torch.no_grad():
        states = model(rows["input_ids"], attention_mask=mask, output_hidden_states=True).hidden_states
    real = mask.bool()
    assert len(seen) == 4
    assert_close(seen[0], states[0][:, :TOKENS][real])
    assert_close(seen[2], states[1][:, :TOKENS][real])


def test_rows_of_xlnet_have_each_its_own_weights() -> None:
    """The weights of each row alone; the tokens are a multiple of the rows."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=30, d_model=16, n_layer=2, n_head=2, d_inner=24)
    model = transformers.XLNetModel(config).eval()
    adapters = regard.SharedAdapters(model, r=2, query="embeddings", target_modules=["layer_1", "layer_2"])
    for name in ("one", "two"):
        adapters.add_adapter(name)
    for layer in adapters.pool.adapters:
        for up in layer.B:
            torch.nn.init.normal_(up)
    adapters.freeze()
    adapters.double()
    ids, weights = torch.randint(3, 30, (4, 8)), torch.rand(4, 2, dtype=torch.float64)
    with adapters.use_weights(weights):
        found = output(adapters, {"input_ids": ids})
    for row in range(4):
        with adapters.use_weights(weights[row]):
            assert_close(found[row : row + 1], output(adapters, {"input_ids": ids[row : row + 1]}))
