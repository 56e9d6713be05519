"""A tiny random model of every family, its inputs, and the ways to compare what was seen.

Weights are drawn far larger than at initialisation, so that attention is peaked and a slip shows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard import models as own
from regard.attention.spec import AttentionSpec
from regard.hooks import Watch

transformers.logging.set_verbosity_error()

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
LENGTHS, DECODER_LENGTHS = (20, 13, 9), (12, 8, 10)
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


def _class(name: str) -> Any:
    return getattr(own if name.startswith("Regard") else transformers, name)


@cache
def _built(name: str, implementation: str, dtype: torch.dtype) -> Any:
    family = BY_NAME[name]
    config = _class(family.config)(**family.settings)
    config._experts_implementation = "eager"  # grouped products know no float64
    kind = _class(family.model)
    return randomised(kind._from_config(config, attn_implementation=implementation)).to(dtype).eval()


@torch.no_grad()
def randomised(model: Any) -> Any:
    """The model with large random weights, the same for the same shape of model."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("sinks", "sink_logit")):
            parameter.copy_(drawn + 2)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * drawn)
        elif parameter.ndim == 1:
            parameter.add_(0.1 * drawn)
        else:
            parameter.copy_(0.25 * drawn)
    return model


def _ids(lengths: Iterable[int], padding: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and mask, the padding id 0 where the mask is 0."""
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(tuple(lengths)), longest), generator=generator)
    steps = torch.arange(longest)
    cut = torch.tensor([longest - n for n in lengths])[:, None]
    real = {"none": steps >= cut * 0, "right": steps < longest - cut, "left": steps >= cut}[padding]
    return ids * real, real.long()


def _inputs(family: Family, padding: str, seed: int = 0) -> dict[str, Tensor]:
    """Three samples of different length where there is padding, as the arguments of a forward."""
    generator = torch.Generator().manual_seed(seed)
    if family.kind == "vision":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    ids, real = _ids(LENGTHS, padding, generator)
    inputs = {"input_ids": ids, "attention_mask": real}
    if family.positions is not None:
        inputs["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0) + family.positions
    if family.kind == "both":
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = _ids(DECODER_LENGTHS, padding, generator)
    return inputs


def _singles(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same samples one by one, without their padding and without a mask."""
    found = []
    for row in range(len(next(iter(inputs.values())))):
        single = {}
        for name, values in inputs.items():
            mask = inputs.get("decoder_attention_mask" if name.startswith("decoder") else "attention_mask")
            if not name.endswith("attention_mask"):
                single[name] = values[row : row + 1] if mask is None else values[row : row + 1][:, mask[row].bool()]
        found.append(single)
    return found


def _real(inputs: dict[str, Tensor]) -> Tensor | None:
    """Which positions of the first output are not padding."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return None if mask is None else mask.bool()


def _cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: values.to(dtype) if values.is_floating_point() else values for name, values in inputs.items()}


@torch.no_grad()
def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits or hidden states of the real positions, (position, width)."""
    output = model(**_cast(inputs, model.dtype))[0]
    real = _real(inputs)
    return output.flatten(0, 1) if real is None else output[real]


Table = dict[tuple[Any, ...], tuple[float, int]]


def _table(seen: Watch, *, leave_out: Iterable[str] = ()) -> Table:
    """(statistic, site, layer, head, position, epsilon) → (value, samples)."""
    table = {}
    for row in seen.rows():
        key = (row.statistic, row.site, row.layer, row.head, row.position, row.epsilon)
        assert key not in table, f"two rows for {key}"
        if row.statistic not in leave_out:
            table[key] = (row.value, row.n)
    return table


def _assert_same(found: Table, expected: Table, *, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """The same rows with the same number of samples and, to rounding, the same values; λ_max to Lanczos' tolerance."""
    assert expected, "nothing to compare with"
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    assert not missing, f"{len(missing)} rows missing, such as {sorted(missing, key=str)[:3]}"
    assert not extra, f"{len(extra)} rows too many, such as {sorted(extra, key=str)[:3]}"
    wrong = []
    for key, (value, samples) in expected.items():
        tolerance = max(rtol, 1e-5) if key[0] == "spectral_bound" else rtol
        got, counted = found[key]
        if counted != samples or not abs(got - value) <= atol + tolerance * abs(value):
            wrong.append((key, got, value, counted, samples))
    assert not wrong, f"{len(wrong)} of {len(expected)} rows differ: {wrong[:5]}"


CASES = [(family, padding) for family in FAMILIES for padding in family.paddings]


@pytest.fixture(scope="session", params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """Every family."""
    return request.param


@pytest.fixture(scope="session", params=[f for f in FAMILIES if f.kind in ("decoder", "both")], ids=str)
def causal(request: pytest.FixtureRequest) -> Family:
    """Every family with a causal site."""
    return request.param


@pytest.fixture(scope="session", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Family, str]:
    """Every family with every kind of padding it may see."""
    return request.param


@pytest.fixture(
    scope="session",
    # BART numbers its positions by column: padding on the left moves them, whoever watches.
    params=[(f, p) for f, p in CASES if p != "none" and (f.name, p) != ("Bart", "left")],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def padded(request: pytest.FixtureRequest) -> tuple[Family, str]:
    """Every family with every kind of padding that leaves its positions alone."""
    return request.param


@pytest.fixture(scope="session")
def families() -> dict[str, Family]:
    return BY_NAME


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """Gives the one model of a family, implementation (its own if none is named) and dtype, in eval mode."""

    def built(family: Family | str, implementation: str = "", dtype: torch.dtype = torch.float32) -> Any:
        family = BY_NAME[family] if isinstance(family, str) else family
        return _built(family.name, implementation or family.plain, dtype)

    return built


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention in the dtype of the model: Transformers takes its softmax in float32, whatever comes in."""
    softmax = torch.nn.functional.softmax

    def exact(scores: Tensor, dim: int = -1, dtype: Any = None) -> Tensor:
        return softmax(scores, dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact)


@pytest.fixture(scope="session")
def random_weights() -> Callable[[Any], Any]:
    return randomised


@pytest.fixture(scope="session")
def inputs() -> Callable[..., dict[str, Tensor]]:
    return _inputs


@pytest.fixture(scope="session")
def singles() -> Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]:
    return _singles


@pytest.fixture(scope="session")
def run() -> Callable[[Any, dict[str, Tensor]], Tensor]:
    return _run


@pytest.fixture(scope="session")
def table() -> Callable[..., Table]:
    return _table


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    return _assert_same
