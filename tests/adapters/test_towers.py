"""Models with a tower for sounds or images: their texts are read by the layers that read tokens."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

import regard

SOUND, WIDTH = 30, 16


def make_model() -> Any:
    """A model whose tower has the width of its text part, and as many layers, as in Qwen2-Audio and InternVL3-1B."""
    torch.manual_seed(0)
    tower = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 4, "d_model": WIDTH}
    tower |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 16, "max_source_positions": 100}
    text = {"model_type": "qwen2", "vocab_size": 40, "hidden_size": WIDTH, "intermediate_size": 16}
    text |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=SOUND)
    return transformers.Qwen2AudioForConditionalGeneration(config).double().eval()


def make_rows(*, sound: bool) -> dict[str, Tensor]:
    """Two rows of fifteen tokens, of which ten stand for a sound or are words."""
    middle = [SOUND] * 10 if sound else list(range(12, 22))
    ids = torch.tensor([[1, 5, *middle, 6, 7, 8], [1, *middle, 9, 2, 5, 6]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sound:
        frames = (torch.arange(200) < 40).expand(2, -1)
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(2, 8, 200, generator=generator, dtype=torch.float64) * frames[:, None]
        rows |= {"input_features": features, "feature_attention_mask": frames.long()}
    return rows


@pytest.mark.parametrize("sound", [False, True])
def test_queries_are_read_in_the_text_part_where_a_tower_has_as_many_layers(sound: bool) -> None:
    rows, model = make_rows(sound=sound), make_model()
    with torch.no_grad():
        states = model(**rows, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1].mean(1), states[2].mean(1)], -1)  # after a quarter and half of four layers
    assert_close(regard.SharedAdapters(model, r=2).query_vectors(**rows), expected)
