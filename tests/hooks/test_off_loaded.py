"""Models that accelerate off-loads, to memory or disk: what is measured and replaced equals that of the model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.errors import UserError
from regard.hooks.layers import model_fingerprint
from tests.off_loading import a_layer_on_disk, in_memory, on_disk

IDS = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
HEADS = [("decoder", 0, 0), ("decoder", 1, 2)]


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, hidden_size=32, intermediate_size=32)).eval()


@pytest.mark.parametrize("way", [in_memory, on_disk, a_layer_on_disk])
@torch.no_grad()
def test_off_loaded_models_are_measured_and_replaced_as_they_are(way: Callable[..., Any], tmp_path: Path) -> None:
    model = llama()
    off_loaded = way(copy.deepcopy(model), tmp_path)
    assert model_fingerprint(off_loaded) == model_fingerprint(model)
    constants = regard.average_attention(off_loaded, [{"input_ids": IDS}], length=12)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    for layer, attention in enumerate(own(IDS, output_attentions=True).attentions):
        assert_close(constants.matrices["decoder", layer], attention.mean(0), check_dtype=False)
    results = []
    for host in (model, off_loaded):
        with regard.watching(host, ["default", "value_weighted_mass", "head_output_norm"]) as watch:
            host(IDS)
        with regard.replacing(host, constants, HEADS):
            results.append((watch.frame(position=None).value.to_numpy(), host(IDS).logits))
    assert_close(*(torch.tensor(values) for values, _ in results), equal_nan=True)
    assert_close(*(logits for _, logits in results))
    assert_close(off_loaded(IDS).logits, model(IDS).logits)
    with pytest.raises(UserError, match=r"weights are off-loaded; use regard\.replacing"):
        regard.replaced(off_loaded, constants, HEADS)
