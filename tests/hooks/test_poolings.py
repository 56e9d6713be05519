"""Attention in no stack of layers, which a model of Transformers may compute outside of all forwards."""

import torch
import transformers as tf

from regard.hooks import watching
from regard.hooks.modules import find_outside

IMAGE, QUERIES = 90, 8


def aria() -> tf.AriaForConditionalGeneration:
    """A model whose projector attends to an image by `nn.MultiheadAttention`."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    text = tf.AriaTextConfig(
        **sizes, vocab_size=100, intermediate_size=48, num_key_value_heads=4, moe_num_experts=4, moe_topk=2
    )
    vision = {**sizes, "model_type": "idefics3_vision", "intermediate_size": 48, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = tf.AriaForConditionalGeneration(
        tf.AriaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=IMAGE,
            projector_patch_to_query_dict={16: QUERIES},
            vision_feature_layer=-1,
        )
    )
    model.set_experts_implementation("eager")
    return model.eval()


@torch.no_grad()
def test_generate_calls_a_projector_outside_of_the_forward() -> None:
    """It made the features of images itself, where the projector was taken for a layer and refused."""
    model = aria()
    assert find_outside(model) == ["model.multi_modal_projector.cross_attn"]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    ids = torch.randint(3, IMAGE, (2, 12), generator=generator)
    ids[:, 1 : 1 + QUERIES] = IMAGE
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(ids, pixel_values=pixels, **options)
    with watching(model, "column_mass") as seen:
        assert torch.equal(model.generate(ids, pixel_values=pixels, **options), alone)
    with watching(model, "column_mass") as whole:
        model(alone[:, :-1], pixel_values=pixels)
    keys = ["site", "layer", "head", "position"]
    both = [watch.frame("column_mass").sort_values(keys) for watch in (seen, whole)]
    assert set(both[0]["site"]) == {"encoder", "decoder"}
    masses = [torch.tensor(frame["value"].to_numpy(dtype=float)) for frame in both]
    torch.testing.assert_close(masses[0], masses[1], rtol=1e-4, atol=1e-5)
