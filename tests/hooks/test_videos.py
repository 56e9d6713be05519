"""Models that read videos: constants of one video are its own attention, so that they change nothing for it."""

from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

import regard

SIZES: dict[str, Any] = {"image_size": 8, "num_frames": 2, "hidden_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 16, "initializer_range": 0.5}


def videomae() -> Any:
    return transformers.VideoMAEModel(transformers.VideoMAEConfig(**SIZES, patch_size=4, tubelet_size=1))


def vivit() -> Any:
    return transformers.VivitModel(transformers.VivitConfig(**SIZES, tubelet_size=[1, 4, 4]))


@pytest.mark.parametrize("make", [videomae, vivit])
@torch.no_grad()
def test_constants_of_one_video_change_nothing_for_it(make: Any) -> None:
    torch.manual_seed(0)
    model, (one, other) = make().eval(), torch.randn(2, 1, 2, 3, 8, 8)
    expected, changed = model(one)[0], model(other)[0]
    constants = regard.average_attention(model, [{"pixel_values": one}], length=9)
    model.set_attn_implementation("eager")
    for layer, attention in enumerate(model(one, output_attentions=True).attentions):
        matrix = constants.matrices["encoder", layer]
        assert_close(matrix[:, : attention.shape[-1], : attention.shape[-1]], attention[0], check_dtype=False)
    model.set_attn_implementation("sdpa")
    with regard.replacing(model, constants, 1.0):
        assert_close(model(one)[0], expected)
        assert not torch.allclose(model(other)[0], changed, atol=1e-4)
