"""A watch that is kept after its block: it has its numbers, and holds the model no longer."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from pandas.testing import assert_frame_equal
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import regard
from regard.statistics import ALL

NAMES = [name for name in ALL if name not in ("perturbation_spread", "modality_mass")]
IDS = torch.arange(3, 13)[None]


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def t5() -> Any:
    sizes: dict[str, int] = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 40}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def forward(model: Any) -> None:
    with torch.no_grad():
        model(IDS, **({"labels": IDS} if model.config.is_encoder_decoder else {}))


def generate(model: Any) -> None:
    model.generate(IDS, max_new_tokens=4, pad_token_id=0)


@pytest.mark.parametrize("run", [forward, generate])
@pytest.mark.parametrize("make", [llama, t5])
def test_a_kept_watch_frees_the_model_and_keeps_its_numbers(
    make: Callable[[], Any], run: Callable[[Any], None]
) -> None:
    model = make()
    alive = weakref.ref(model)
    with regard.watching(model, NAMES) as watch:
        run(model)
        watch.close()
        before = watch.frame()
    del model
    gc.collect()
    assert alive() is None
    assert len(before)
    assert_frame_equal(watch.frame(), before)
    assert_frame_equal(copy.deepcopy(watch).frame(), before)
    assert watch.samples == 1


def test_a_text_of_one_token_is_a_sample() -> None:
    with torch.no_grad(), regard.watching(model := llama(), NAMES) as watch:
        model(torch.tensor([[5], [6]]))
    assert watch.samples == 2


def test_a_watch_of_a_failed_block_frees_the_model() -> None:
    model = llama()
    alive = weakref.ref(model)
    with suppress(ZeroDivisionError), regard.watching(model, NAMES) as watch:
        forward(model)
        forward(model)
        raise ZeroDivisionError
    del model
    gc.collect()
    assert alive() is None
    assert watch.samples == 1  # the second one is not finished


def test_a_watch_says_what_was_left_out_after_its_block() -> None:
    model = llama()
    with regard.watching(model, ["hidden_norm", "entropy"]) as watch:
        forward(model)
        next(iter(watch.stacks.values())).lacks_hidden = True
        within = watch.left_out
    assert "hidden_norm" in within
    assert watch.left_out == within
