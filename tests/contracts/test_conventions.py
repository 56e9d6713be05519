"""What users may hand to a model, in forms that mean the same, is measured the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import regard
from regard import UserError
from regard.statistics import CommonSinkRatio

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
QUERIES_AND_KEYS = ("column_mass", "qk_cosine", "qk_norm")


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(2, 50, (2, 12), generator=torch.Generator().manual_seed(1))


def test_inference_mode_is_as_good_as_no_grad(llama: LlamaForCausalLM, ids: Tensor) -> None:
    real = torch.ones_like(ids)
    real[0, :4] = 0
    tables = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), regard.watching(llama, QUERIES_AND_KEYS) as seen:
            llama(input_ids=ids, attention_mask=real)
        tables.append(seen.frame()["value"].to_numpy())
    assert tables[0] == pytest.approx(tables[1], rel=1e-5, abs=1e-6)


def test_an_additive_mask_hides_as_the_default_does(llama: LlamaForCausalLM, ids: Tensor) -> None:
    future = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 12, 12)
    tables = []
    for mask in (None, future):
        with torch.no_grad(), regard.watching(llama, QUERIES_AND_KEYS) as seen:
            llama(input_ids=ids, attention_mask=mask)
        tables.append(seen.frame()["value"].to_numpy())
    assert tables[0] == pytest.approx(tables[1], rel=1e-5, abs=1e-6)


def test_tokens_are_not_guessed_where_a_pass_gave_embeddings(llama: LlamaForCausalLM, ids: Tensor) -> None:
    with torch.no_grad(), regard.watching(llama, "sink_tokens") as seen:
        llama.generate(
            inputs_embeds=llama.get_input_embeddings()(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert {row[4] for row in seen["sink_tokens"].tokens()} == {-1}  # type: ignore[attr-defined]


def test_tokens_of_the_encoder_are_those_it_read_for_this_decoder() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=16))
    model.eval()
    first, second = torch.full((1, 5), 11), torch.full((1, 5), 22)
    start = torch.zeros(1, 3, dtype=torch.long)
    read_before = model.get_encoder()(input_ids=second)
    with torch.no_grad(), regard.watching(model, "sink_tokens") as seen:
        model(input_ids=first, decoder_input_ids=start)
        model(encoder_outputs=read_before, decoder_input_ids=start)
        read_inside = model.get_encoder()(input_ids=second)
        model(encoder_outputs=read_inside, decoder_input_ids=start)
    rows = seen["sink_tokens"].tokens()  # type: ignore[attr-defined]
    cross = {row[4]: row[5] for row in rows if row[0] == "cross" and row[2] == 0}
    assert set(cross) == {11, -1, 22}


def test_packed_positions_of_one_row_are_those_of_all(llama: LlamaForCausalLM, ids: Tensor) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad(), regard.watching(llama, "entropy") as seen:
        llama(input_ids=ids, position_ids=positions, use_cache=False)
    assert seen.samples == 4


def test_an_adapted_output_projection_is_refused_where_it_is_needed(llama: LlamaForCausalLM, ids: Tensor) -> None:
    class Adapted(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, states: Tensor) -> Tensor:
            return 2 * self.base(states)

    attention = llama.model.layers[0].self_attn
    base = attention.o_proj
    attention.o_proj = Adapted(base)
    try:
        with torch.no_grad(), regard.watching(llama, "entropy"):
            llama(input_ids=ids)
        with (
            pytest.raises(UserError, match="cannot find the output projection"),
            torch.no_grad(),
            regard.watching(llama, "head_output_norm"),
        ):
            llama(input_ids=ids)
    finally:
        attention.o_proj = base


@pytest.mark.parametrize(
    "given,message",
    [
        ({"statistics": None}, "statistics: expected default, all, or names and statistics in a list; got None"),
        ({"layers": (99,)}, r"layers: this model has no layer 99; choose from 0 to \d+, or -1 for the embeddings"),
        ({"layers": -2}, "layers: this model has no layer -2"),
        ({"layers": "all"}, "layers: expected indices of layers, counted from 0, got 'all'"),
    ],
    ids=str,
)
def test_what_cannot_be_watched(given: dict[str, Any], message: str, llama: LlamaForCausalLM) -> None:
    with pytest.raises(UserError, match=message), regard.watching(llama, **given):
        pass


def test_one_layer_may_be_named_alone(llama: LlamaForCausalLM, ids: Tensor) -> None:
    with torch.no_grad(), regard.watching(llama, [CommonSinkRatio({3})], layers=1) as seen:
        llama(input_ids=ids)
    assert set(seen.frame()["layer"]) == {1}
    assert len(seen.frame("common_sink_ratio", layer=[0, 1])) == 1
