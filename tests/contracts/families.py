"""A tiny random model of every family: how it is made, and the cases in which it is tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.attention.spec import AttentionSpec

VOCABULARY, WIDTH, LAYERS, HEADS = 99, 32, 2, 4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 6


@dataclass(frozen=True)
class Family:
    """One architecture: how to make it, and where its parts stand."""

    name: str
    kind: str
    """`decoder`, `encoder`, `both` or `vision`."""
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    config: str = ""
    blocks: dict[str, str] = field(default_factory=dict)
    """Site → path of its list of layers."""
    projections: dict[str, str] = field(default_factory=dict)
    """Site → path of W_O within one of its layers."""
    plain: str = "sdpa"
    """What it computes with when nobody watches: `eager` where SDPA cannot express it."""
    paddings: tuple[str, ...] = ("none", "right", "left")
    positions: int | None = 0
    """The first position id; None where the model takes no position ids."""
    column: bool = False
    """Whether a column stands beside the keys, so that rows sum to less than 1."""

    def __str__(self) -> str:
        return self.name

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.projections)


def _decoder(name: str, blocks: str, projection: str, **more: Any) -> Family:
    names = {"model": f"{name}ForCausalLM", "config": f"{name}Config", "settings": COMMON} | more
    return Family(kind="decoder", blocks={"decoder": blocks}, projections={"decoder": projection}, name=name, **names)


def _encoder(name: str, blocks: str, projection: str, **more: Any) -> Family:
    names = {"model": f"{name}Model", "config": f"{name}Config", "settings": COMMON} | more
    return Family(kind="encoder", blocks={"encoder": blocks}, projections={"encoder": projection}, name=name, **names)


def _ours(name: str, attention: AttentionSpec | str, **more: Any) -> Family:
    """Our own decoder. Its operations are not Transformers' to compute: `eager` is their definition written out."""
    return _decoder(
        name,
        "model.layers",
        "self_attn.o_proj",
        model="RegardForCausalLM",
        config="RegardConfig",
        settings=GROUPED | {"attention": attention, "max_position_embeddings": 64},
        **more,
    )


GROUPED = COMMON | {"num_key_value_heads": 2}
SINGLE = COMMON | {"num_key_value_heads": 1}
NARROW = GROUPED | {"head_dim": 8}
BERTISH = "attention.output.dense"
DISENTANGLED = COMMON | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "hidden_dropout_prob": 0.0,
    "pad_token_id": 0,
}
FAMILIES = (
    _decoder(
        "GPT2",
        "transformer.h",
        "attn.c_proj",
        model="GPT2LMHeadModel",
        settings={"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    _decoder(
        "OPT",
        "model.decoder.layers",
        "self_attn.out_proj",
        settings=COMMON | {"ffn_dim": 64, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64},
    ),
    _decoder("GPTNeoX", "gpt_neox.layers", "attention.dense"),
    _decoder("Llama", "model.layers", "self_attn.o_proj", settings=GROUPED),
    _decoder(
        "LlamaMQA",
        "model.layers",
        "self_attn.o_proj",
        settings=SINGLE,
        model="LlamaForCausalLM",
        config="LlamaConfig",
    ),
    _decoder("Mistral", "model.layers", "self_attn.o_proj", settings=NARROW | {"sliding_window": WINDOW}),
    _decoder("Qwen3", "model.layers", "self_attn.o_proj", settings=NARROW),
    _decoder(
        "Gemma2",
        "model.layers",
        "self_attn.o_proj",
        plain="eager",
        settings=NARROW | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    _decoder(
        "GptOss",
        "model.layers",
        "self_attn.o_proj",
        plain="eager",
        column=True,
        settings=NARROW | {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    _ours("Regard", "softmax"),
    _ours("RegardSigmoid", "sigmoid-normalised"),
    _ours("RegardBias", "kv-bias", column=True),
    _ours("RegardSink", AttentionSpec(extra="sink-logit", window=WINDOW), column=True),
    _encoder("Bert", "encoder.layer", BERTISH),
    _encoder("Roberta", "encoder.layer", BERTISH, positions=1),
    _encoder("Electra", "encoder.layer", BERTISH, settings=COMMON | {"embedding_size": 16}),
    _encoder(
        "DistilBert",
        "transformer.layer",
        "attention.out_lin",
        settings={"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64},
    ),
    _encoder(
        "Albert",
        "encoder.albert_layer_groups",
        "albert_layers.0.attention.dense",
        settings=COMMON | {"embedding_size": 16},
    ),
    _encoder(
        "ModernBert",
        "layers",
        "attn.Wo",
        settings=COMMON
        | {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": WINDOW},
    ),
    _encoder("Deberta", "encoder.layer", BERTISH, plain="eager", settings=DISENTANGLED),
    _encoder(
        "DebertaV2",
        "encoder.layer",
        BERTISH,
        plain="eager",
        settings=DISENTANGLED | {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    Family(
        name="T5",
        kind="both",
        model="T5ForConditionalGeneration",
        config="T5Config",
        settings={"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "num_layers": LAYERS, "num_heads": HEADS}
        | {"d_ff": 64, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
        | {"decoder_start_token_id": 0},
        blocks={"encoder": "encoder.block", "decoder": "decoder.block"},
        projections={
            "encoder": "layer.0.SelfAttention.o",
            "decoder": "layer.0.SelfAttention.o",
            "cross": "layer.1.EncDecAttention.o",
        },
        positions=None,
    ),
    Family(
        name="Bart",
        kind="both",
        model="BartForConditionalGeneration",
        config="BartConfig",
        settings={"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
        | {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64}
        | {"decoder_ffn_dim": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | {"decoder_start_token_id": 2, "forced_eos_token_id": None, "max_position_embeddings": 64},
        blocks={"encoder": "model.encoder.layers", "decoder": "model.decoder.layers"},
        projections={
            "encoder": "self_attn.out_proj",
            "decoder": "self_attn.out_proj",
            "cross": "encoder_attn.out_proj",
        },
        positions=None,
    ),
    Family(
        name="ViT",
        kind="vision",
        model="ViTModel",
        config="ViTConfig",
        settings=COMMON | {"image_size": 16, "patch_size": 4},
        blocks={"encoder": "layers"},
        projections={"encoder": "attention.o_proj"},
        paddings=("none",),
        positions=None,
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
CASES = [(family, padding) for family in FAMILIES for padding in family.paddings]
PADDED = [(f, p) for f, p in CASES if p != "none" and (f.name, p) != ("Bart", "left")]
"""BART numbers its positions by column: padding on the left moves them, whoever watches."""
CAUSAL = [family for family in FAMILIES if family.kind in ("decoder", "both")]
SWAPPED = [family for family in FAMILIES if not family.name.startswith("Regard") or family.name == "Regard"]
"""Those in which softmax can be swapped for another operation: our other decoders have one already."""
