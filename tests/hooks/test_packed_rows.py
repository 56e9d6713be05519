"""Packed sequences of whole models that make the mask of their text stack themselves: each is a sample."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.hooks import watching
from regard.hooks.forward_pass import text_positions

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
LENGTHS = ((8, 12), (13, 7))


@pytest.fixture(scope="module")
def gemma3() -> Any:
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    text = TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    tokens = {"image_token_id": 40, "boi_token_index": 41, "eoi_token_index": 42, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    return model.double().eval()


@pytest.fixture(scope="module")
def qwen2_vl() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 8},
        **{f"{name}_token_id": number for number, name in enumerate(("image", "video", "vision_start"), 40)},
    )
    model = transformers.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    return model.double().eval()


def expected_masses(attentions: tuple[Tensor, ...]) -> dict[tuple[int, int, int], float]:
    """The mean weight of each key of each sequence, and the mean of that over sequences that are so long."""
    masses: dict[tuple[int, int, int], list[float]] = {}
    for layer, weights in enumerate(attentions):
        for row, lengths in enumerate(LENGTHS):
            begin = 0
            for length in lengths:
                block = weights[row, :, begin : begin + length, begin : begin + length]
                torch.testing.assert_close(block.sum(-1), torch.ones_like(block[..., 0]), rtol=0, atol=1e-6)
                for head, of_keys in enumerate(block.mean(1).tolist()):
                    for position, mass in enumerate(of_keys):
                        masses.setdefault((layer, head, position), []).append(mass)
                begin += length
    return {place: sum(values) / len(values) for place, values in masses.items()}


@pytest.mark.parametrize("axes", [0, 3])
def test_each_packed_sequence_is_a_sample(axes: int, request: pytest.FixtureRequest) -> None:
    """Qwen2-VL has three more position ids of each token, of which its rotations are made."""
    model = request.getfixturevalue("qwen2_vl" if axes else "gemma3")
    ids = torch.randint(5, 39, (2, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
    if axes:
        positions = torch.stack([positions] * (1 + axes))
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        attentions = model(**given, output_attentions=True).attentions
        with watching(model, "column_mass") as watch:
            model(**given)
    measured = {(row.layer, row.head, row.position): row.value for row in watch.rows()}
    assert measured == pytest.approx(expected_masses(attentions), abs=1e-6)
    assert watch.samples == 4


def test_positions_that_go_back_within_padding_pack_nothing(gemma3: Any) -> None:
    """`generate` numbers padding 0 or 1: positions go back where it ends, and a row is one sample."""
    ids = torch.randint(5, 39, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        with watching(gemma3, "column_mass") as padded:
            gemma3(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        with watching(gemma3, "column_mass") as alone:
            gemma3(input_ids=ids[:1], use_cache=False)
            gemma3(input_ids=ids[1:, 4:], use_cache=False)
    assert [row.value for row in padded.rows()] == pytest.approx([row.value for row in alone.rows()], abs=1e-6)
    assert padded.samples == 2


def test_a_mask_of_keys_alone_keeps_no_sequences_apart() -> None:
    """LayoutLM masks (batch, 1, 1, key), and reads position ids that begin again as any others."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LayoutLMConfig(**sizes, vocab_size=50, max_2d_position_embeddings=8)
    model = transformers.LayoutLMModel._from_config(config, attn_implementation="eager").double().eval()
    given = {"input_ids": torch.randint(5, 39, (1, 20)), "position_ids": torch.arange(20)[None] % 13}
    with torch.no_grad():
        weights = model(**given, output_attentions=True).attentions[0]
        with watching(model, "column_mass") as watch:
            model(**given)
    assert [row.value for row in watch.rows()] == pytest.approx(weights[0].mean(1).flatten().tolist(), abs=1e-6)
    assert watch.samples == 1


def test_places_of_patches_on_an_image_pack_nothing() -> None:
    """Four images, whose patches have a place on each of two axes."""
    embeddings = torch.zeros(4, 9, 8)
    assert text_positions(torch.zeros(4, 9, 2), embeddings) is None
    assert text_positions(torch.zeros(4, 9, 2), None) is None
    texts = torch.arange(36).view(4, 1, 9)
    assert torch.equal(text_positions(texts, embeddings[:1]), texts[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_row_of_padding_alone_is_no_sample_where_a_model_makes_the_mask_of_pairs(gemma3: Any, mode: Any) -> None:
    """It was refused, as of a mask of pairs that nobody had passed; other models are passed the mask as it is."""
    ids = torch.randint(5, 39, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1] = 0
    with mode():
        with watching(gemma3, "column_mass") as watch:
            gemma3(input_ids=ids, attention_mask=mask, use_cache=False)
        with watching(gemma3, "column_mass") as alone:
            gemma3(input_ids=ids[:1], use_cache=False)
    assert [row.value for row in watch.rows()] == pytest.approx([row.value for row in alone.rows()], abs=1e-6)
    assert watch.samples == 1
