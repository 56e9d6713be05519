"""Mixtures of experts: the precision and implementation that Transformers computes them in."""

from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import regard
from regard.models.pretrained import load

from .conftest import tokenizer


def make_mixtral() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.3,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


IDS = torch.randint(1, 99, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_float64_takes_experts_one_by_one(tmp_path: Path) -> None:
    """PyTorch has no grouped products in float64."""
    model = make_mixtral()
    model.save_pretrained(tmp_path)
    tokenizer(30).save_pretrained(tmp_path)
    loaded = load(str(tmp_path), dtype="float64").model
    expected = model.base_model(IDS).last_hidden_state
    torch.testing.assert_close(loaded(IDS).last_hidden_state.float(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_replaced_model_computes_its_experts_as_the_original() -> None:
    model = make_mixtral().double()
    model.set_experts_implementation("eager")
    constants = regard.average_attention(model, [{"input_ids": IDS}], length=12)
    heads = [*constants.heads][:3]
    replaced = regard.replaced(model, constants, heads)
    assert replaced.get_experts_implementation() == model.get_experts_implementation()
    with regard.replacing(model, constants, heads):
        expected = model(IDS).logits
    torch.testing.assert_close(replaced(IDS).logits, expected)
