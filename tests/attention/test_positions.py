"""Positions by hand, and against the implementations of Transformers."""

import math

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from regard.attention.positions import alibi_slopes, rotary_angles, rotate, sinusoidal_table, t5_buckets


@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_rotary_is_that_of_llama(base: float) -> None:
    parameters = {"rope_type": "default", "rope_theta": base}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=parameters)
    query, key = torch.randn(2, 2, 4, 11, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(11)], [*range(5, 16)]])
    cosine, sine = LlamaRotaryEmbedding(config)(query, positions)
    expected = apply_rotary_pos_emb(query, key, cosine, sine)
    angles = rotary_angles(positions, 8, base)
    for x, turned in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, *angles), turned)


def test_rotary_products_depend_on_distances_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1))
    products = []
    for first in (0, 7, 100):
        at = [rotate(x, *rotary_angles(torch.tensor([[first + gap]]), 8)) for x, gap in ((query, 3), (key, 0))]
        products.append((at[0] * at[1]).sum().item())
    assert products[1:] == pytest.approx([products[0]] * 2, rel=1e-4)


def test_rotary_keeps_the_dtype_and_the_angles_are_float32() -> None:
    angles = rotary_angles(torch.arange(3)[None], 4)
    assert [a.dtype for a in angles] == [torch.float32] * 2
    assert rotate(torch.ones(1, 1, 3, 4, dtype=torch.bfloat16), *angles).dtype == torch.bfloat16


def test_the_sinusoidal_table_by_hand() -> None:
    table = sinusoidal_table(3, 4)
    assert table[0].tolist() == [0.0, 1.0, 0.0, 1.0]
    expected = [math.sin(2), math.cos(2), math.sin(2 / 100), math.cos(2 / 100)]
    assert table[2].tolist() == pytest.approx(expected)
    assert sinusoidal_table(3, 5).shape == (3, 5)


def test_slopes_of_eight_heads_are_halves_of_halves() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(2).tolist() == [2.0**-4, 2.0**-8]


def test_buckets_are_those_of_t5() -> None:
    distances = torch.arange(300)
    expected = T5Attention._relative_position_bucket(-distances, bidirectional=False, num_buckets=32, max_distance=128)
    assert t5_buckets(distances).tolist() == expected.tolist()


def test_buckets_by_hand() -> None:
    assert t5_buckets(torch.tensor([-3, 0, 1, 15, 16, 127, 128, 5000])).tolist() == [0, 0, 1, 15, 16, 31, 31, 31]
