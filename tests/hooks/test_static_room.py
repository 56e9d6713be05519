"""Static caches have room behind the tokens, and masks may speak of it: numbers are those of texts on their own."""

from typing import Any

import pandas as pd
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, MistralConfig, MistralModel, StaticCache

from regard.hooks import Watch, watching
from tests.named_cache import behind, cache_of

ROOM, STEPS = 16, (6, 1, 1, 2)
KEYS = ["statistic", "site", "layer", "head", "position"]


def mistral(window: int | None) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "initializer_range": 0.4}
    config = MistralConfig(**sizes, **heads, sliding_window=window, max_position_embeddings=32)
    return MistralModel(config).eval().double()


@pytest.mark.every_value
@pytest.mark.parametrize("window,padding", [(None, 2), (4, 2), (None, 0)])
@torch.no_grad()
def test_a_mask_as_long_as_a_static_cache(window: int | None, padding: int) -> None:
    """A first layer with a window sees some of the tokens alone, and those it does not see are no padding."""
    model = mistral(window)
    ids = torch.randint(5, 40, (2, sum(STEPS)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, ROOM, dtype=torch.long)
    mask[0, :padding] = 0
    positions, cache, start = (mask.cumsum(-1) - 1).clamp(min=0), StaticCache(model.config, max_cache_len=ROOM), 0
    names = ["column_mass", "entropy", "hidden_norm"]
    with watching(model, names) as found:
        for step in STEPS:
            at = slice(start, start + step)
            given = {"attention_mask": mask, "position_ids": positions[:, at], "use_cache": True}
            cache = cache_of(model(ids[:, at], **given, **behind(cache)))
            start += step
    with watching(model, names) as alone:
        model(ids[:1, padding:])
        model(ids[1:])
    assert_same(found, alone)


@torch.no_grad()
def test_no_statistic_has_the_room() -> None:
    model, ids = mistral(None), torch.randint(5, 40, (2, 10), generator=torch.Generator().manual_seed(1))
    cache = StaticCache(model.config, max_cache_len=ROOM)
    with watching(model, "all") as found:
        for part in (ids[:, :8], ids[:, 8:]):
            model(part, use_cache=True, **behind(cache))
    with watching(model, "all") as whole:
        model(ids)
    assert_same(found, whole, leave_out=("spectral_bound", "input_dependence"))  # known of one piece alone


@torch.no_grad()
def test_room_for_as_many_tokens_as_an_encoder_reads_is_no_attention_to_these() -> None:
    """Behind 4 tokens, the next one and 5 free places are as many as it and the 5 of the encoder."""
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = BartConfig(vocab_size=31, d_model=16, encoder_ffn_dim=8, decoder_ffn_dim=8, **layers)
    torch.manual_seed(0)
    model, watches = BartForConditionalGeneration(config).eval().double(), []
    ids = torch.randint(5, 31, (2, 5), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"cache_implementation": "static"}):
        with watching(model, "column_mass") as watch:
            model.generate(ids, min_new_tokens=9, max_new_tokens=9, do_sample=False, num_beams=1, **options)
        watches.append(watch)
    assert_same(*watches)


def assert_same(found: Watch, expected: Watch, leave_out: tuple[str, ...] = ()) -> None:
    frames = [watch.frame().sort_values(KEYS) for watch in (found, expected)]
    frames = [frame[~frame["statistic"].isin(leave_out)].reset_index(drop=True) for frame in frames]
    pd.testing.assert_frame_equal(*frames, check_exact=False, rtol=1e-7, atol=1e-9)
