"""Tiny models of any type: its default config, shrunk field by field."""

import copy
import functools
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, ResNetConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments.hosts.configs import CONFIGS, FIELDS, PARTS

WIDTH, HEADS, HEAD_WIDTH, LAYERS, VOCABULARY = 32, 4, 8, 2, 100
MAX_PARAMETERS = 20_000_000
SIZES = {
    "vocab_size": VOCABULARY, "head_dim": 8, "d_kv": 8, "kv_channels": 8, "qk_rope_head_dim": 8, "d_head": 8,
    "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "rotary_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "zero_expert_num": 1, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 16,
    "mamba_expand": 2, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "mamba_headdim": 8,
    "n_mamba_heads": 2, "mamba_dt_rank": 4, "time_step_rank": 4, "state_size": 8, "mamba_ngroups": 1, "n_groups": 1,
    "mamba_n_groups": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "full_attention_interval": 2, "attention_head_dim": 8, "lru_width": WIDTH,
    "index_topk": 8, "index_head_dim": 8, "index_n_heads": 2, "o_groups": 2, "o_lora_rank": 8, "laurel_rank": 4,
    "image_size": 32, "patch_size": 8, "num_channels": 3, "window_size": 2, "num_mel_bins": 16,
    "max_source_positions": 64, "max_target_positions": 64, "num_frames": 4, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "sliding_window": 8, "attention_window": 8, "local_attention": 8,
    "attention_window_size": 16, "attention_chunk_size": 8, "query_pre_attn_scalar": 8, "swa_head_dim": 8,
    "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "sliding_window_size": 8, "global_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": HEADS, "dim_head": 8, "resampler_head_dim": 8, "cross_head_dim": 8,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "vocab_size_per_layer_input": VOCABULARY,
    "additional_vocab_size": 8, "num_kv_shared_layers": 0, "mlp_ratio": 2, "codebook_size": 32, "num_codebooks": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_queries": 8,
    "num_nextn_predict_layers": 0, "image_token_id": 90, "image_token_index": 90, "video_token_id": 91,
    "audio_token_id": 92, "audio_token_index": 92, "num_mem_blocks": 1, "mamba_d_conv": 4, "num_kv_heads": 2,
    "embed_dim_per_head": 8, "expert_num": 4, "share_expert_dim": 16, "vision_start_token_id": 93,
    "vision_end_token_id": 94, "boi_token_id": 95, "eoi_token_id": 96, "boi_token_index": 95, "eoi_token_index": 96,
    "num_expert_group": 1, "num_group": 1, "num_experts_per_token": 2, "upsample_groups": WIDTH, "num_filters": 4,
    "n_filters": 4, "audio_pad_token_id": 0, "qformer_image_token_id": 90,
}  # fmt: skip
DEFAULTS = {
    "head_dim": HEAD_WIDTH, "num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
    "num_experts_per_tok": 2, "vocab_size": VOCABULARY, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts": 4, "prediction_length": 8, "context_length": 16, "image_token_id": 90,
    "image_token_index": 90, "video_token_id": 91, "video_token_index": 91,
}  # fmt: skip
"""Fields that are computed from others, which have changed, or that a model has no size for by itself."""
LISTS: dict[str, Any] = {
    "attn_layer_indices": [1], "global_attn_indexes": [1], "fullatt_block_indexes": [1],
    "mrope_section": [1, 1, 2], "cross_attention_layers": [1], "conv_dim": [16, 16], "conv_stride": [5, 4],
    "conv_kernel": [10, 4], "attn_type_list": [0, 1], "intermediate_layers_indices": [0],
    "image_grid_pinpoints": [[32, 96]], "vision_feature_layers": [-1, -2],
}  # fmt: skip
_LAYERS = re.compile(r"(^|_)(n_)?(layers?|blocks?|depth)$|^num_hidden_layers|layers$")
_HEADS = re.compile(r"heads?$")
_WIDTH = re.compile(r"(hidden|embed|model|dim|width|channels|ffn|_ff|inner|intermediate|size|units|n_embd)")
_KEEP = re.compile(r"token|kernel|stride|index|range|max_|position|chunk|context|block_size|patches|rope|every|offset")


def make_config(model_type: str) -> Any:
    """Return the smallest config of a type that still goes through all kinds of its layers."""
    if model_type in CONFIGS:
        return CONFIG_MAPPING[model_type](**CONFIGS[model_type])
    config = CONFIG_MAPPING[model_type]()
    _shrink(config, set())
    for path, value in FIELDS.get(model_type, {}).items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, config), name, value)
    return config


