"""Configs of the types that cannot be shrunk field by field."""

from typing import Any

_HIDDEN = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4}
_SMALL = _HIDDEN | {"intermediate_size": 48, "num_hidden_layers": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN4_EXP = _HIDDEN | {
    "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "hc_lowrank": 8,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
}  # fmt: skip
_MUSICGEN = {"decoder": {
    "vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 48,
    "num_codebooks": 1, "pad_token_id": 0, "max_position_embeddings": 128, "num_chroma": 4}}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": _SMALL | _MAMBA | {"num_key_value_heads": 2, "attn_layer_indices": [1]},
    "big_bird": _SMALL | {"attention_type": "original_full", "max_position_embeddings": 128},
    "bigbird_pegasus": {
        "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
        "attention_type": "original_full"},
    "blt": {
        "vocab_size": 100, "num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 100, "max_position_embeddings": 128,
        "patcher_config": _SMALL, "encoder_config": _SMALL | {"hidden_size_global": 32},
        "decoder_config": _SMALL | {"hidden_size_global": 32}, "global_config": _SMALL},
    "cohere_compass_text": _SMALL | {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [1, 1, 2]}}},
    "dbrx": {
        "vocab_size": 100, "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "gemma3n_text": _SMALL | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 100,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 16},
    "granitemoehybrid": _SMALL | _MAMBA | {
        "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "shared_intermediate_size": 16},
    "hrm_text": _SMALL | {"head_dim": 8},
    "jamba": _SMALL | {
        "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    "longcat_flash": _HIDDEN | _MLA | {
        "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "head_dim": 8, "moe_topk": 2,
        "n_routed_experts": 4, "zero_expert_num": 2},
    "luke": _SMALL | {"entity_vocab_size": 100, "entity_emb_size": 16},
    "mamba2": {
        "vocab_size": 100, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1,
        "num_hidden_layers": 2, "chunk_size": 16},
    "mimo_v2_flash": _SMALL | {
        "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "sliding_window": 16, "moe_intermediate_size": 16,
        "num_experts_per_tok": 2, "n_routed_experts": 4, "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"]},
    "musicgen": _MUSICGEN,
    "musicgen_melody": _MUSICGEN,
    "qwen4_exp": {"text_config": _QWEN4_EXP, "vision_config": {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 8, "out_hidden_size": 32,
        "num_position_embeddings": 16}},
    "qwen4_exp_text": _QWEN4_EXP,
    "recurrent_gemma": _SMALL | {"num_hidden_layers": 3, "attention_window_size": 64, "num_key_value_heads": 1},
    "reformer": _HIDDEN | {
        "attention_head_size": 8, "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "feed_forward_size": 48,
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "max_position_embeddings": 128, "num_buckets": 4,
        "is_decoder": True},
    "rwkv": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2},
    "xmod": _SMALL | {"default_language": "en_XX"},
    "zamba": _SMALL | {
        "num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 8,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": _SMALL | {
        "num_hidden_layers": 4, "n_mamba_heads": 8, "mamba_d_state": 8, "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
}  # fmt: skip
"""Fields of the configs that cannot be shrunk field by field; their other fields keep their defaults."""
