"""Towers that read several images in one row, or pad them, and a Q-Former that reads text beside its queries."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.testing import assert_close
from transformers.models.kosmos2_5.configuration_kosmos2_5 import Kosmos2_5VisionConfig
from transformers.models.kosmos2_5.modeling_kosmos2_5 import Kosmos2_5VisionModel

from regard.constants import Constants
from regard.errors import UserError
from regard.hooks import average_attention, find_attention_layers, replaced, replacing, watching

NAMES = ["column_mass", "entropy", "distance", "hidden_norm", "over_smoothing"]
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}


def table(watch: Any) -> pd.DataFrame:
    keys = ["statistic", "layer", "head", "position"]
    return watch.frame().set_index(keys)[["value", "n"]].sort_index()  # type: ignore[no-any-return]


def assert_same(found: Any, expected: Any) -> None:
    pd.testing.assert_frame_equal(table(found), table(expected), rtol=1e-4, atol=1e-5)


def pixels(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@torch.no_grad()
def test_images_in_one_row_are_samples_of_their_own() -> None:
    """Pixtral joins the patches of all images, and keeps images apart by a mask."""
    torch.manual_seed(0)
    config = tf.PixtralVisionConfig(**SIZES, image_size=16, patch_size=4, initializer_range=0.5)
    model = tf.PixtralVisionModel(config).eval()
    sizes = [(16, 16), (8, 12), (12, 4)]
    images = pixels(3, 3, 16, 16)
    with watching(model, NAMES) as together:
        model(images, image_sizes=torch.tensor(sizes))
    with watching(model, NAMES) as alone:
        for image, (height, width) in zip(images, sizes, strict=True):
            model(image[None, :, :height, :width])
    assert together.samples == alone.samples == 3
    assert_same(together, alone)


@torch.no_grad()
def test_what_needs_whole_rows_is_refused_of_images_in_one_row() -> None:
    """It would be of other samples than the rest."""
    config = tf.PixtralVisionConfig(**SIZES, image_size=16, patch_size=4)
    model = tf.PixtralVisionModel(config).eval()
    with (
        watching(model, ["entropy", "first_mass", "spectral_bound"]),
        pytest.raises(UserError, match=r"cannot measure first_mass, spectral_bound of several images .*--batch-size 1"),
    ):
        model(pixels(2, 3, 16, 16), image_sizes=torch.tensor([[16, 16], [16, 16]]))


@torch.no_grad()
def test_padded_patches_are_no_tokens() -> None:
    """Keys that no query sees, whatever the mask of patches is called."""
    torch.manual_seed(0)
    model = tf.Siglip2VisionModel(tf.Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=16)).eval()
    patches, shapes = pixels(2, 12, 48), torch.tensor([[3, 4], [2, 3]])
    mask = (torch.arange(12) < shapes.prod(1)[:, None]).int()
    with watching(model, NAMES) as padded:
        model(patches, pixel_attention_mask=mask, spatial_shapes=shapes)
    with watching(model, NAMES) as alone:
        for one, shape in zip(patches, shapes, strict=True):
            count = int(shape.prod())
            model(one[None, :count], pixel_attention_mask=torch.ones(1, count), spatial_shapes=shape[None])
    assert_same(padded, alone)


@torch.no_grad()
def test_patches_that_one_layer_alone_hides_are_refused() -> None:
    model = tf.Siglip2VisionModel(tf.Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=16)).eval()
    attention: Any = [module for module in model.modules() if type(module).__name__ == "Siglip2Attention"]
    attention[1].register_forward_pre_hook(
        lambda _, args, kw: (args[:1], kw | {"attention_mask": None}), with_kwargs=True
    )
    mask = (torch.arange(12) < torch.tensor([[12], [6]])).int()
    with pytest.raises(UserError, match="its layers hide different keys"), watching(model, "column_mass", verify=False):
        model(pixels(2, 12, 48), pixel_attention_mask=mask, spatial_shapes=torch.tensor([[3, 4], [2, 3]]))


@torch.no_grad()
def test_images_in_one_row_have_no_average() -> None:
    """Positions of Pixtral's patches would be those in a row of several images."""
    config = tf.PixtralVisionConfig(**SIZES, image_size=16, patch_size=4)
    model = tf.PixtralVisionModel(config).eval()
    batch = {"pixel_values": pixels(2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16], [16, 16]])}
    with pytest.raises(UserError, match="expected whole sequences, or single images, one a row"):
        average_attention(model, [batch], length=64)