def _shrink(config: Any, seen: set[int]) -> None:
    """Shrink the fields of a config, and of the configs in it."""
    if id(config) in seen:
        return
    seen.add(id(config))
    fields = dict(vars(config))
    kinds = [value for value in fields.values() if _is_list_of_names(value)]
    layers = max([LAYERS, *(min(len(set(value)), 4) for value in kinds)])
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig) and value.model_type == "timm_backbone":
            setattr(config, name, _make_backbone())  # timm need not be installed
        elif isinstance(value, PreTrainedConfig):
            _shrink(value, seen)
        elif (small := _small_value(name, value, fields, layers)) is not None:
            setattr(config, name, small)
    for name, size in DEFAULTS.items():
        if name in fields and fields[name] is None:
            setattr(config, name, size)
    if "sliding_attention" in (fields.get("layer_types") or ()) and fields.get("sliding_window", 0) is None:
        config.sliding_window = SIZES["sliding_window"]
    if "spatial_merge_size" in fields and "window_size" in fields:
        config.window_size = 32  # two merged patches a side
    for name in ("attention_dropout", "hidden_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if name in fields:
            setattr(config, name, 0.0)


def _make_backbone() -> ResNetConfig:
    """Return the config of a small backbone of Transformers with three feature maps."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic")
    config.out_features = ["stage2", "stage3", "stage4"]
    return config


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > LAYERS and all(isinstance(entry, str) for entry in value)


def _small_value(name: str, value: Any, fields: dict[str, Any], layers: int) -> Any:
    """Return a smaller value of a field; None if it stays."""
    if name in LISTS and isinstance(value, (list, tuple)):
        return LISTS[name]
    if isinstance(value, dict):
        return _small_rope(value) if "rope" in name else None
    if isinstance(value, (list, tuple)):
        return _small_list(name, value, fields, layers)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if name in SIZES:
        return SIZES[name]
    if name == "num_key_value_heads":
        return value if value == 1 else HEADS if value == fields.get("num_attention_heads") else 2
    if _HEADS.search(name):
        return min(value, HEADS)
    if _LAYERS.search(name) and not _KEEP.search(name):
        return min(value, layers)
    if "vocab" in name:
        return min(value, VOCABULARY)
    if "max_position" in name or name in ("n_positions", "n_ctx", "max_seq_len"):
        return min(value, 128)
    if _WIDTH.search(name) and not _KEEP.search(name):
        return min(value, 48 if re.search(r"ffn|_ff|intermediate|inner", name) else WIDTH)
    return None


def _small_list(name: str, value: Any, fields: dict[str, Any], layers: int) -> Any:
    """Return as many entries as there are layers, every name among them; widths and heads are cut."""
    if not value or isinstance(value[0], (dict, PreTrainedConfig)):
        return None
    if isinstance(value[0], str):
        if len(value) < LAYERS or not re.search(r"type|pattern|layers", name):
            return None
        names = list(dict.fromkeys(value))
        return (names * layers)[:layers] if len(names) <= layers else names[:layers]
    if "heads" in name and all(isinstance(entry, int) for entry in value):
        return [2] * (layers if len(value) in _counts(fields) else len(value))
    if len(value) in _counts(fields) and len(value) > layers:
        return list(value)[:layers]
    if name in ("image_size", "patch_size") and len(value) == 2:
        return [SIZES[name]] * 2
    if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value):
        if re.search(r"hidden_sizes|dims|channels", name):
            return [min(entry, WIDTH) for entry in value]
        if name in ("depths", "layers", "num_layers", "stage_numb_of_layers"):
            return [1] * len(value)
    return None


def _counts(fields: dict[str, Any]) -> set[int]:
    """Return the numbers of layers."""
    return {count for field, count in fields.items() if _LAYERS.search(field) and isinstance(count, int)}


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Return rope parameters whose lists fit the small heads."""
    small = copy.deepcopy(value)
    for name, entry in small.items():
        if isinstance(entry, dict):
            small[name] = _small_rope(entry)
        elif name in LISTS:
            small[name] = LISTS[name]
        elif name in ("short_factor", "long_factor"):
            small[name] = [1.0] * (HEAD_WIDTH // 2)
    if "rope_theta" in small:
        small.setdefault("mrope_section", LISTS["mrope_section"])
    return small


def make_model(class_name: str, config: Any) -> Any:
    """Return a model with eager attention and random weights with which attention is far from uniform.

    Raises:
        ValueError: The shrunk model is still too large.
    """
    class_name, part = PARTS.get(class_name, (class_name, ""))
    config, cls = getattr(config, part) if part else config, getattr(transformers, class_name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters after shrinking its config")
    torch.manual_seed(0)
    try:
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    except (ValueError, ImportError):
        model = cls._from_config(copy.deepcopy(config))
    return model.float().eval()


@torch.no_grad()
def sharpen(model: nn.Module, factor: float = 1.5) -> None:
    """Draw matrices anew, so large that weights of attention differ."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = 0.7 if re.search(r"embed|wte|shared", name) else factor / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
