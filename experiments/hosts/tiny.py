"""Tiny random models of any type: configs shrunk field by field, and inputs that fit them."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENS = 20
MAX_PARAMETERS = 20_000_000
SHARP = re.compile(r"(^|[._])(q|k|qkv|query|key|qk|in_proj|q_lin|k_lin|Wqkv|c_attn|query_key_value|\w+_q|\w+_k)"
                   r"(_?proj|_b|_a)?([._]|$)|(q|k|qkv)_proj|to_[qk]")  # fmt: skip
SIZES: dict[int, str] = {
    1: "n_group topk_group n_groups first_k_dense_replace n_shared_experts mamba_n_groups moe_num_shared_experts "
       "num_nextn_predict_layers",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth num_experts_per_tok "
       "linear_num_key_heads mamba_expand mlp_ratio moe_k moe_topk temporal_patch_size num_decoder_layers "
       "num_encoder_layers spatial_merge_size num_hidden_groups",
    4: "num_attention_heads n_head n_heads num_heads num_key_value_heads encoder_attention_heads attention_heads "
       "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
       "num_frames",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim d_kv "
       "kv_channels rotary_dim mamba_d_state mamba_d_head mamba_n_heads index_topk patch_size attention_head_dim "
       "index_head_dim num_mel_bins",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_chunk_size "
        "hidden_size_per_layer_input",
    32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size word_embed_proj_dim out_hidden_size "
        "projection_dim hidden_dim encoder_hidden_size decoder_hidden_size image_size vision_output_dim input_size",
    48: "intermediate_size n_inner ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size mlp_dim "
        "intermediate_size_mlp shared_intermediate_size",
    64: "mamba_d_ssm sliding_window max_source_positions max_target_positions",
    100: "vocab_size vocab_size_per_layer_input",
    128: "n_positions n_ctx max_position_embeddings max_seq_len",
}  # fmt: skip
FIELDS: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
FIELDS |= {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "use_mamba_kernels": False,
}
FIELDS |= {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "mask_ratio": 0.0}
LISTS = ("attn_layer_indices",)
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types")


def shrink(config: Any, fill: bool = False, depth: int = 0) -> Any:
    """Make the sizes of a config and of the configs in it small, in place; what it refuses stays as it is.

    Args:
        config: The config.
        fill: Also give sizes to fields that are None.
        depth: How deep the config is in others.
    """
    for name, value in FIELDS.items():
        if not _has(config, name):
            continue
        present = _get(config, name)
        if (present is None and not fill) or (isinstance(present, bool) and not isinstance(value, bool)):
            continue
        _set(
            config, name, [value] * len(present) if isinstance(present, (list, tuple)) and name not in LISTS else value
        )
    _shrink_layers(config, fill)
    for inner in vars(config).values() if depth < 4 else ():
        if isinstance(inner, transformers.PreTrainedConfig):
            shrink(inner, fill, depth + 1)
    return config


def _has(config: Any, name: str) -> bool:
    """Return whether a config has a field, also one that varies between layers."""
    try:
        return hasattr(config, name)
    except Exception:
        return True


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # it varies between layers
        return 0


def _shrink_layers(config: Any, fill: bool) -> None:
    """Give a config one layer of each kind in its lists of layers, and at least two."""
    depths = getattr(config, "depths", None)
    if isinstance(depths, (list, tuple)):
        _set(config, "depths", [1 for _ in depths])
    for name in PER_LAYER:
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)) and len(kinds) > 2 and all(isinstance(kind, str) for kind in kinds):
            unique = list(dict.fromkeys(kinds))
            count = max(2, len(unique))
            _set(config, name, (unique + unique)[:count])
            _set(config, "num_hidden_layers", count)
    rope = _get(config, "rope_parameters") if _has(config, "rope_parameters") else None
    if isinstance(rope, dict) and "mrope_section" in rope:
        _set(config, "rope_parameters", {**rope, "mrope_section": [1, 1, 2]})
    if fill and _has(config, "layer_types") and _get(config, "layer_types") is None:
        state = {"lfm2_moe": "conv", "granitemoehybrid": "mamba"}.get(config.model_type)
        if state:
            _set(config, "layer_types", [state, {"mamba": "attention"}.get(state, "full_attention")])


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # what a config cannot be is for its own class to say
        return


def make_model(model_type: str, class_name: str, fill: bool = False) -> PreTrainedModel:
    """Return a tiny model with eager attention, whose attention is far from uniform.

    Args:
        model_type: Its type in Transformers.
        class_name: Its class.
        fill: Also give sizes to fields of the config that are None.

    Raises:
        ValueError: It stays large with small sizes.
    """
    cls = getattr(transformers, class_name)
    config = shrink(CONFIG_MAPPING[model_type](), fill)
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters even with small sizes")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager").float().eval()
    sharpen(model)
    return model


@torch.no_grad()
def sharpen(model: nn.Module) -> None:
    """Draw the weights of queries and keys, and the embeddings, anew and larger."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        if SHARP.search(name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 / parameter.shape[-1] ** 0.5)
        elif "embed" in name or "wte" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def token_ids(rows: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    """Return random ids of ordinary tokens."""
    return torch.randint(10, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def make_inputs(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return inputs that a model may accept, the likeliest first."""
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(2)
    texts: list[dict[str, Tensor]] = [{"input_ids": token_ids()}]
    size = _find_number(config, "image_size", 32)
    channels = _find_number(config, "num_channels", 3)
    frames = _find_number(config, "num_frames", 4)
    pixels = {"pixel_values": torch.randn(2, channels, size, size, generator=generator)}
    video = {"pixel_values": torch.randn(2, frames, channels, size, size, generator=generator)}
    bins = _find_number(config, "num_mel_bins", 8)
    sounds = [
        {"input_features": torch.randn(2, bins, 128, generator=generator)},
        {"input_features": torch.randn(2, 60, bins, generator=generator)},
        {"input_values": torch.randn(2, 4000, generator=generator)},
        {"input_values": torch.randn(2, 128, bins, generator=generator)},
    ]
    images = [pixels, video, {"pixel_values": pixels["pixel_values"][:1]}]
    if name == "pixel_values":
        inputs = [*images, *({**image, **texts[0]} for image in images[:1]), *texts]
    elif name in ("input_features", "input_values"):
        inputs = [*(sound for sound in sounds if name in sound), *texts]
    else:
        inputs = [*texts, {**texts[0], **pixels}, *images[:2], *sounds]
    decoder = {"decoder_input_ids": token_ids(tokens=9, seed=3)}
    if config.is_encoder_decoder:
        inputs = [option for entry in inputs for option in ({**entry, **decoder}, entry)]
    return inputs


def _find_number(config: Any, name: str, default: int) -> int:
    """Return a field of a config, or of its part for images or sound."""
    for part in (config, *(getattr(config, part, None) for part in ("vision_config", "audio_config", "encoder"))):
        value = getattr(part, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int):
            return value
    return default
