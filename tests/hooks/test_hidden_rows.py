"""Queries of which a model hides all keys by the lowest number, and reads the mean of what is hidden."""

from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from torch import Tensor

from regard.errors import UserError
from regard.hooks import replacing, watching
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.reductions import REDUCTIONS
from tests.named_cache import behind, cache_of

SIZES: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt_neo() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "window_size": 5, "max_position_embeddings": 64}
    config = tf.GPTNeoConfig(**SIZES, **TOKENS, **sizes, attention_types=[[["global", "local"], 1]])
    model = tf.GPTNeoForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def git() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    vision = SIZES | sizes | {"image_size": 16, "patch_size": 8}
    del vision["vocab_size"], vision["max_position_embeddings"]
    return tf.GitForCausalLM(tf.GitConfig(**SIZES, **TOKENS, **sizes, vision_config=vision)).eval()


def ids(rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(3, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def padded_steps(model: Any) -> list[Tensor]:
    """Return the logits of a prompt, of which one row begins with padding, and of two steps behind it."""
    texts, mask = ids(tokens=11), torch.ones(2, 11, dtype=torch.long)
    cache: dict[str, Any] = {}
    outputs = []
    mask[1, :4] = 0
    for start, end in ((0, 9), (9, 10), (10, 11)):
        output = model(texts[:, start:end], attention_mask=mask[:, :end], use_cache=True, **cache)
        outputs.append(output.logits)
        cache = behind(cache_of(output))
    return outputs


@torch.no_grad()
@pytest.mark.parametrize("make", [git, gpt_neo])
def test_padding_behind_which_a_cache_goes_on_is_as_without_the_block(make: Any) -> None:
    """It read nothing, and GIT lets later tokens see it: their logits were silently others."""
    model = make()
    expected = padded_steps(model)
    with replacing(model, "softmax"):
        torch.testing.assert_close(padded_steps(model), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_tokens_that_attend_to_padding_are_refused() -> None:
    """GIT takes the padding of a text for its image once a cache is filled; the columns were silently left out."""
    model, problem = git(), "cannot observe padding in GitModel: its tokens attend to padding"
    with pytest.raises(UserError, match=problem), watching(model, "column_mass", verify=False):
        padded_steps(model)
    model = gpt_neo()
    expected = padded_steps(model)
    with watching(model, "row_sum", verify=False) as watch:
        torch.testing.assert_close(padded_steps(model), expected, rtol=0, atol=1e-4)
    assert watch.frame("row_sum")["value"].to_numpy() == pytest.approx(1)


@torch.no_grad()
def test_windows_of_a_static_cache_that_hide_all_keys_are_refused_or_as_without_the_block() -> None:
    """GPT-Neo counts the windows of its local layers from the end of the cache: it generated other tokens."""
    model, options = gpt_neo(), {"max_new_tokens": 30, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids(), **options)
    with replacing(model, "softmax"):
        assert torch.equal(model.generate(ids(), **options), expected)
    problem = "cannot observe GPTNeoModel: a token sees no key.*; use no static cache$"
    with pytest.raises(UserError, match=problem), watching(model, "row_sum", verify=False):
        model.generate(ids(), **options)


@pytest.mark.skipif(Version(tf.__version__) < Version("5.21"), reason="XLM generates without a cache")
def test_a_step_that_takes_padding_for_its_own_token_is_refused() -> None:
    """XLM generates without the mask, and counts padding on the left as so many tokens fewer at the end."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64}
    model: Any = tf.XLMWithLMHeadModel(tf.XLMConfig(vocab_size=99, **sizes)).eval()
    given = torch.full((2, 7), 9)
    given[1, :2] = model.config.pad_token_id
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    problem = "cannot observe XLMModel: a token sees no key.*; leave out padding, one sequence per batch$"
    with pytest.raises(UserError, match=problem), watching(model, "row_sum"):
        model.generate(given, attention_mask=(given == 9).long(), **options)


def test_a_sample_of_several_in_one_row_has_the_sum_over_its_tokens() -> None:
    """As samples of their own have, which are summed where they are reduced."""
    name = next(name for name, one in REDUCTIONS.items() if one.source == "hidden" and one.axis == "sample")
    rows = torch.arange(10.0).view(1, 5, 2)
    sample = LayerAccumulator()
    sample.add_hidden_rows(LayerAccumulator(tensors={name: rows}), slice(1, 4))
    assert sample.tensors[name].tolist() == [[2.0 + 4 + 6, 3.0 + 5 + 7]]
