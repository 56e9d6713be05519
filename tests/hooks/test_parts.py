"""Models of several towers: which can be watched alone where one cannot be observed, and what sites they have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from torch import nn

import regard
from experiments.hosts.shrink import make_config, make_model
from regard.errors import UserError
from regard.hooks.layers import find_attention_layers
from tests.contracts.conftest import randomised
from tests.tiny_vision import IMAGE, llava_config


def llava_with_windows() -> Any:
    """A Llava whose vision tower, a Swin, folds windows into the batch."""
    swin = tf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, hidden_act="gelu"
    )
    config = tf.LlavaConfig(vision_config=swin, text_config=llava_config().text_config, image_token_id=IMAGE)
    config.vision_feature_select_strategy = "full"
    return randomised(tf.LlavaModel(config)).eval()


def refusal(model: Any, watched: nn.Module | None = None, **inputs: Any) -> str:
    with (
        torch.no_grad(),
        pytest.raises(UserError) as caught,
        regard.watching(watched or model, "column_mass", verify=False),
    ):
        model(**inputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def test_a_tower_that_cannot_be_observed_is_refused_with_the_path_of_the_other() -> None:
    model = llava_with_windows()
    ids = torch.tensor([[5, *[IMAGE] * 16, 6, 7]])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    wrapped = nn.ModuleDict({"host": nn.ModuleList([model])})
    for watched, path in ((None, "language_model"), (wrapped, "host.0.language_model")):
        message = refusal(model, watched, input_ids=ids, pixel_values=pixels)
        assert message.startswith("cannot observe Swin")
        assert "its layers work on" in message
        assert message.endswith(f"; another part may be measured alone: --part {path} (in Python part=…)")
    expected = model(input_ids=ids, pixel_values=pixels)[0]
    with regard.watching(model.language_model, "column_mass") as inner:
        model(input_ids=ids, pixel_values=pixels)
    for watched, path in ((model, "language_model"), (wrapped, "host.0.language_model")):
        with regard.watching(watched, ["column_mass", "modality_mass"], part=path) as watch:
            torch.testing.assert_close(model(input_ids=ids, pixel_values=pixels)[0], expected)
        assert (watch.samples, set(watch.frame()["site"])) == (1, {"decoder"})
        pd.testing.assert_frame_equal(watch.frame("column_mass"), inner.frame("column_mass"))
        assert "modality_mass_text_to_first_image" in set(watch.frame()["statistic"])
    assert "measured alone" not in refusal(model.vision_tower, pixel_values=pixels)


@torch.no_grad()
def test_one_part_has_the_numbers_that_it_has_among_all() -> None:
    model = randomised(tf.LlavaModel(llava_config())).eval()
    size = model.config.vision_config.image_size
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    tokens = model.get_image_features(pixels).pooler_output[0].shape[0]
    inputs = {"input_ids": torch.tensor([[5, *[IMAGE] * tokens, 6, 7]]), "pixel_values": pixels}
    names = ["column_mass", "modality_mass", "hidden_norm", "sink_tokens"]
    with regard.watching(model, names) as whole:
        model(**inputs)
    with regard.watching(model, names, part="model.language_model") as watch:  # as it is called in a model with a head
        model(**inputs)
    expected = whole.frame().query("site == 'decoder'").reset_index(drop=True)
    assert len(expected) < len(whole.frame())
    pd.testing.assert_frame_equal(watch.frame(), expected)
    for part in ("text", 0):
        wrong: Any = part
        with (
            pytest.raises(UserError, match=f"part: expected one of vision_tower, language_model; got {part!r}"),
            regard.watching(model, part=wrong),
        ):
            pass


@torch.no_grad()
def test_a_decoder_alone_knows_the_padding_of_what_its_cross_attention_reads() -> None:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = tf.BartConfig(vocab_size=40, d_model=16, max_position_embeddings=20, **sizes, **heads)
    model = randomised(tf.BartModel(config)).eval()
    ids, mask = torch.randint(4, 40, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    names = ["sink_rate", "column_mass", "entropy", "value_weighted_mass"]
    with regard.watching(model, names) as whole:
        model(**inputs)
    for part, sites in (("encoder", ["encoder"]), ("decoder", ["cross", "decoder"])):
        with regard.watching(model, names, part=part) as watch:
            model(**inputs)
        everything = whole.frame()
        expected = everything[everything["site"].isin(sites)].reset_index(drop=True)
        pd.testing.assert_frame_equal(watch.frame(), expected, rtol=1e-4, atol=1e-6)


def test_a_part_that_reads_the_cache_of_another_says_whose() -> None:
    """Pi0's action expert and the decoder of DiffusionGemma attend to keys of the part that reads the prompt."""
    ids, random = torch.randint(3, 80, (2, 9)), torch.Generator().manual_seed(0)
    images = {
        "pixel_values": torch.randn(2, 4, 3, 32, 32, generator=random),
        "pixel_attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
        "state": torch.randn(2, 32, generator=random),
        "actions": torch.randn(2, 8, 32, generator=random),
    }
    for kind, name, decoder, encoder, more in (
        ("pi0", "PI0ForConditionalGeneration", "model.dit", "model.vlm.language_model", images),
        (*("diffusion_gemma", "DiffusionGemmaForBlockDiffusion"), "model.decoder", "model.encoder.language_model", {}),
    ):
        model = make_model(name, make_config(kind)).eval()
        names = [type(model.get_submodule(path)).__name__ for path in (decoder, encoder)]
        message = refusal(model, input_ids=ids, **more)
        assert message.startswith(f"cannot observe {names[0]} ({decoder}): it goes on behind the 9 tokens in the cache")
        assert f"of another part, {names[1]} ({encoder}), and attends to keys that are not its own; another" in message
        assert f"--part {encoder}" in message
        assert f"--part {decoder}" not in message
        with torch.no_grad(), regard.watching(model.get_submodule(encoder), "column_mass") as watch:
            model(input_ids=ids, **more)
        assert watch.samples == 2


