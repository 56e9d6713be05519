"""Forwards inside the transforms of `torch.func`, and of no rows."""

from typing import Any

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.autograd import forward_ad

from regard.errors import UserError
from regard.hooks import attention_function, replacing, watching

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def mistral() -> Any:
    """A model whose mask of pairs is a tensor, because of its window."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 4,
    }
    return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, **sizes)).eval()


def states(model: Any) -> Tensor:
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    embeddings: Tensor = model.get_input_embeddings()(ids).detach()
    return embeddings


def test_gradients_of_torch_func_are_watched_as_others_are(mistral: Any) -> None:
    """The mask has no memory there that could be compared: it ended in a traceback."""

    def loss(given: Tensor) -> Tensor:
        value: Tensor = mistral(inputs_embeds=given, use_cache=False).logits.sin().sum()
        return value

    expected = torch.func.grad(loss)(states(mistral))
    with watching(mistral, "column_mass", verify=False) as watch:
        torch.testing.assert_close(torch.func.grad(loss)(states(mistral)), expected)
    with watching(mistral, "column_mass", verify=False) as plain:
        loss(states(mistral))
    pd.testing.assert_frame_equal(watch.frame(), plain.frame())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_map_over_rows_is_refused_in_one_line(mistral: Any) -> None:
    def run(row: Tensor) -> Tensor:
        logits: Tensor = mistral(inputs_embeds=row[None], use_cache=False).logits
        return logits

    problem = "cannot observe MistralAttention inside this transform of torch.func: expected a forward of plain"
    with pytest.raises(UserError, match=problem), watching(mistral, "column_mass", verify=False):
        torch.vmap(run)(states(mistral))


class Nests(nn.Sequential):
    """Makes a nested tensor of its states, as for rows of several lengths, before it encodes them."""

    def forward(self, ids: Tensor) -> Tensor:
        states = self[0](ids)
        output: Tensor = self[1](torch.nested.nested_tensor(list(states), layout=torch.jagged))
        return output


@torch.no_grad()
def test_nested_tensors_and_a_map_over_rows_of_ones_own_module_are_refused_in_one_line() -> None:
    """They ended in an AttributeError, and in PyTorch's words on control flow."""
    layers = nn.Embedding(20, 8), nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    ids, nests, model = torch.arange(12).reshape(2, 6), Nests(*layers).eval(), nn.Sequential(*layers).eval()
    nested = torch.nested.nested_tensor(list(ids), layout=torch.jagged)
    problem = "cannot observe {}: it reads a nested tensor; expected padded rows, and their mask"
    with watching(model, "entropy"), pytest.raises(UserError, match=problem.format("Sequential")):
        model(nested)
    with watching(nests, "entropy"), pytest.raises(UserError, match=problem.format("Nests")):
        nests(ids)
    problem = "cannot observe Sequential inside of torch.vmap; expected a forward of a batch in its place"
    with watching(model, "entropy"), pytest.raises(UserError, match=problem):
        torch.vmap(lambda row: model(row[None]))(ids)


def test_another_attention_inside_a_transform_is_refused_in_one_line(mistral: Any) -> None:
    """It ended in PyTorch's words on autograd.Function."""

    def loss(given: Tensor) -> Tensor:
        value: Tensor = mistral(inputs_embeds=given, use_cache=False).logits.sum()
        return value

    problem = "cannot compute the attention of MistralAttention inside this transform of torch.func: expected"
    with pytest.raises(UserError, match=problem), replacing(mistral, "sigmoid"):
        torch.func.grad(loss)(states(mistral))


def test_tangents_of_forward_mode_are_refused_in_one_line(mistral: Any) -> None:
    """They ended in PyTorch's words on a feature request."""
    given = states(mistral)
    problem = "cannot observe MistralAttention with tangents of torch.autograd.forward_ad; expected"
    with forward_ad.dual_level(), watching(mistral, "column_mass", verify=False):
        dual = forward_ad.make_dual(given, torch.ones_like(given))
        with pytest.raises(UserError, match=problem):
            mistral(inputs_embeds=dual, use_cache=False)


def test_memory_that_ends_inside_a_transform_is_told_as_such(mistral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def loss(given: Tensor) -> Tensor:
        value: Tensor = mistral(inputs_embeds=given, use_cache=False).logits.sum()
        return value

    monkeypatch.setattr(attention_function, "attend", fail)
    with pytest.raises(torch.OutOfMemoryError), watching(mistral, "column_mass", verify=False):
        torch.func.grad(loss)(states(mistral))


@torch.no_grad()
def test_a_batch_of_no_rows_has_no_samples() -> None:
    """GPT-Neo can read it; its matrices were cut into parts of no rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "window_size": 5, "max_position_embeddings": 64}
    config = tf.GPTNeoConfig(**SIZES, **sizes, attention_types=[[["global", "local"], 1]])
    model = tf.GPTNeoForCausalLM(config).eval()
    with watching(model, verify=False) as watch:
        logits = model(torch.zeros(0, 5, dtype=torch.long)).logits
    assert logits.shape == (0, 5, 99)
    assert watch.samples == 0
    assert watch.frame().empty
