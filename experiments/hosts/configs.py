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
    "chameleon": _SMALL | {
        "num_key_value_heads": 4,
        "vocabulary_map": {"<image>": 90, **{f"IMGIMG{name}Z": 5 + i for i, name in enumerate("ABCDEFGH")}},
        "vq_config": {
            "embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "resolution": 32, "base_channels": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1}},
    "big_bird": _SMALL | {"attention_type": "original_full", "max_position_embeddings": 128},
    "bigbird_pegasus": {
        "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
        "attention_type": "original_full"},
    "blt": {
        "vocab_size": 100, "num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 100, "max_position_embeddings": 128,
        "patcher_config": _SMALL, "encoder_config": _SMALL | {"hidden_size_global": 32},
        "decoder_config": _SMALL | {"hidden_size_global": 32}, "global_config": _SMALL},
    "cohere_compass": {
        "text_config": _SMALL | {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [1, 1, 2]}}},
        "vision_config": {
            "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 8,
            "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 93, "vision_end_token_id": 94},
    "cohere_compass_text": _SMALL | {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [1, 1, 2]}}},
    "dbrx": {
        "vocab_size": 100, "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "gemma4_assistant": {
        "backbone_hidden_size": 32, "text_config": _SMALL | {
            "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}},
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
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "max_position_embeddings": 128, "num_buckets": 4},
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
_SAM_PROMPTS: dict[str, Any] = {
    "vision_config.num_pos_feats": 16,
    "prompt_encoder_config.hidden_size": 32, "prompt_encoder_config.image_size": 32,
    "prompt_encoder_config.patch_size": 8, "prompt_encoder_config.image_embedding_size": 4,
}  # fmt: skip
_HIERA: dict[str, Any] = {
    "hidden_size": 8, "image_size": [64, 64], "blocks_per_stage": [1, 2, 1, 1], "embed_dim_per_stage": [8, 16, 32, 64],
    "num_attention_heads_per_stage": [1, 2, 2, 4], "window_size_per_stage": [4, 2, 2, 2],
    "global_attention_blocks": [2], "window_positional_embedding_background_size": [2, 2],
}  # fmt: skip
_HIERA_NECK: dict[str, Any] = {
    "backbone_channel_list": [64, 32, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32, **{f"backbone_config.{name}": value for name, value in _HIERA.items()},
}  # fmt: skip
_SAM2: dict[str, Any] = {
    **{f"vision_config.{name}": value for name, value in _HIERA_NECK.items()}, "prompt_encoder_config.image_size": 64,
    "prompt_encoder_config.patch_size": 16,
}  # fmt: skip
_SWIN: dict[str, Any] = {"image_size": 64, "patch_size": 2, "hidden_size": 256}
_LOOP: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["hybrid_sliding", "hybrid"] * 3,
    "n_layers_per_attn_res_block": 2,
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 4,
}
FIELDS: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 64},
    "aria": {"projector_patch_to_query_dict": {16: 8}, "max_value_projector_query_tokens": 8},
    "bit": {"num_groups": 4},
    "bridgetower": {
        **{f"{part}hidden_size": 64 for part in ("", "text_config.", "vision_config.")},
        **{f"{part}num_hidden_layers": 3 for part in ("text_config.", "vision_config.")}},
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 8},
    "clap": {"audio_config.hidden_size": 64},
    "clvp": {f"{part}_config.hidden_size": 128 for part in ("text", "speech")},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "depth_pro": {
        "intermediate_hook_ids": [1, 0], "patch_size": 16, "image_model_config.image_size": 64},
    "diffusion_gemma": {
        "text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 16,
        "canvas_length": 8},
    "dory": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "n_input_layers": 1,
        "n_output_layers": 1},
    "efficientloftr": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
    "fastspeech2_conformer_with_hifigan": {
        "vocoder_config.model_in_dim": 16, "vocoder_config.upsample_initial_channel": 32},
    "florence2": {
        "vision_config.embed_dim": [16, 32, 32, 32], "vision_config.num_heads": [2, 2, 2, 2],
        "vision_config.num_groups": [2, 2, 2, 2], "vision_config.depths": [1, 1, 1, 1]},
    "glm4v_moe": {"text_config.head_dim": 16},
    "glm4v_moe_text": {"head_dim": 16},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-2, 0]], "spatial_target_layers": [1]},
    "kosmos-2": {"latent_query_num": 8},
    "kosmos-2.5": {"latent_query_num": 8},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32},
    "levit": {"image_size": 64, "patch_size": 16, "key_dim": [8, 8, 8]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "inkling2_loop": {f"text_config.{name}": value for name, value in _LOOP.items()},
    "inkling2_loop_text": _LOOP,
    "kimi_k25": {"vision_config.pos_emb_height": 8, "vision_config.pos_emb_width": 8},
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "lightglue": {"intermediate_size": 64, "keypoint_detector_config.keypoint_decoder_dim": 65},
    "lilt": {"hidden_size": 48},
    "lw_detr": {
        "backbone_config.image_size": 64, "backbone_config.pretrain_image_size": 64, "backbone_config.num_windows": 4,
        "backbone_config.num_windows_side": 2, "projector_in_channels": [32], "projector_scale_factors": [1.0],
        "num_feature_levels": 1, "group_detr": 2, "backbone_config.out_indices": [2, 4]},
    "minimax_m3_vl": {"merged_hidden_size": 128},
    "mistral4": {"head_dim": 16},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "molmo2": {
        "vision_config.num_position_embeddings": 16, "adapter_config.vision_feature_layer": [-1, -2],
        "image_patch_id": 90},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "nemotron_h_omni": {"vision_config.patch_dim": 192},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_latents": 16, "d_model": 32, "d_latents": 32, "num_self_attends_per_block": 2,
                  "max_position_embeddings": 64},
    "pi0": {"vlm_config.text_config.num_image_tokens": 16, "chunk_size": 8},
    "omdet-turbo": {
        "timm_kwargs": {}, "encoder_in_channels": [8, 16, 16], "apply_layernorm_after_vision_backbone": False,
        "decoder_hidden_dim": 16, "d_model": 16, "vision_features_channels": [16, 16, 16]},
    "pvt": {"image_size": 64, "sequence_reduction_ratios": [4, 1]},
    "radio": {"patch_dim": 192},
    "rf_detr": {
        "backbone_config.image_size": 64, "backbone_config.num_windows": 2, "group_detr": 2,
        "backbone_config.out_indices": [2, 4]},
    "sam": _SAM_PROMPTS,
    "sam_hq": _SAM_PROMPTS,
    "sam2": _SAM2,
    "sam2_hiera_det_model": _HIERA,
    "sam2_video": _SAM2,
    "sam2_vision_model": _HIERA_NECK,
    "sam3_tracker": {
        **_SAM_PROMPTS, "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "seggpt": {"image_size": [64, 32]},
    "shieldgemma2": {"mm_tokens_per_image": 16},
    "swin": _SWIN,
    "swin2sr": {"image_size": 32, "patch_size": 1, "window_size": 4},
    "swinv2": _SWIN,
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "tvp": {"max_img_size": 64},
    "step3p7": {"text_config.sliding_window": 8},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vitpose_backbone": {"num_experts": 1, "part_features": 8},
}  # fmt: skip
"""Fields of configs that are shrunk, by path, with values that no rule tells."""
PARTS = {
    "BarkModel": ("BarkSemanticModel", "semantic_config"),
    "Qwen2_5OmniForConditionalGeneration": ("Qwen2_5OmniThinkerForConditionalGeneration", "thinker_config"),
    "Qwen3OmniMoeForConditionalGeneration": ("Qwen3OmniMoeThinkerForConditionalGeneration", "thinker_config"),
}
"""Classes that have no forward, because they join models to generate with: the model of text, and its config."""
_SESSION = "its forward takes an inference session over a video"
_TWO_RATES = "its acoustic and its semantic encoder must come to as many steps"
REASONS = {
    "edgetam_video": _SESSION,
    "gemma4_assistant": "its layers share the keys and values of another model, which its config does not allow for",
    "gemma4_unified_assistant": "its forward takes the keys and values of another model",
    "neucodec": "the widths of its two encoders must add up to that of its quantizer",
    "pp_ocrv6_medium_det": "its config has no kernels by default",
    "sam2_video": _SESSION,
    "sam3_tracker_video": _SESSION,
    "sam3_video": _SESSION,
    "tvp": "its forward takes one sample alone",
    "voxtral_realtime_text": "Transformers does not export its class",
    "xcodec": _TWO_RATES,
    "xcodec2": _TWO_RATES,
}
"""Why types are not buildable, where the error alone does not say it."""