def siglip() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {**sizes, "vocab_size": 40, "max_position_embeddings": 8, "projection_size": 16}
    config = tf.SiglipConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8})
    torch.manual_seed(0)
    return tf.SiglipModel(config).eval()


def test_layers_of_two_encoders_have_names_of_their_own() -> None:
    inputs = {"input_ids": torch.arange(4, 16).view(2, 6), "pixel_values": torch.randn(2, 3, 16, 16)}
    found = [layer.key for layer in find_attention_layers(siglip(), inputs)]
    assert found == [(site, layer) for site in ("encoder", "encoder@text_model") for layer in range(2)]


@torch.no_grad()
def test_two_encoders_do_not_share_a_site_whichever_is_read_first() -> None:
    """SigLIP has its text encoder first; images are often encoded batch by batch before any text is."""
    model = siglip()
    images, ids = torch.randn(6, 3, 16, 16), torch.arange(4, 16).view(2, 6)

    def measure(*forwards: Callable[[], object]) -> pd.DataFrame:
        with regard.watching(model, "column_mass") as watch:
            for forward in forwards:
                forward()
        return watch.frame()

    of_images = measure(lambda: model.get_image_features(images))
    of_texts = measure(lambda: model.get_text_features(ids))
    assert set(of_images["site"]) == set(of_texts["site"]) == {"encoder"}
    batches = [partial(model.get_image_features, batch) for batch in images.split(2)]
    found = measure(*batches, lambda: model.get_text_features(ids), lambda: model(ids, images[:2]))
    assert set(found["site"]) == {"encoder", "encoder@text_model"}
    assert set(found.query("site == 'encoder'")["n"]) == {8}
    twice = found.query("site == 'encoder@text_model'")
    assert set(twice["n"]) == {4}
    assert_allclose(twice["value"], of_texts["value"], rtol=1e-4)


def test_a_model_of_one_part_has_no_other() -> None:
    """Expected was one of ''."""
    config = tf.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    with (
        pytest.raises(UserError, match=r"^part: expected none of BertModel, which is one part; got 'encoder'$"),
        regard.watching(tf.BertModel(config), "entropy", part="encoder"),
    ):
        pass
