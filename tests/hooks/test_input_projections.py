"""Projections of the heads that are not constant, in hosts that do more with queries and keys than to multiply them."""

from typing import Any

import torch
from torch.testing import assert_close
from transformers import Llama4ForCausalLM, Llama4TextConfig

import regard


def test_all_heads_of_a_host_that_turns_queries_as_complex_numbers_are_replaced() -> None:
    """Zeros in the place of queries were no complex numbers. Constants of one text change nothing in it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "vocab_size": 50}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, num_local_experts=2, pad_token_id=0)).eval()
    ids = torch.randint(3, 50, (1, 9))
    constants = regard.average_attention(model, [{"input_ids": ids}], length=9)
    with torch.no_grad():
        expected, other = model(ids).logits, model(ids.flip(1)).logits
        with regard.replacing(model, constants):
            assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
            assert not torch.allclose(model(ids.flip(1)).logits, other, atol=1e-2)
