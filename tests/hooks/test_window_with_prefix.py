"""StreamingLLM's window: each query of a trained model sees the last keys, and the first ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard.statistics import FirstMass
from regard.training.sink_monitor import SinkMonitor
from tests.named_cache import behind

SIZES: dict[str, Any] = {
    **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
WINDOW, PREFIX, LENGTH = 5, 2, 16
STREAMING = f"softmax+window={WINDOW}+prefix={PREFIX}"


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double().eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def streaming_mask(starts: Tensor, length: int = LENGTH) -> Tensor:
    """Return which pairs may meet, (batch, 1, query, key), where the sequence of each token begins at `starts`."""
    keep = torch.zeros(len(starts), 1, length, length, dtype=torch.bool)
    for sample, row in enumerate(starts.tolist()):
        for query, start in enumerate(row):
            for key in range(min(start, query), query + 1):
                keep[sample, 0, query, key] = query - key < WINDOW or 0 <= key - start < PREFIX
    return keep


@contextmanager
def eager_under(model: Any, keep: Tensor) -> Iterator[None]:
    """Compute eager attention, T×T, under a mask of pairs instead of the model's own."""

    def eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any) -> Any:
        groups = module.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.mT * scaling).masked_fill(~keep, float("-inf"))
        return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("streaming", eager)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
        "streaming", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    before = model.config._attn_implementation
    model.config._attn_implementation = "streaming"
    yield
    model.config._attn_implementation = before


def test_output_and_gradient_are_those_of_a_dense_mask(model: Any, ids: Tensor) -> None:
    with eager_under(model, streaming_mask(torch.zeros_like(ids))):
        expected = model(ids, labels=ids)
        expected_gradients = torch.autograd.grad(expected.loss, list(model.parameters()))
    plain = model(ids).logits
    with regard.replacing(model, STREAMING):
        output = model(ids, labels=ids)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()))
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-12)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)
    seen = WINDOW + PREFIX
    torch.testing.assert_close(output.logits[:, :seen], plain[:, :seen], rtol=0, atol=1e-12)
    assert (output.logits - plain)[:, seen + 1 :].abs().amax() > 1e-6


def test_writing_with_a_cache_equals_the_whole(model: Any, ids: Tensor) -> None:
    with torch.no_grad(), regard.replacing(model, STREAMING):
        expected = model(ids).logits
        for cache in (transformers.DynamicCache(), transformers.StaticCache(model.config, max_cache_len=20)):
            parts = [
                model(part, **behind(cache), use_cache=True).logits
                for part in (ids[:, :9], *ids[:, 9:13].split(1, dim=1), ids[:, 13:])
            ]
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-12)


def test_an_encoder_sees_as_far_ahead_as_back(ids: Tensor) -> None:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    encoder = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=2)).double().eval()
    near = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < WINDOW

    def weigh(scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~(keep & near), -torch.inf).softmax(-1)

    with torch.no_grad():
        with regard.replacing(encoder, weigh):
            expected = encoder(ids).last_hidden_state
        with regard.replacing(encoder, f"softmax+window={WINDOW}"):
            torch.testing.assert_close(encoder(ids).last_hidden_state, expected, rtol=0, atol=1e-12)


def test_the_oldest_keys_of_a_sliding_cache_are_not_the_first(ids: Tensor) -> None:
    """Its own window of eight has lost the first keys: what is left of the others is no prefix."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    mistral = transformers.MistralForCausalLM(config).double().eval()
    apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    keep = streaming_mask(torch.zeros_like(ids)) & (apart < 8)
    with torch.no_grad():
        with eager_under(mistral, keep):
            expected = mistral(ids).logits
        with regard.replacing(mistral, STREAMING):
            cache = transformers.DynamicCache(config=config)
            parts = [
                mistral(part, **behind(cache), use_cache=True).logits
                for part in (ids[:, :9], *ids[:, 9:13].split(1, dim=1), ids[:, 13:])
            ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-12)


def test_the_first_keys_of_padded_and_packed_rows_are_those_of_their_sequences(model: Any, ids: Tensor) -> None:
    padding = torch.ones_like(ids)
    padding[0, :6] = 0
    starts = torch.tensor([[6], [0]]).expand(-1, LENGTH)
    with torch.no_grad():
        positions = (padding.cumsum(-1) - 1).clamp(min=0)
        with eager_under(model, streaming_mask(starts)):
            expected = model(ids, position_ids=positions).logits
        with regard.replacing(model, STREAMING):
            padded = model(ids, attention_mask=padding, position_ids=positions).logits
            cache = transformers.DynamicCache()
            options = behind(cache) | {"use_cache": True}
            model(ids[:, :13], attention_mask=padding[:, :13], position_ids=positions[:, :13], **options)
            last = model(ids[:, 13:], attention_mask=padding, position_ids=positions[:, 13:], **options).logits
        torch.testing.assert_close(padded[padding.bool()], expected[padding.bool()], rtol=0, atol=1e-12)
        torch.testing.assert_close(last, expected[:, 13:], rtol=0, atol=1e-12)
        positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
        with regard.replacing(model, STREAMING):
            packed = model(ids, position_ids=positions, use_cache=False).logits
            alone = [model(part).logits for part in ids.split([7, 9], dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sigmoid", "elu-normalised", "linear-normalised", "softpick", "off-by-one"])
def test_other_operations_take_the_same_mask(name: str, model: Any, ids: Tensor) -> None:
    with torch.no_grad():
        with regard.replacing(model, f"{name}+window={WINDOW}+prefix={PREFIX}"):
            output = model(ids).logits
        keep = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.double)
        keep.masked_fill_(~streaming_mask(torch.zeros_like(ids)), torch.finfo(torch.double).min)
        with regard.replacing(model, name):
            expected = model(ids, attention_mask=keep).logits
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_what_is_measured_is_the_masked_matrix(model: Any, ids: Tensor) -> None:
    """With queries of zero each query attends alike to all that it sees."""
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.q_proj.weight)
    keep = streaming_mask(torch.zeros_like(ids)).double()
    uniform = keep / keep.sum(-1, keepdim=True)
    with torch.no_grad(), regard.replacing(model, STREAMING):
        with regard.watching(model, [FirstMass(LENGTH)]) as watch:
            model(ids)
        metrics = SinkMonitor(ids, every=1)(model, 0)
    values = watch.frame("first_mass", layer=0, head=0).groupby("position")["value"].mean()
    expected = uniform[0, 0].sum(0) / torch.arange(LENGTH, 0, -1)
    torch.testing.assert_close(torch.tensor(values.to_numpy()), expected, rtol=0, atol=1e-6)
    assert metrics["alpha_uniform"] == pytest.approx(expected[0].item(), abs=1e-6)
    assert metrics["alpha_first"] == pytest.approx(expected[0].item(), abs=1e-6)
