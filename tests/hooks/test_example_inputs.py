"""Models that take neither a few tokens nor one image alone show their layers in a batch of the user's."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.testing import assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard import UserError, average_attention, replacing
from regard.constants import Constants
from regard.hooks import find_attention_layers

FRAMES, TOKENS = 10, 7
SOUND = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whisper() -> Any:
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = tf.WhisperConfig(
        vocab_size=60, d_model=32, num_mel_bins=8, max_source_positions=FRAMES, max_target_positions=16,
        encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=32,
        decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32, **ends,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2.0)  # attention of random weights hardly depends on what it reads
    return model


def sounds(count: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (count, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_features": noise(count, 8, 2 * FRAMES, seed=seed), "decoder_input_ids": ids}


@contextmanager
def constant_by_hand(model: Any, matrices: Mapping[torch.nn.Module, Tensor]) -> Iterator[None]:
    """Let each attention module of a model multiply the values by a matrix (head, query, key), whose rows sum to 1."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        part = matrices[module][:, : query.shape[2], : key.shape[2]].to(value)
        return (part / part.sum(-1, keepdim=True) @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["by-hand"] = attend
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("by-hand")
        yield
    finally:
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS._local_mapping["by-hand"]


def test_whisper_is_averaged_and_replaced() -> None:
    model = whisper()
    batches = [sounds(3, 1), sounds(2, 2)]
    constants = average_attention(model, batches, length=FRAMES)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = [model(**batch, output_attentions=True) for batch in batches]
    model.set_attn_implementation("sdpa")
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    for (site, layer), matrix in constants.matrices.items():
        weights = torch.cat([output[names[site]][layer] for output in outputs]).mean(0)
        assert_close(matrix[:, : weights.shape[1], : weights.shape[2]].float(), weights, atol=1e-5, rtol=1e-4)

    batch = sounds(2, 3)
    modules = {layer.module: constants.matrices[layer.key] for layer in find_attention_layers(model, batch)}
    assert len(modules) == len(constants.matrices) == 6
    with torch.no_grad():
        with constant_by_hand(model, modules):
            expected = model(**batch).logits
        with replacing(model, constants, example_inputs=sounds(1, 4)):
            assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(model(**batch).logits, expected, atol=1e-2)


def test_padded_sounds_count_their_frames() -> None:
    torch.manual_seed(0)
    config = tf.Wav2Vec2Config(
        **SOUND, conv_dim=[8], conv_stride=[4], conv_kernel=[4], num_conv_pos_embedding_groups=2,
        num_conv_pos_embeddings=4, feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    model: Any = tf.Wav2Vec2Model(config).eval()
    sound, mask = noise(2, 4 * FRAMES), torch.ones(2, 4 * FRAMES, dtype=torch.long)
    mask[1, 4 * 6 :] = 0
    sound = sound * mask
    constants = average_attention(model, [{"input_values": sound, "attention_mask": mask}], length=FRAMES)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(sound, attention_mask=mask, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for layer, found in enumerate(weights):
        total = found[0] + torch.nn.functional.pad(found[1, :, :6, :6], (0, 4, 0, 4))
        count = torch.ones(FRAMES, FRAMES) + torch.nn.functional.pad(torch.ones(6, 6), (0, 4, 0, 4))
        assert_close(constants.matrices["encoder", layer].float(), total / count, atol=1e-5, rtol=1e-4)
    example = {"input_values": sound[:1]}
    modules = {layer.module: constants.matrices[layer.key] for layer in find_attention_layers(model, example)}
    with torch.no_grad():
        with constant_by_hand(model, modules):
            expected = model(sound[:1]).last_hidden_state
        with replacing(model, constants, example_inputs=example):
            assert_close(model(sound[:1]).last_hidden_state, expected, atol=1e-5, rtol=1e-4)


def test_operations_and_single_heads_take_an_example() -> None:
    model, batch = whisper(), sounds(2, 3)
    zeros: dict[str, Any] = {"heads": [("decoder", 1, 2)], "example_inputs": batch}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**batch).logits
        with replacing(model, lambda scores, keep: scores.softmax(-1) * keep, example_inputs=batch, sites="encoder"):
            assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-4)
        attention = model.model.decoder.layers[1].self_attn
        attention.v_proj.weight.data.view(4, 8, 32)[2] = 0
        attention.v_proj.bias.data.view(4, 8)[2] = 0
        without_values = model(**batch).logits
        other = whisper()
        with replacing(other, "zeros", **zeros):
            assert_close(other(**batch).logits, without_values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "example, message",
    [
        (None, "it takes input_features.; pass a batch of its inputs as example_inputs"),
        (3, "^example_inputs: expected a batch of the model's inputs, by argument; got int$"),
        ({"input_ids": torch.ones(1, 3).long()}, "^example_inputs: expected a batch that WhisperFor.* got input_ids: "),
    ],
)
def test_other_examples_are_refused_in_a_line(example: Any, message: str) -> None:
    model = whisper()
    with pytest.raises(UserError, match=message):
        find_attention_layers(model, example)
    with pytest.raises(UserError, match=message), replacing(model, "sigmoid", example_inputs=example):
        pass


VISION = SOUND | {"image_size": 8, "patch_size": 4}


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.CLIPForImageClassification(tf.CLIPConfig(vision_config=VISION, text_config=SOUND)),
        lambda: tf.SiglipForImageClassification(tf.SiglipConfig(vision_config=VISION, text_config=SOUND)),
    ],
    ids=["CLIP", "SigLIP"],
)
def test_the_size_of_an_image_may_stand_in_the_config_of_a_part(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    image = {"pixel_values": noise(2, 3, 8, 8)}
    constants = average_attention(model, [image], length=5)
    assert isinstance(constants, Constants)
    modules = {layer.module: constants.matrices[layer.key] for layer in find_attention_layers(model)}
    assert modules
    with torch.no_grad():
        with constant_by_hand(model, modules):
            expected = model(**image).logits
        with replacing(model, constants):
            assert_close(model(**image).logits, expected, atol=1e-5, rtol=1e-4)


def test_images_in_a_loop_are_refused_as_what_they_are() -> None:
    """A comparison of two shapes ended in PyTorch's error."""
    torch.manual_seed(0)
    config = tf.Qwen3VLConfig().vision_config
    sizes = {"hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2}
    for name, value in (sizes | {"patch_size": 4, "deepstack_visual_indexes": [0]}).items():
        setattr(config, name, value)
    model = tf.Qwen3VLVisionModel(config).eval()
    patches = config.in_channels * config.temporal_patch_size * config.patch_size**2
    images = {"hidden_states": noise(32, patches), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    with pytest.raises(UserError, match="attends several times in one execution, as to images in a loop"):
        find_attention_layers(model, images)
