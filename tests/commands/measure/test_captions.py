"""`regard measure` on decoders of text behind an encoder of images or sounds, whose processor is saved in parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import regard
from regard import models
from regard.commands.measure.result import MeasureResult
from regard.errors import UserError
from tests.tiny_audio import RATE, make_tones, make_wav2vec2
from tests.tiny_vision import SIZES, WORDS, make_captioner, make_clip, make_photos, make_tokenizer


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("decoder", ["roberta", "gpt2"])
def test_an_image_processor_and_a_tokenizer_serve_a_captioner(
    decoder: str, regard: Callable[..., Any], tmp_path: Path
) -> None:
    """Mean weights are those of eager attention; the decoder reads its start, `</s>`, and the prompt."""
    make_captioner(tmp_path / "model", decoder)
    photos = make_photos(tmp_path / "photos")
    options = ("--prompt", "Count the birds", "--statistics", "column_mass,sink_tokens", "--out", "run")
    ended = regard("measure", tmp_path / "model", "--images", photos, *options)
    assert (ended.code, ended.err) == (0, "")
    result = MeasureResult.load(tmp_path / "run")
    assert result.metadata["data"]["prompt"] == "Count the birds"
    assert result.metadata["data"]["decoder_start_token"] == {"id": 2, "token": "</s>"}
    model = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "model", attn_implementation="eager")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    images = [Image.open(path).convert("RGB") for path in sorted(photos.glob("*.png"))]
    ids = torch.tensor([[2, *(WORDS.index(word) for word in ("Count", "the", "birds"))]] * len(images))
    with torch.no_grad():
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        output = model.eval()(pixel_values=pixels, decoder_input_ids=ids, output_attentions=True)
    for site in ("encoder", "decoder", "cross"):
        weights = getattr(output, "cross_attentions" if site == "cross" else f"{site}_attentions")
        frame = result.frame("column_mass", site=site).dropna(subset=["layer", "head", "position"])
        assert len(frame) == sum(part[0, :, 0].numel() for part in weights)
        for row in frame.itertuples():
            column = weights[int(row.layer)][:, int(row.head), :, int(row.position)]
            assert row.value == pytest.approx(float(column.mean()), rel=1e-4), site


def test_a_processor_that_makes_labels_is_not_asked_for_them(tmp_path: Path) -> None:
    """TrOCR's tokens are labels to it: as many as the tokenizer makes, not as many as the decoder reads."""
    make_captioner(tmp_path / "model")
    loaded = models.load(str(tmp_path / "model"), images=True)
    assert loaded.tokenizer is not None
    image = Image.new("RGB", (16, 16), (9, 99, 199))
    apart = regard.measure(loaded, images=[image], prompt="Count the birds", statistics="entropy")
    for kind in ("TrOCR", "Donut", "Nougat"):
        processor = getattr(transformers, f"{kind}Processor")(loaded.processor, make_tokenizer(names_image=False))
        joined = regard.measure(loaded.model, processor, images=[image], prompt="Count the birds", statistics="entropy")
        assert joined.table.equals(apart.table)
    sites = regard.look_at(loaded, image=image)["sites"]
    assert [site["tokens"] for site in sites if site["site"] == "decoder"] == [["</s>", "Describe", "the", "image."]]


def test_a_feature_extractor_and_a_tokenizer_serve_a_decoder_of_sounds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_wav2vec2(tmp_path / "speech")
    encoder = transformers.AutoConfig.from_pretrained(tmp_path / "speech")
    decoder = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=len(WORDS), n_positions=32, add_cross_attention=True
    )
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    transformers.SpeechEncoderDecoderModel(config).save_pretrained(tmp_path / "model")
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True, sampling_rate=RATE).save_pretrained(
        tmp_path / "model"
    )
    make_tokenizer(names_image=False).save_pretrained(tmp_path / "model")
    sounds = sorted(make_tones(tmp_path / "tones").glob("*.wav"))
    result = regard.measure(str(tmp_path / "model"), audio=sounds, prompt="Count birds", statistics="column_mass")
    assert set(result.table["site"]) == {"encoder", "decoder", "cross"}
    assert result.frame("column_mass", site="decoder")["position"].max() == 2, "<s> Count birds"
    assert result.metadata["data"]["prompt"] == "Count birds"


def test_a_model_of_depth_without_a_headless_class_loads_by_its_folder(tmp_path: Path) -> None:
    backbone = transformers.Dinov2Config(
        **SIZES, num_hidden_layers=2, out_indices=[1, 2], apply_layernorm=False, reshape_hidden_states=False
    )
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=4, reassemble_hidden_size=16, reassemble_factors=[4, 2],
        neck_hidden_sizes=[8, 8], fusion_hidden_size=8, head_hidden_size=8, head_in_index=-1,
    )  # fmt: skip
    transformers.DepthAnythingForDepthEstimation(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    result = regard.measure(str(tmp_path), images=[Image.new("RGB", (16, 16))], statistics="column_mass")
    assert len(result.frame("column_mass").dropna(subset=["layer", "head", "position"])) == 2 * 4 * 17


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind, limit", [("clip", 32), ("roberta", 33), ("gpt2", 32)])
def test_a_prompt_longer_than_the_positions_of_a_model(kind: str, limit: int, tmp_path: Path) -> None:
    """RoBERTa has a row for padding, id 0, before the first position."""
    if kind == "clip":
        make_clip(tmp_path)
    else:
        make_captioner(tmp_path, kind)
    images, longest = [Image.new("RGB", (16, 16))], "birds " * (limit - 1)
    regard.measure(str(tmp_path), images=images, prompt=longest, statistics="entropy")
    expected = rf"prompt: expected at most {limit} tokens .*has positions for; got {limit + 1}"
    with pytest.raises(UserError, match=expected):
        regard.measure(str(tmp_path), images=images, prompt=f"{longest} birds", statistics="entropy")
    with pytest.raises(UserError, match=expected):
        regard.look(str(tmp_path), image=images[0], prompt=f"{longest} birds")
