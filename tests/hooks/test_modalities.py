"""Tokens of text stacks inside larger models are known, and how much attention each modality pays to each."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard import mixing, replacing
from regard.constants import Constants, Origin
from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.caches import read_cache
from regard.hooks.modalities import TokenModalities
from regard.statistics import STATISTICS, ModalityMass
from regard.statistics.modalities import MODALITIES
from tests.named_cache import behind, cache_of
from tests.tiny_vision import IMAGE, PATCHES, llava_config

SPECIAL = (1, 2)
TEXT = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = llava_config()
    config._attn_implementation = "eager"
    return transformers.LlavaModel(config).double().eval()


def inputs(batch: int = 2) -> dict[str, Tensor]:
    image = [IMAGE] * PATCHES
    rows = [[1, 5, *image, 6, 7, 8], [1, *image, 9, 2, 5, 6]][:batch]
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, 16, 16, generator=generator, dtype=torch.float64)
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def expected_masses(ids: Tensor, attentions: tuple[Tensor, ...], kind: str = "image") -> dict[str, float]:
    """The definition: the mean over samples that have both, of the mean over queries, of summed weights."""
    masses: dict[str, list[float]] = {}
    for layer, weights in enumerate(attentions):
        for row, tokens in enumerate(ids.tolist()):
            places: dict[str, list[int]] = {}
            for place, token in enumerate(tokens):
                name = kind if token == IMAGE else "special" if token in SPECIAL else "text"
                places.setdefault(name, []).append(place)
            keys = places | {f"first_{kind}": places[kind][:1]}
            for query, queries in places.items():
                for key, columns in keys.items():
                    for head in range(weights.shape[1]):
                        value = weights[row, head][queries][:, columns].sum(-1).mean()
                        masses.setdefault(f"{query}_to_{key} {layer}.{head}", []).append(100 * float(value))
    return {where: sum(values) / len(values) for where, values in masses.items()}


def measured(watch: Any) -> dict[str, float]:
    rows = watch.rows()
    return {
        f"{row.statistic.removeprefix('modality_mass_')} {row.layer}.{row.head}": row.value
        for row in rows
        if row.statistic.startswith("modality_mass")
    }


def test_it_is_the_sum_of_the_eager_weights(model: Any) -> None:
    given = inputs()
    with torch.no_grad():
        attentions = model(**given, output_attentions=True).attentions
        with watching(model, [ModalityMass(SPECIAL)]) as watch:
            model(**given)
    expected = expected_masses(given["input_ids"], attentions)
    assert measured(watch) == pytest.approx(expected, abs=2e-5)  # eager softmax is of float32
    assert {row.site for row in watch.rows()} == {"decoder"}, "a vision tower has no tokens of text"


@pytest.mark.every_value
@pytest.mark.parametrize("gated", [False, True], ids=["replaced", "mixed"])
def test_constant_heads_pay_what_their_matrices_say(model: Any, gated: bool) -> None:
    """It was that of scores which are not computed: of all keys that are seen alike."""
    given = inputs()
    tokens = given["input_ids"].shape[1]
    drawn = torch.rand(2, 4, tokens, tokens, generator=torch.Generator().manual_seed(2)).tril()
    constants = Constants(matrices={("decoder", i): drawn[i] for i in range(2)}, origin=Origin(source="average"))
    weights = (drawn.double() / drawn.double().sum(-1, keepdim=True))[:, None].expand(-1, 2, -1, -1, -1)
    with torch.no_grad():
        own = torch.stack(model(**given, output_attentions=True).attentions).double()
        block = mixing(model, constants) if gated else replacing(model, constants, heads=[(0, 1), (0, 2)])
        with block, watching(model, [ModalityMass(SPECIAL)]) as watch:
            model(**given)
    found = {name: value for name, value in measured(watch).items() if " 0." in name}
    weights = (
        (weights + own) / 2 if gated else torch.stack([own[:, :, 0], *weights[:, :, 1:3].unbind(2), own[:, :, 3]], 2)
    )
    assert found == pytest.approx(expected_masses(given["input_ids"], (weights[0],)), abs=2e-5)


def test_a_first_image_token_that_a_cache_has_dropped_stays_the_first() -> None:
    """A sliding cache holds four tokens, and then later ones of the image would seem to be the first."""
    torch.manual_seed(0)
    config = llava_config()
    sizes = {name: getattr(config.text_config, name) for name in TEXT} | {"num_hidden_layers": 2}
    config.text_config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=5)
    mistral: Any = transformers.LlavaModel(config).double().eval()
    given = inputs()
    ids = torch.cat([given["input_ids"], torch.tensor([[5, 6, 7], [6, 7, 8]])], dim=1)
    with torch.no_grad(), watching(mistral, "modality_mass") as whole:
        mistral(**{**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, use_cache=False)
    with torch.no_grad(), watching(mistral, "modality_mass") as steps:
        cache = read_cache(mistral(**given, use_cache=True))
        for end in range(given["input_ids"].shape[1] + 1, ids.shape[1] + 1):
            mistral(ids[:, end - 1 : end], attention_mask=torch.ones_like(ids[:, :end]), **behind(cache))
    assert measured(steps) == pytest.approx(measured(whole), abs=1e-9)
    assert max(value for name, value in measured(steps).items() if "text_to_first_image" in name) == 0


def test_sounds_are_a_modality_with_a_first_token() -> None:
    """The towers read mel frames: 40 of them become ten tokens."""
    torch.manual_seed(0)
    tower = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 1, "d_model": 16}
    tower |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 16, "max_source_positions": 100}
    text = TEXT | {"model_type": "qwen2", "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = transformers.Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=IMAGE)
    config._attn_implementation = "eager"
    model = transformers.Qwen2AudioForConditionalGeneration(config).double().eval()
    sound = [IMAGE] * 10
    ids = torch.tensor([[1, 5, *sound, 6, 7, 8], [1, *sound, 9, 2, 5, 6]])
    frames = (torch.arange(200) < 40).expand(2, -1)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 8, 200, generator=generator, dtype=torch.float64) * frames[:, None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": features}
    given["feature_attention_mask"] = frames.long()
    with torch.no_grad():
        attentions = model(**given, output_attentions=True).attentions
        with watching(model, [ModalityMass(SPECIAL)]) as watch:
            model(**given)
    assert len(attentions) == 2
    found = measured(watch)
    assert found == pytest.approx(expected_masses(ids, attentions, "audio"), abs=2e-5)
    assert "text_to_first_audio 1.3" in found


def test_an_encoder_whose_table_is_tied_to_that_of_the_model_reads_images() -> None:
    """Florence-2: the encoder of a BART is passed embeddings, some of them of the image."""
    torch.manual_seed(0)
    widths = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 12, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    stages = {"depths": [1], "embed_dim": [16], "num_heads": [2], "num_groups": [2], "patch_size": [8]}
    convolutions = {"patch_stride": [8], "patch_padding": [0], "patch_prenorm": [False], "window_size": 2}
    config = transformers.Florence2Config(
        text_config={"model_type": "bart", **widths, **heads, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**stages, **convolutions, "projection_dim": 16},
        image_token_id=IMAGE,
    )
    model = transformers.Florence2Model._from_config(config, attn_implementation="eager").double().eval()
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    image = [IMAGE] * (1 + 4)  # the mean over places, and the places
    ids = torch.tensor([[1, *image, 6, 7, 8], [1, *image, 9, 5, 6]])
    given = {"input_ids": ids, "pixel_values": pixels, "decoder_input_ids": torch.tensor([[1, 5, 6]] * 2)}
    with torch.no_grad():
        attentions = model(**given, output_attentions=True).encoder_attentions
        with watching(model, [ModalityMass(SPECIAL)], part="language_model.encoder") as watch:
            model(**given)
    assert measured(watch) == pytest.approx(expected_masses(ids, attentions), abs=2e-5)


def test_padding_on_the_left_changes_nothing(model: Any) -> None:
    alone, padded = inputs(1), inputs(1)
    padded["input_ids"] = torch.nn.functional.pad(padded["input_ids"], (3, 0))
    padded["attention_mask"] = torch.nn.functional.pad(padded["attention_mask"], (3, 0))
    padded["position_ids"] = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    values = []
    for given in (alone, padded):
        with torch.no_grad(), watching(model, [ModalityMass(SPECIAL)]) as watch:
            model(**given)
        values.append(measured(watch))
    assert values[1] == pytest.approx(values[0], abs=1e-6)


def test_a_cached_generation_is_one_forward(model: Any) -> None:
    given = inputs(1)
    more = torch.tensor([[5, 6, 2]])
    with torch.no_grad(), watching(model, [ModalityMass(SPECIAL), "sink_tokens"]) as stepwise:
        cache = cache_of(model(**given, use_cache=True))
        for token in more.T:
            model(input_ids=token[None], **behind(cache), use_cache=True)
    whole = dict(given, input_ids=torch.cat([given["input_ids"], more], dim=1))
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    with torch.no_grad(), watching(model, [ModalityMass(SPECIAL), "sink_tokens"]) as at_once:
        model(**whole)
    assert measured(stepwise) == pytest.approx(measured(at_once), abs=1e-6)
    tokens = [{row[4] for row in watch["sink_tokens"].tokens() if row[0] == "decoder"} for watch in (stepwise, at_once)]
    assert tokens[0] == tokens[1]
    assert -1 not in tokens[0], "the text stack gets embeddings, whose tokens the whole model was passed"


def test_embeddings_of_other_tokens_have_none(model: Any) -> None:
    """Ids of an earlier forward of the whole model are not those of its text stack alone."""
    with torch.no_grad(), watching(model, "sink_tokens") as watch:
        model(**inputs())
        model.language_model(inputs_embeds=torch.randn(2, inputs()["input_ids"].shape[1], 16, dtype=torch.float64))
    tokens = {row[4] for row in watch["sink_tokens"].tokens() if row[0] == "decoder"}
    assert -1 in tokens


def test_a_forward_that_failed_leaves_no_tokens(model: Any) -> None:
    given = inputs()
    with torch.no_grad(), watching(model, "sink_tokens") as watch:
        with pytest.raises(ValueError, match="Image features"):
            model(**given | {"pixel_values": given["pixel_values"][:1]})
        model.language_model(inputs_embeds=torch.randn(*given["input_ids"].shape, 16, dtype=torch.float64))
    assert {row[4] for row in watch["sink_tokens"].tokens() if row[0] == "decoder"} == {-1}


def test_tokens_that_images_and_videos_share_are_of_images() -> None:
    """Molmo2 has one id for both, and its images were measured as videos."""
    known = TokenModalities.of(transformers.LlavaModel(llava_config()), SPECIAL)
    config = llava_config()
    config.video_token_id = config.image_token_index
    shared = TokenModalities.of(transformers.LlavaModel(config), SPECIAL)
    assert shared is not None
    assert shared == known


def test_tokens_of_images_that_a_tokenizer_calls_special_are_of_images(model: Any) -> None:
    modalities = TokenModalities.of(model, (*SPECIAL, IMAGE))
    assert modalities is not None
    found = modalities.classify(torch.tensor([[1, 5, IMAGE, 2]]))[0].tolist()
    assert [MODALITIES[index] for index in found] == ["special", "text", "image", "special"]


def test_a_model_of_text_alone() -> None:
    model = transformers.LlamaModel(transformers.LlamaConfig(**TEXT, num_hidden_layers=1)).eval()
    with (
        pytest.raises(UserError, match=r"modality_mass: expected a model that reads several .*; LlamaModel has none"),
        watching(model, "modality_mass"),
    ):
        pass
    with torch.no_grad(), watching(model, "all") as watch:
        model(input_ids=torch.arange(4, 10)[None])
    assert not watch.frame()["statistic"].str.startswith("modality_mass").any()
    assert watch.left_out == {"modality_mass"}


def test_every_modality_is_a_name() -> None:
    assert MODALITIES[0] == "text"
    assert "modality_mass" in STATISTICS
