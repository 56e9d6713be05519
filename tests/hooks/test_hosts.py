"""Hosts that read masks in ways of their own: what Regard computes is what their eager attention computes."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

import regard
from experiments.hosts.shrink import make_config, make_model
from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks import Watch, find_attention_layers, watching
from regard.hooks.attention_function import attention_function
from regard.hooks.direction import is_causal_layer, is_one_sided
from regard.statistics import SinkRate
from tests.contracts.conftest import randomised
from tests.named_cache import behind, cache_of

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "index_topk": 8,
}  # fmt: skip
ENCODERS = {"Splinter": {"question_token_id": 4}, "ClapText": {}, "AlignText": {}, "LayoutLM": {}}


def model_of(name: str, task: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **sizes)
    return getattr(transformers, f"{name}{task}")._from_config(config, attn_implementation="eager").eval()


def ids(rows: int = 2, tokens: int = 20) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_equal_to_eager(model: Any, **inputs: Any) -> Watch:
    """Logits or states, and the mean mass of each key, are those of the host's eager attention, however it is set."""
    expected = model(**inputs, output_attentions=True)
    for implementation in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        model.set_attn_implementation(implementation)
        with watching(model, "column_mass") as watch:
            output = model(**inputs)
        torch.testing.assert_close(output[0], expected[0], rtol=1e-4, atol=1e-5)
        for layer, weights in enumerate(expected.attentions):
            mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy())
            mass = mass.reshape(weights.shape[1], -1)
            torch.testing.assert_close(mass, weights.mean((0, 2)).double(), rtol=1e-4, atol=1e-5)
    return watch


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_without_sdpa_sees_later_keys(name: str, padded: bool) -> None:
    """Its modules do not say that they are not causal, and its mask is not left out."""
    model = model_of(name, "Model", **ENCODERS[name])
    mask = torch.ones(2, 20, dtype=torch.long)
    if padded:
        mask[1, 12:] = 0
        with torch.no_grad():
            expected = model(ids(), attention_mask=mask)[0]
            with watching(model, "column_mass"):
                output = model(ids(), attention_mask=mask)[0]
        torch.testing.assert_close(output[0], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(output[1, :12], expected[1, :12], rtol=1e-4, atol=1e-5)
    else:
        watch = assert_equal_to_eager(model, input_ids=ids(), attention_mask=mask)
        assert set(watch.frame()["site"]) == {"encoder"}
        assert watch.frame("column_mass")["value"].max() <= 1


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_keys_that_an_indexer_selects_are_all_that_is_seen(name: str) -> None:
    assert_equal_to_eager(model_of(name, "ForCausalLM", **LATENT), input_ids=ids())


@pytest.mark.parametrize("tail", [True, False])
def test_queries_whose_indexer_selects_no_key_are_refused_with_eager_attention(tail: bool) -> None:
    """The host's eager attention then gives them all keys, later ones too, and its SDPA none."""
    sizes = LATENT | {"qk_rope_head_dim": 0, "index_n_heads": 2, "index_head_dim": 16, "index_kpool": 4}
    sizes |= {"linear_num_heads": 2, "linear_head_dim": 16, "hc_mult": 2, "num_local_experts": 4}
    layers = {"layer_types": ["linear_attention", "indexed_attention"]}
    model = model_of("Glm5NextText", "Model", **sizes, **layers, index_kpool_always_select_tail=tail)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            expected = model(ids(), use_cache=False)[0]
        if implementation == "eager" and not tail:
            message = r"layers\.1\.self_attn returns .*% other values .* no key; set attn_implementation='sdpa'"
            with pytest.raises(UserError, match=message), watching(model):
                pass
            continue
        with torch.no_grad(), watching(model, "row_sum") as watch:
            output = model(ids(), use_cache=False)[0]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        empty = (watch.frame("row_sum")["value"] < 1).any()
        assert empty == (not tail)


def test_masks_that_a_host_extends_by_its_own_bias_stay_what_they_are() -> None:
    model = model_of("DeepseekV4", "ForCausalLM", num_key_value_heads=1, head_dim=16, q_lora_rank=16, index_topk=8,
                     moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=8,
                     qk_rope_head_dim=8, index_n_heads=2, index_head_dim=16)  # fmt: skip
    with torch.no_grad():
        expected = model(ids(tokens=40)).logits
        with watching(model, "row_sum"):
            output = model(ids(tokens=40)).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_option_that_may_change_the_weights_is_refused() -> None:
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(UserError, match="Identity: its attention has the unknown option block_indices"):
        attention_function(nn.Identity(), query, query, query, None, block_indices=torch.zeros(1))


def test_what_tokenizers_add_to_a_text_is_no_option_of_attention() -> None:
    """A Llama takes whatever a tokenizer returns, and hands it to its attention."""
    model, given = model_of("Llama", "ForCausalLM"), ids()
    marks = ("token_type_ids", "mm_token_type_ids", "special_tokens_mask", "assistant_masks")
    with torch.no_grad():
        expected = model(given).logits
        with watching(model, "row_sum") as watch:
            output = model(given, **{name: torch.ones_like(given) for name in marks}).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert watch.samples == len(given)


def test_which_layers_are_causal_is_read_from_the_mask() -> None:
    """Only a mask that lets each token see itself alone leaves the word to the module, padding aside.

    LightGlue's modules say that they are causal, and its keypoints see all others. Those of streaming encoders say that
    they are not, and see some tokens ahead.
    """
    declared, undeclared, denied = nn.Identity(), nn.Identity(), nn.Identity()
    declared.is_causal, denied.is_causal = True, False
    query = torch.randn(1, 1, 6, 4)
    full = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    causal = full.tril()
    masks = {"full": full, "causal": causal, "prefix": causal | (torch.arange(6) < 3), "window": causal.triu(-2)}
    masks["both sides"] = full.tril(1).triu(-1)
    masks["farther ahead"] = full.tril(3).triu(-1)
    masks["farther back"] = full.tril(1).triu(-3)
    masks["chunks"] = (torch.arange(6)[:, None] // 2 - torch.arange(6) // 2)[None, None] >= 0
    masks["padded"] = full & (torch.arange(6) < 4)
    masks["one real token"] = full & (torch.arange(6) == 4)
    sides, one_sided = {}, set()
    for name, keep in masks.items():
        call = AttentionCall(query=query, key=query, value=query, scale=1.0, keep=keep)
        sides[name] = tuple(is_causal_layer(module, call) for module in (declared, undeclared, denied))
        one_sided |= {name} if is_one_sided(call) else set()
    assert one_sided == {"causal", "prefix", "window", "farther back", "chunks"}
    assert sides == {
        "full": (False, False, False),
        "causal": (True, True, True),
        "prefix": (True, True, False),
        "window": (True, True, True),
        "both sides": (False, False, False),
        "farther ahead": (False, False, False),
        "farther back": (True, True, False),
        "chunks": (True, True, False),
        "padded": (False, False, False),
        "one real token": (True, False, False),
    }


def moonshine() -> Any:
    """Return a model whose encoder sees 15 frames behind and 3 ahead."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 16,
    }  # fmt: skip
    encoder = sizes | {"sliding_windows": [[16, 4]], "initializer_range": 0.5}
    config = transformers.MoonshineStreamingConfig(encoder_config=encoder, vocab_size=40, pad_token_id=0, **sizes)
    model = transformers.MoonshineStreamingForConditionalGeneration._from_config(config, attn_implementation="eager")
    return randomised(model).eval()


@pytest.mark.every_value
@pytest.mark.parametrize("lengths", [(5,), (50,), (5, 50), (50, 5)], ids=str)
@torch.no_grad()
def test_an_encoder_that_sees_some_frames_ahead_is_one_at_every_length(lengths: tuple[int, ...]) -> None:
    """A frame is seen by those from it on, however far a window reaches back, and by the three before it."""
    model, drawn = moonshine(), torch.Generator().manual_seed(1)
    sounds = {frames: torch.randn(1, 320 * frames, generator=drawn) for frames in lengths}
    weights: list[Tensor] = []
    attention = model.get_encoder().layers[0].self_attn
    handle = attention.register_forward_hook(lambda _module, _args, output: weights.append(output[1][0].double()))
    for sound in sounds.values():
        model.get_encoder()(sound, attention_mask=torch.ones_like(sound, dtype=torch.long))
    handle.remove()
    with watching(model, ["column_mass", SinkRate((0.1,), 1)]) as watch:
        for sound in sounds.values():
            mask = torch.ones_like(sound, dtype=torch.long)
            model(input_values=sound, attention_mask=mask, decoder_input_ids=torch.arange(4, 14)[None])
    assert set(watch.frame("column_mass")["site"]) == {"encoder", "decoder", "cross"}
    rates, counts = torch.zeros(2, max(lengths)).double(), torch.zeros(max(lengths))
    for frames, matrix in zip(lengths, weights, strict=True):
        place = torch.arange(frames)
        alpha = matrix.sum(-2) / (frames - place + place.clamp(max=3))
        rates[:, :frames] += 100.0 * (alpha > 0.1)
        counts[:frames] += 1
    table = watch.frame("sink_rate", site="encoder", layer=0).sort_values(["head", "position"])
    actual = torch.tensor(table["value"].to_numpy()).reshape(2, -1)
    torch.testing.assert_close(actual, rates / counts)
    assert 0 < float(rates.mean()) < 100


@pytest.mark.parametrize("frames", [(22,), (5,), (9, 3)], ids=str)
@torch.no_grad()
def test_an_encoder_of_chunks_is_no_decoder_though_its_config_has_a_vocabulary(frames: tuple[int, ...]) -> None:
    """Frames see their chunk of four and the one before it, so the last chunk may see what does not see it."""
    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 2,
        "speech_encoder_intermediate_size": 16, "feature_projection_input_dim": 8, "add_adapter": False,
        "speech_encoder_chunk_size": 4, "speech_encoder_left_chunk_num": 1,
    }  # fmt: skip
    encoder = SeamlessM4Tv2SpeechEncoder(transformers.SeamlessM4Tv2Config(**sizes)).eval()
    encoder.set_attn_implementation("sdpa")
    with watching(encoder, "column_mass") as watch:
        for count in frames:
            encoder(torch.randn(2, count, 8))
    assert set(watch.frame("column_mass")["site"]) == {"encoder"}


@pytest.mark.parametrize("name, site", [("CLIPText", "decoder"), ("LayoutLM", "encoder")])
def test_one_token_does_not_say_whether_longer_texts_are_causal(name: str, site: str) -> None:
    model = model_of(name, "Model")
    with torch.no_grad(), watching(model, "first_mass") as watch:
        model(ids(1, 1))
        model(ids(2, 12))
    weights = model(ids(2, 12), output_attentions=True).attentions[0].double()
    seen = torch.arange(12, 8, -1) if site == "decoder" else torch.full((4,), 12)
    expected = (weights.sum(2)[..., :4] / seen).mean(0)
    found = watch.frame("first_mass", layer=0, site=site)
    later = found[found["position"] > 0]["value"].to_numpy()
    torch.testing.assert_close(torch.tensor(later).reshape(4, 3), expected[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "GptOss", "Bert"])
def test_layers_of_common_models_are_what_they_were(name: str) -> None:
    sizes = {"num_local_experts": 4, "head_dim": 8, "num_key_value_heads": 4} if name == "GptOss" else {}
    layers = find_attention_layers(model_of(name, "Model", **sizes))
    assert [layer.site for layer in layers] == [("encoder" if name == "Bert" else "decoder")] * 2


def test_statistics_of_hidden_states_are_left_out_where_a_host_has_several_streams() -> None:
    config = transformers.Gemma3nTextConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, vocab_size_per_layer_input=99, hidden_size_per_layer_input=8,
        laurel_rank=4, altup_num_inputs=2, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM(config).eval()
    with torch.no_grad(), pytest.warns(UserWarning, match="hidden_norm are left out"), watching(model) as watch:
        model(input_ids=ids())
    assert len(watch.frame("sink_rate"))
    assert not watch["hidden_norm"].result()
    with torch.no_grad(), pytest.raises(UserError, match="leave out hidden_norm"), watching(model, "hidden_norm"):
        model(input_ids=ids())


def swin(depths: tuple[int, ...] = (1, 1)) -> Any:
    config = transformers.SwinConfig(
        embed_dim=16, depths=list(depths), num_heads=[2, 4][: len(depths)], window_size=2, image_size=16, patch_size=2
    )
    return transformers.SwinModel(config).eval()


WINDOWED = {
    "Swin": swin,
    "Swin of one stage": partial(swin, (2,)),
    "MaskFormer": lambda: make_model("MaskFormerModel", make_config("maskformer")),
    "LwDetr": lambda: make_model("LwDetrModel", make_config("lw_detr")),
    "RfDetr": lambda: make_model("RfDetrModel", make_config("rf_detr")),
}


@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_windows_that_are_folded_into_the_batch_are_refused(name: str) -> None:
    """An average has one count for all layers of a site; layers of other rows would be divided by it as well.

    Those of one stage have as many windows in each layer, but others, shifted by half a window.
    """
    model, pixels = WINDOWED[name](), torch.randn(2, 3, *(2 * [16 if name.startswith("Swin") else 64]))
    with pytest.raises(UserError, match="fold windows"), watching(model):
        model(pixel_values=pixels)
    with pytest.raises(UserError, match="fold windows"):
        regard.average_attention(model, [{"pixel_values": pixels}], length=64)


@torch.no_grad()
def test_a_vision_tower_in_the_stack_of_a_text_is_refused_as_such_with_a_cache() -> None:
    """Idefics has both in one model, so that a cache of 10 tokens is behind a forward of 10 and of 17."""
    model = make_model("IdeficsForVisionText2Text", make_config("idefics"))
    size = model.config.vision_config.image_size
    inputs = {"input_ids": ids(2, 10), "pixel_values": torch.randn(2, 1, 3, size, size)}
    inputs["image_attention_mask"] = torch.ones(2, 10, 1, dtype=torch.long)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(UserError, match="some layers have 10 tokens, others 17"), watching(model, "column_mass"):
        model.generate(**inputs, **options)


def test_text_layers_around_a_vision_tower_are_looked_for() -> None:
    """GIT's own layers stand beside the model within it, and multiply their matrices themselves."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.GitConfig(**SMALL, vision_config={**sizes, "image_size": 16, "patch_size": 4})
    model = transformers.GitForCausalLM(config).eval()
    with torch.no_grad(), watching(model, "column_mass") as watch:
        weights = model(input_ids=ids(), output_attentions=True).attentions
    for layer, layer_weights in enumerate(weights):
        mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy())
        torch.testing.assert_close(mass, layer_weights.mean((0, 2)).flatten().double(), rtol=1e-4, atol=1e-6)


def inkling2() -> Any:
    """Return a model with logits that are large, beside the keys of each query."""
    if "inkling2_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this Transformers has no Inkling2")
    model = make_model("Inkling2ForCausalLM", make_config("inkling2_text"))
    for name, parameter in model.named_parameters():
        if name.endswith(".query"):  # of the states of earlier blocks
            parameter.normal_(generator=torch.Generator().manual_seed(2))
    for layer in model.model.layers:
        layer.self_attn.sink_proj.weight.mul_(20)
    return model