@torch.no_grad()
def test_a_tower_that_looks_its_function_up_as_an_attribute_is_intercepted() -> None:
    """Kosmos-2.5 finds no attention function that is registered, and always takes its own."""
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 8, "patch_embed_hidden_size": 12, "max_num_patches": 32, "initializer_range": 0.5}
    model = Kosmos2_5VisionModel(Kosmos2_5VisionConfig(**sizes)).eval()
    seen: list[Tensor] = []
    for layer in model.encoder.layer:
        layer.attention.register_forward_hook(lambda _module, _inputs, output: seen.append(output[1]))
    places = torch.cartesian_prod(torch.arange(1.0, 4), torch.arange(1.0, 5)).expand(2, -1, -1)
    patches = torch.cat([places, pixels(2, 12, 12)], dim=-1)
    patches[1, 7:] = 0  # padding
    model(patches)
    whole, short = (torch.stack(seen)[:, row, :, :length, :length].double() for row, length in ((0, 12), (1, 7)))
    total = whole.mean(-2)
    total[..., :7] = (total[..., :7] + short.mean(-2)) / 2
    with watching(model, ["column_mass"]) as watch:
        model(patches)
    frame = watch.frame("column_mass").sort_values(["layer", "head", "position"])
    found = torch.tensor(frame["value"].to_numpy()).reshape(total.shape)
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("words", [1, 7])
@torch.no_grad()
def test_queries_alone_attend_to_images_beside_text(words: int) -> None:
    """InstructBLIP's Q-Former: six queries read the image, and read the text by self-attention."""
    torch.manual_seed(0)
    sizes = SIZES | {"encoder_hidden_size": 12, "vocab_size": 30, "cross_attention_frequency": 1}
    config = tf.InstructBlipQFormerConfig(**sizes, initializer_range=0.5)
    model = tf.InstructBlipQFormerModel._from_config(config, attn_implementation="eager").eval()
    seen: list[Tensor] = []
    for layer in model.encoder.layer:
        layer.crossattention.attention.register_forward_hook(lambda _module, _inputs, output: seen.append(output[1]))
    queries, image, ids = pixels(2, 6, 16), pixels(2, 5, 12), torch.arange(1, 1 + 2 * words).reshape(2, words)
    arguments = {
        "input_ids": ids, "query_embeds": queries, "encoder_hidden_states": image,
        "attention_mask": torch.ones(2, 6 + words), "encoder_attention_mask": torch.ones(2, 5),
    }  # fmt: skip
    model(**arguments)
    expected = torch.stack(seen).double().mean((1, 3))  # layer, head, key
    with watching(model, ["column_mass", "first_mass"]) as watch:
        model(**arguments)
    frame = watch.frame("column_mass", site="cross@encoder").sort_values(["layer", "head", "position"])
    found = torch.tensor(frame["value"].to_numpy()).reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    first = watch.frame("first_mass", site="cross@encoder", position=0).sort_values(["layer", "head"])["value"]
    torch.testing.assert_close(torch.tensor(first.to_numpy()).reshape(2, 2), expected[..., 0], rtol=1e-4, atol=1e-6)


def tiny_detr(num_layers: int) -> Any:
    torch.manual_seed(0)
    backbone = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, out_features=["stage4"])
    sizes: dict[str, Any] = {"d_model": 16, "num_queries": 5, "backbone_config": backbone, "init_std": 0.5}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": num_layers, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 16}
    return tf.DetrForObjectDetection(tf.DetrConfig(**sizes)).eval()


