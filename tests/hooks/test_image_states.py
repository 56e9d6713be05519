"""Mllama reads images by cross-attention in some of its text layers: their keys are of images, whatever the text is."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.hooks import watching
from regard.statistics import ModalityMass
from tests.named_cache import behind, cache_of

IMAGE, SPECIAL, HEADS, CROSS = 90, (1, 2), 4, 1


@pytest.fixture(scope="module")
def mllama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": HEADS, "intermediate_size": 48, "initializer_range": 0.3}
    text = sizes | {
        "vocab_size": 91, "num_hidden_layers": 3, "num_key_value_heads": 2, "cross_attention_layers": [CROSS],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "attention_heads": HEADS, "num_hidden_layers": 2, "num_global_layers": 1,
        "intermediate_size": 48, "image_size": 16, "patch_size": 8, "max_num_tiles": 2, "vision_output_dim": 64,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]], "initializer_range": 0.3,
    }  # fmt: skip
    config = transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    model = transformers.MllamaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    for parameter in model.model.language_model.parameters():  # gates begin at 0
        if parameter.numel() == 1:
            parameter.data.fill_(0.7)
    return model


def inputs(side: str) -> dict[str, Tensor]:
    """Two texts; the first has two tiles, of which its second token sees one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[1, IMAGE, 5, 6, 2, 7, 8], [1, IMAGE, 9, 5, 6, 7, 8]])
    mask, tiles = torch.ones_like(ids), torch.ones(2, 7, 1, 2)
    tiles[0, 1, 0, 1], tiles[1, :, 0, 1] = 0, 0
    if side != "none":
        place = slice(0, 2) if side == "left" else slice(5, 7)
        mask[1, place] = 0
        ids = ids.masked_fill(mask == 0, 0)
        if side == "left":
            ids[1, 2:4] = torch.tensor([1, IMAGE])
    return {
        "input_ids": ids, "attention_mask": mask, "cross_attention_mask": tiles,
        "pixel_values": torch.randn(2, 1, 2, 3, 16, 16, generator=generator),
        "aspect_ratio_ids": torch.tensor([[2], [1]]), "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]]),
    }  # fmt: skip


def expected_masses(weights: Tensor, ids: Tensor, real: Tensor) -> dict[tuple[str, int], float]:
    """The definition, of one cross layer: all keys are of images, the first one is the first image token."""
    masses: dict[tuple[str, int], list[float]] = {}
    for matrix, tokens, mask in zip(weights, ids, real, strict=True):
        names = ["image" if n == IMAGE else "special" if n in SPECIAL else "text" for n in tokens.tolist()]
        for kind in set(names):
            rows = [place for place, name in enumerate(names) if name == kind and mask[place]]
            for head in range(HEADS) if rows else ():
                shares = matrix[head][rows].double()
                masses.setdefault((f"{kind}_to_image", head), []).append(100 * float(shares.sum(-1).mean()))
                masses.setdefault((f"{kind}_to_first_image", head), []).append(100 * float(shares[:, 0].mean()))
    return {key: sum(values) / len(values) for key, values in masses.items()}


def measured(watch: Any, site: str, layer: int) -> dict[tuple[str, int], float]:
    rows = [row for row in watch.rows() if (row.site, row.layer) == (site, layer)]
    return {(row.statistic.removeprefix("modality_mass_"), row.head): row.value for row in rows}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_cross_attention_is_to_images(mllama: Any, side: str) -> None:
    given = inputs(side)
    attentions = mllama(**given, output_attentions=True).attentions
    with watching(mllama, [ModalityMass(SPECIAL), "column_mass"]) as watch:
        mllama(**given)
    real = given["attention_mask"].bool()
    expected = expected_masses(attentions[CROSS], given["input_ids"], real)
    found = measured(watch, "cross", CROSS)
    found = {key: value for key, value in found.items() if key[0].count("_to_")}
    assert found == pytest.approx(expected, abs=1e-3)
    assert {key[0] for key in found} == {
        f"{a}_to_{b}" for a in ("text", "image", "special") for b in ("image", "first_image")
    }
    assert any("text_to_text" in key[0] for key in measured(watch, "decoder", 0))


@torch.no_grad()
def test_steps_over_a_cache_still_read_images(mllama: Any) -> None:
    given, more = inputs("none"), torch.tensor([[5, 6, 2], [7, 8, 9]])
    mask = given["cross_attention_mask"]
    longer = torch.cat([mask, mask[:, -1:].expand(-1, 3, -1, -1)], dim=1)
    whole = given | {"input_ids": torch.cat([given["input_ids"], more], dim=1), "cross_attention_mask": longer}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    with watching(mllama, [ModalityMass(SPECIAL)]) as at_once:
        mllama(**whole)
    with watching(mllama, [ModalityMass(SPECIAL)]) as stepwise:
        cache = cache_of(mllama(**given, use_cache=True))
        for step, token in enumerate(more.T):
            mllama(
                input_ids=token[:, None], **behind(cache), use_cache=True,
                attention_mask=whole["attention_mask"][:, : 8 + step],
                cross_attention_mask=longer[:, 7 + step : 8 + step],
                position_ids=torch.tensor([[7 + step]]),
            )  # fmt: skip
    for site, layer in (("cross", CROSS), ("decoder", 0), ("decoder", 2)):
        found = measured(stepwise, site, layer)
        assert found == pytest.approx(measured(at_once, site, layer), abs=1e-3)
        assert ("text_to_first_image", 0) in found


@torch.no_grad()
@torch.no_grad()
def test_the_queries_of_an_image_that_comes_later_are_the_later_tokens() -> None:
    """Of a text that was read before, with padding, nothing attends to it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **sizes, **tokens, num_hidden_layers=3, cross_attention_layers=[1], max_position_embeddings=64
    )
    model = transformers.MllamaForCausalLM(config).eval()
    before, later, image = (
        torch.tensor([[0, 0, 6, 7], [1, 5, 6, 7]]),
        torch.tensor([[8, 9, 10], [8, 11, 3]]),
        torch.randn(2, 7, 16),
    )
    mask = torch.cat([(before != 0).long(), torch.ones_like(later)], 1)
    with watching(model, "column_mass") as watch:
        cache = cache_of(model(input_ids=before, attention_mask=mask[:, :4], use_cache=True))
        model(input_ids=later, **behind(cache), attention_mask=mask, cross_attention_states=image, use_cache=True)
    mass = watch.frame("column_mass", site="cross").groupby("head")["value"].sum()
    assert mass.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_text_without_an_image_has_no_row_of_it(mllama: Any) -> None:
    with watching(mllama, [ModalityMass(SPECIAL)]) as watch:
        mllama(input_ids=torch.tensor([[1, 5, 6, 7]]))
    assert {row.site for row in watch.rows()} == {"decoder"}