@torch.no_grad()
@pytest.mark.parametrize("cached", [False, True])
def test_a_logit_beside_the_keys_of_each_query_takes_its_share(cached: bool) -> None:
    """Inkling2: what its eager weights lack to one is the virtual sink, query by query."""
    model = inkling2()
    model.set_attn_implementation("eager")
    tokens = ids(rows=2, tokens=12)
    expected = model(tokens, output_attentions=True)
    with watching(model, ["virtual_sink_mass", "column_mass"]) as watch:
        if cached:
            cache = cache_of(model(tokens[:, :9], use_cache=True))
            logits = torch.cat([model(tokens[:, [i]], **behind(cache)).logits for i in range(9, 12)], dim=1)
            torch.testing.assert_close(logits, expected.logits[:, 9:], rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(model(tokens).logits, expected.logits, rtol=1e-4, atol=1e-5)
    for number, weights in enumerate(expected.attentions):
        rows = watch.frame("virtual_sink_mass", layer=number).dropna(subset=["head", "position"])
        virtual = (1 - weights.sum(-1)).mean(0)
        found = torch.tensor(rows.sort_values(["head", "position"])["value"].to_numpy()).reshape(virtual.shape)
        torch.testing.assert_close(found, virtual.double(), rtol=1e-4, atol=1e-5)
        assert 0.05 < float(virtual.mean()) < 0.95
        mass = watch.frame("column_mass", layer=number).sort_values(["head", "position"])["value"].to_numpy()
        torch.testing.assert_close(
            torch.tensor(mass).reshape(virtual.shape), weights.mean((0, 2)).double(), rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_an_output_projection_behind_a_gate_of_its_own() -> None:
    """Inkling2 has the gate in its attention (Transformers 5.23) or in a module beside the projection (5.24)."""
    model, tokens = inkling2(), ids(rows=2, tokens=8)
    attention = model.model.layers[1].self_attn
    projection = getattr(attention.o_proj, "linear", attention.o_proj)
    received: list[Tensor] = []
    with watching(model, "head_output_norm") as watch:
        handle = projection.register_forward_pre_hook(lambda _module, args: received.append(args[0]))
        model(tokens)
        handle.remove()
    parts = received[0].view(2, 8, 4, 8).double()
    weight = projection.weight.view(-1, 4, 8).double()
    expected = torch.einsum("bthw,dhw->bhtd", parts, weight).norm(dim=-1).mean((0, 2))
    rows = watch.frame("head_output_norm", layer=1, position=None).dropna(subset=["head"]).sort_values("head")
    torch.testing.assert_close(torch.tensor(rows["value"].to_numpy()), expected, rtol=1e-4, atol=1e-6)


def masses(watch: Watch, site: str, layer: int, shape: torch.Size) -> Tensor:
    """Return the mean weight of each key (head, key) of a layer with weights of a shape."""
    values = watch.frame("column_mass", site=site, layer=layer).sort_values(["head", "position"])["value"].to_numpy()
    return torch.tensor(values).reshape(shape[1], shape[3])


@torch.no_grad()
def test_points_that_deformable_attention_samples_are_no_keys() -> None:
    """Deformable DETR: its encoder has no other attention, and the queries of its decoder attend to each other."""
    model = make_model("DeformableDetrModel", make_config("deformable_detr"))
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = model(pixel_values=pixels, output_attentions=True)
    with watching(model, "column_mass") as watch:
        output = model(pixel_values=pixels)
    torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
    assert set(watch.frame("column_mass")["site"]) == {"encoder"}
    for layer, weights in enumerate(expected.decoder_attentions):
        mass = masses(watch, "encoder", layer, weights.shape)
        torch.testing.assert_close(mass, weights.double().mean((0, 2)), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_averages_beside_deformable_attention_are_means_of_eager_weights() -> None:
    """And with them the output is that of eager attention whose softmax gives these means."""
    model = make_model("DeformableDetrModel", make_config("deformable_detr")).double()
    pixels = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1)).double()
    weights = model(pixel_values=pixels, output_attentions=True).decoder_attentions
    constants = regard.average_attention(model, [{"pixel_values": pixels}], length=8)
    means = [layer.mean(0) for layer in weights]
    for layer, mean in enumerate(means):
        torch.testing.assert_close(constants.matrices["encoder", layer].double(), mean, rtol=0, atol=1e-7)
    fixed = regard.replaced(model, constants)(pixel_values=pixels).last_hidden_state
    model.set_attn_implementation("eager")
    for layer, mean in zip(model.decoder.layers, means, strict=True):

        def attend(module: Any, args: Any, given: Any, _output: Any, mean: Tensor = mean) -> tuple[Tensor, None]:
            value = module.v_proj(given["hidden_states"] if "hidden_states" in given else args[0])
            heads = value.unflatten(-1, (len(mean), -1)).transpose(1, 2)
            return module.o_proj((mean @ heads).transpose(1, 2).flatten(-2)), None

        layer.self_attn.register_forward_hook(attend, with_kwargs=True)
    expected = model(pixel_values=pixels).last_hidden_state
    torch.testing.assert_close(fixed, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_attention_of_a_decoder_to_its_encoder_is_cross_by_this_name_too() -> None:
    """Pix2Struct calls it `encoder_decoder_attention`."""
    model = make_model("Pix2StructForConditionalGeneration", make_config("pix2struct"))
    places = torch.cartesian_prod(torch.arange(1.0, 4), torch.arange(1.0, 4)).expand(2, -1, -1)
    patches = torch.cat([places, torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))], dim=-1)
    inputs = {"flattened_patches": patches, "decoder_input_ids": ids(tokens=6)}
    expected = model(**inputs, output_attentions=True)
    with watching(model, "column_mass") as watch:
        output = model(**inputs)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
    for site, attentions in (("cross", expected.cross_attentions), ("decoder", expected.decoder_attentions)):
        for layer, weights in enumerate(attentions):
            mass = masses(watch, site, layer, weights.shape)
            torch.testing.assert_close(mass, weights.double().mean((0, 2)), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_part_whose_class_transformers_does_not_export_is_measured() -> None:
    """The config of Voxtral's text is registered for a class that Transformers does not have under this name."""
    model = make_model("VoxtralRealtimeForConditionalGeneration", make_config("voxtral_realtime"))
    sounds = torch.randn(2, 16, 160, generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids(tokens=20), input_features=sounds).logits
    with watching(model, "row_sum") as watch:
        output = model(input_ids=ids(tokens=20), input_features=sounds).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert "decoder" in set(watch.frame("row_sum")["site"])


@torch.no_grad()
def test_single_heads_beside_logits_of_queries_are_replaced() -> None:
    """The weights of the other heads stay as they are, beside their sinks; a constant head keeps the sums."""
    model, tokens = inkling2(), ids(rows=2, tokens=8)
    plain = model(tokens, output_attentions=True)
    constants = regard.average_attention(model, [{"input_ids": ids(rows=3, tokens=8).flip(1)}], length=8)
    with regard.replacing(model, constants, heads=[(0, 1)]), watching(model, "column_mass", verify=False) as watch:
        replaced = model(tokens).logits
    mass = watch.frame("column_mass", layer=0).sort_values(["head", "position"])["value"].to_numpy()
    expected = plain.attentions[0].double().mean((0, 2))
    expected[1] = constants.matrices["decoder", 0][1].double().mean(0)
    torch.testing.assert_close(torch.tensor(mass).reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(replaced, plain.logits, atol=1e-4)


def test_logits_of_queries_of_another_shape_are_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UserError, match=r"sinks: expected logits of shape \(1, 2, 3, 1\) and no others, got \(2,\)"):
        attention_function(nn.Identity(), query, query, query, None, sinks=torch.zeros(2))


@torch.no_grad()
def test_a_forward_that_skips_all_layers_in_training_has_no_sample() -> None:
    """It was refused, as if its attention could not be reached."""
    config = transformers.OPTConfig(
        vocab_size=99, hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, layerdrop=1.0, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.OPTModel(config).train()
    with watching(model, ["column_mass", "hidden_norm"]) as watch:
        model(ids(3, 9))
        for module in model.modules():
            vars(module).update({"layerdrop": 0.0} if hasattr(module, "layerdrop") else {})
        model(ids(2, 7))
    with watching(model, ["column_mass", "hidden_norm"]) as alone:
        model(ids(2, 7))
    assert watch.samples == 2
    assert watch.frame().equals(alone.frame())