@torch.no_grad()
def test_heads_of_a_model_whose_config_says_no_image_size_are_replaced() -> None:
    """Those of DETR were refused. Constants of one image change nothing in it."""
    model = tiny_detr(2)
    image = {"pixel_values": pixels(1, 3, 64, 96)}
    constants = average_attention(model, [image], length=16)
    sites = {"encoder", "encoder@decoder", "cross@encoder@decoder"}  # its queries see later ones
    assert {site for site, _ in constants.matrices} == sites
    other = {"pixel_values": image["pixel_values"].flip(-1)}
    expected, plain = model(**image).logits, model(**other).logits
    with replacing(model, constants):
        assert_close(model(**image).logits, expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(model(**other).logits, plain, atol=1e-3)


@torch.no_grad()
def test_sites_are_the_same_with_a_head_and_without(tmp_path: Path) -> None:
    """Or runs with one and without would not join."""
    with_head = tiny_detr(1)
    image = {"pixel_values": pixels(1, 3, 64, 96)}
    wrapped = torch.nn.ModuleDict({"inner": with_head})
    wrapped.forward = with_head.forward  # type: ignore[assignment]
    tables = []
    for model in (with_head, with_head.model, wrapped):
        with watching(model, "column_mass", verify=False) as watch:
            model(**image)
        tables.append(watch.frame().set_index(["site", "layer", "head", "position"])["value"].sort_index())
    assert set(tables[0].index.get_level_values("site")) == {"encoder", "encoder@decoder", "cross@encoder@decoder"}
    for other in tables[1:]:
        pd.testing.assert_series_equal(tables[0], other)
    constants = average_attention(with_head.model, [image], length=16)
    loaded = Constants.load(constants.save(tmp_path / "constants.safetensors"))
    image = {"pixel_values": image["pixel_values"].flip(-1)}
    with replacing(with_head, loaded):
        outputs = with_head(**image).logits
    with replacing(with_head, constants):
        assert_close(with_head(**image).logits, outputs)
    assert not torch.allclose(with_head(**image).logits, outputs, atol=1e-3)


def test_a_refusal_names_what_a_model_takes_that_reads_neither_tokens_nor_one_image() -> None:
    """It quoted an error of PyTorch, from tokens that a model of sounds was given."""
    config = tf.Wav2Vec2Config(**SIZES, conv_dim=[8], conv_stride=[4], conv_kernel=[4], num_conv_pos_embedding_groups=2)
    with pytest.raises(UserError, match=r"it does not take a few tokens, or one image, .* \(it takes input_values\)"):
        find_attention_layers(tf.Wav2Vec2Model(config))


def test_a_copy_advises_no_example_inputs_which_it_does_not_take() -> None:
    vision = tf.ViTConfig(**SIZES, image_size=8, patch_size=4)
    text = tf.BertConfig(**SIZES, vocab_size=20, is_decoder=True, add_cross_attention=True)
    both = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    with pytest.raises(UserError, match=r"use regard\.replacing with a batch of its inputs") as told:
        replaced(tf.VisionEncoderDecoderModel(both), "sigmoid")
    assert "where there is that option" not in str(told.value)


class TextBeforeTower(torch.nn.Module):
    """A model that is given its language model before its tower, as Hunyuan-VL, ERNIE-VL, Inkling2 and Kosmos-2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.language_model = tf.LlamaModel(tf.LlamaConfig(**SIZES, vocab_size=20, num_key_value_heads=2))
        self.vision_tower = tf.ViTModel(tf.ViTConfig(**SIZES, image_size=16, patch_size=8))

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Any:
        embeds = self.language_model.get_input_embeddings()(ids)
        if images is not None:
            states = self.vision_tower(images).last_hidden_state.flatten(0, 1)
            embeds = torch.cat([embeds, states.expand(len(ids), -1, -1)], dim=1)
        return self.language_model(inputs_embeds=embeds)


@torch.no_grad()
def test_samples_are_texts_whichever_part_a_model_was_given_first() -> None:
    model, ids = TextBeforeTower().eval(), torch.arange(12).view(2, 6)
    with watching(model, "column_mass") as watch:
        model(ids)
    assert watch.samples == 2
    with watching(model, "column_mass") as watch:
        model(ids, pixels(4, 3, 16, 16))
        model(ids[:1])
        watch.close()
        assert watch.samples == 3
    assert set(watch.frame().query("site != 'decoder'")["n"]) == {4}
