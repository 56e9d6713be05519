"""Blocks that pass hidden states as (token, batch, width): XLNet and FSMT."""

from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor

import regard
from regard.hooks import average_attention, watching
from tests.named_cache import behind, cache_of


@pytest.fixture(scope="module")
def xlnet() -> Any:
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=48, initializer_range=0.3)
    return transformers.XLNetModel(config).eval()


@pytest.mark.parametrize("rows, tokens", [(2, 9), (9, 9), (9, 2), (1, 9)])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_hidden_states_are_those_of_tokens(xlnet: Any, rows: int, tokens: int, side: str) -> None:
    """Also where there are as many samples as tokens, so that their shape says nothing."""
    ids = torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))
    real = torch.ones(rows, tokens, dtype=torch.bool)
    if side != "none":
        real[0, 0 if side == "left" else -1] = False
    inputs = {"input_ids": ids, "attention_mask": real.float()}
    states = xlnet(**inputs, output_hidden_states=True).hidden_states
    with watching(xlnet, ["hidden_norm", "column_mass"]) as watch:
        xlnet(**inputs)
    frame = watch.frame("hidden_norm")
    for layer, state in enumerate(states, start=-1):
        total, count = torch.zeros(tokens, dtype=torch.float64), torch.zeros(tokens)
        for row, mask in zip(state.norm(dim=-1).double(), real, strict=True):
            length = int(mask.sum())
            total[:length] += row[mask]
            count[:length] += 1
        rows_of_layer = frame[(frame["layer"] == layer) & frame["position"].notna()].sort_values("position")
        norms = torch.tensor(rows_of_layer["value"].to_numpy())
        is_measured = count > 0
        torch.testing.assert_close(norms, (total / count)[is_measured], rtol=1e-4, atol=1e-6)


# -- FSMT, whose encoder and decoder are no models of Transformers themselves -----------------------------------------

HEADS, SITES = 4, {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


@pytest.fixture(scope="module")
def fsmt() -> Any:
    torch.manual_seed(0)
    config = transformers.FSMTConfig(
        langs=["en", "de"], src_vocab_size=99, tgt_vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=64, init_std=0.4, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return transformers.FSMTForConditionalGeneration(config).eval()


def fsmt_inputs(rows: int, tokens: int, targets: int, *, is_padded: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, 99, (rows, number), generator=generator) for number in (tokens, targets))
    if is_padded:
        source[0, -2:], target[-1, -1:] = 1, 1
    mask = (source != 1).long()
    return {"input_ids": source, "decoder_input_ids": target, "attention_mask": mask, "use_cache": False}


def mean_mass(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The mean weight of each key over real queries and the samples that have it."""
    total, count = torch.zeros(weights.shape[1], keys.shape[1], dtype=torch.float64), torch.zeros(keys.shape[1])
    for matrix, rows, columns in zip(weights, queries, keys, strict=True):
        length = int(columns.sum())
        total[:, :length] += matrix[:, rows][:, :, columns].double().mean(1)
        count[:length] += 1
    return (total / count)[:, count > 0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("rows, tokens, targets", [(2, 9, 5), (5, 5, 5), (6, 3, 6)])
@torch.no_grad()
def test_both_stacks_of_fsmt_are_those_of_its_weights(
    fsmt: Any, rows: int, tokens: int, targets: int, is_padded: bool
) -> None:
    inputs = fsmt_inputs(rows, tokens, targets, is_padded=is_padded)
    expected = fsmt(**inputs, output_attentions=True, output_hidden_states=True)
    real = {"encoder": inputs["input_ids"] != 1, "decoder": inputs["decoder_input_ids"] != 1}
    with watching(fsmt, ["column_mass", "hidden_norm"]) as watch:
        logits = fsmt(**inputs).logits
    torch.testing.assert_close(logits[real["decoder"]], expected.logits[real["decoder"]], rtol=1e-4, atol=1e-4)
    assert set(watch.frame()["site"]) == set(SITES)
    for site, name in SITES.items():
        queries = real["encoder" if site == "encoder" else "decoder"]
        keys = real["decoder" if site == "decoder" else "encoder"]
        for layer, weights in enumerate(expected[name]):
            frame = watch.frame("column_mass", layer=layer)
            frame = frame[frame["site"] == site].sort_values(["head", "position"])
            mass = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1)
            torch.testing.assert_close(mass, mean_mass(weights, queries, keys), rtol=1e-4, atol=1e-5)
    for site in ("encoder", "decoder"):
        for layer, states in enumerate(expected[f"{site}_hidden_states"], start=-1):
            frame = watch.frame("hidden_norm", layer=layer)
            frame = frame[(frame["site"] == site) & frame["position"].notna()].sort_values("position")
            norms = mean_mass(states.norm(dim=-1)[:, None, None], torch.ones(rows, 1, dtype=torch.bool), real[site])
            torch.testing.assert_close(torch.tensor(frame["value"].to_numpy()), norms[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_steps_over_a_cache_of_fsmt_are_one_sample(fsmt: Any) -> None:
    inputs = fsmt_inputs(2, 9, 5)
    with watching(fsmt, ["column_mass", "hidden_norm", "first_mass"]) as whole:
        fsmt(**inputs)
    with watching(fsmt, ["column_mass", "hidden_norm", "first_mass"]) as cached:
        encoded, cache = fsmt.model.encoder(inputs["input_ids"], inputs["attention_mask"]), None
        for token in inputs["decoder_input_ids"].split(1, dim=1):
            cache = cache_of(fsmt(
                input_ids=None, encoder_outputs=encoded, attention_mask=inputs["attention_mask"],
                decoder_input_ids=token, **behind(cache), use_cache=True,
            ))  # fmt: skip
    pd.testing.assert_frame_equal(whole.frame(), cached.frame(), rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_averages_of_fsmt_take_the_place_of_its_attention(fsmt: Any) -> None:
    inputs = fsmt_inputs(1, 9, 5)
    plain = fsmt(**inputs).logits
    batch = {name: value for name, value in inputs.items() if name != "use_cache"}
    fsmt.config.use_cache = False  # or a text as a whole would see its later tokens
    constants = average_attention(fsmt, [batch], 9)
    fsmt.config.use_cache = True
    assert set(constants.layers) == {(site, layer) for site in SITES for layer in (0, 1)}
    with regard.replacing(fsmt, constants):
        torch.testing.assert_close(fsmt(**inputs).logits, plain, rtol=1e-3, atol=1e-4)
    other = inputs | {"input_ids": inputs["input_ids"].flip(1)}
    with regard.replacing(fsmt, constants):
        replaced = fsmt(**other).logits
    assert not torch.allclose(replaced, fsmt(**other).logits, atol=1e-3)
