"""A tiny DeepSeek-V4: a sliding window, and both kinds of compressed keys."""

from typing import Any

import pytest

HEADS, LAYERS, WINDOW = 4, 3, 8
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def make_deepseek(**options: Any) -> Any:
    """Return the model with its head and eager attention; skip the test where Transformers lacks it."""
    transformers = pytest.importorskip("transformers", minversion="5.10")
    config = transformers.DeepseekV4Config(
        hidden_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        head_dim=16, q_lora_rank=16, qk_rope_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, o_groups=2,
        o_lora_rank=8, hc_mult=2, index_n_heads=2, index_head_dim=8, index_topk=2, sliding_window=WINDOW,
        layer_types=KINDS, mlp_layer_types=["moe"] * LAYERS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        **{"vocab_size": 99, **options},
    )  # fmt: skip
    return transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager").eval()
