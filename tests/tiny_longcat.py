"""A tiny LongCat-Flash, each of whose blocks has two attention layers."""

from typing import Any

import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

HEADS, LAYERS = 4, 4


def make_longcat(vocabulary: int, **options: Any) -> LongcatFlashForCausalLM:
    """Return the model, of two blocks, with eager attention and random weights that are not small."""
    torch.manual_seed(0)
    config = LongcatFlashConfig(
        vocab_size=vocabulary, hidden_size=32, num_layers=LAYERS // 2, num_attention_heads=HEADS, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, ffn_hidden_size=48,
        expert_ffn_hidden_size=16, moe_topk=2, n_routed_experts=4, zero_expert_num=2, initializer_range=0.3,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options},
    )  # fmt: skip
    return LongcatFlashForCausalLM._from_config(config, attn_implementation="eager").eval()
