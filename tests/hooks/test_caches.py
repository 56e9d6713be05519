"""The cache of a forward is found by the name of each release of Transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.bert.modeling_bert import BertLayer

from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.caches import CACHE_NAMES, cache_name, count_tokens, is_filled, read_cache
from regard.hooks.forward_pass import ForwardContext
from tests.named_cache import behind, cache_of


def filled(tokens: int = 3) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, tokens, 4), torch.zeros(1, 2, tokens, 4), 0)
    return cache


class Old(nn.Module):
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...


class New(nn.Module):
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


class Open(nn.Module):
    def forward(self, input_ids: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "module, name",
    [
        (Old(), "past_key_values"),
        (New(), "cache"),
        (New(), "past_key_values"),
        *((Open(), name) for name in CACHE_NAMES),
    ],
)
def test_a_forward_behind_a_cache_is_a_later_step_by_either_name(module: nn.Module, name: str) -> None:
    given = {"input_ids": torch.ones(1, 1, dtype=torch.long), name: filled()}
    assert ForwardContext.from_arguments(module, (), given, None).offset == 3


def test_a_cache_by_position() -> None:
    for module in (Old(), New()):
        assert ForwardContext.from_arguments(module, (torch.ones(1, 1).long(), filled(2)), {}, None).offset == 2


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_arguments_and_outputs(name: str) -> None:
    cache, other = filled(), next(other for other in CACHE_NAMES if other != name)
    assert cache_name({name: cache, other: None}) == name
    assert read_cache({name: cache, other: None}) is cache
    assert read_cache(SimpleNamespace(**{name: cache})) is cache
    assert read_cache((cache,)) is None
    assert read_cache(BaseModelOutputWithPast(last_hidden_state=torch.zeros(1))) is None


def test_the_output_of_this_release() -> None:
    cache: Any = filled()
    assert read_cache(BaseModelOutputWithPast(**behind(cache))) is cache


def test_what_else_is_called_cache_is_none() -> None:
    assert read_cache({"cache": {"slen": 3}}) is None
    assert read_cache({"cache": {"slen": 3}, "past_key_values": "tuple"}) == "tuple"


def test_whether_tokens_were_read() -> None:
    assert is_filled(filled())
    assert not is_filled(DynamicCache())
    assert is_filled((0,))
    assert not is_filled(())


def test_a_cache_whose_first_layer_stays_empty_is_filled() -> None:
    """RecurrentGemma of Transformers 5.20 keeps states in its modules, and only keys of later layers in the cache."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), 2)
    assert cache.get_seq_length() == 0
    assert is_filled(cache)
    assert count_tokens(cache) == 6
    assert count_tokens(DynamicCache()) == 0


@pytest.mark.parametrize("first", ["linear_attention", "sliding_attention"])
def test_padding_is_read_from_masks_by_kind_of_layer_in_any_order(first: str) -> None:
    """`generate` with a static cache makes them in the order of a set; behind the cache linear attention has none."""
    padding = torch.tensor([[True, True, True, True], [False, False, True, True]])
    pairs = padding[:, None, None, :] & torch.ones(4, 4, dtype=torch.bool).tril()
    steps: list[tuple[dict[str, Any], int]] = [
        ({"linear_attention": padding[:, :3].long(), "sliding_attention": pairs[:, :, :3]}, 3),
        ({"linear_attention": None, "sliding_attention": pairs[:, :, 3:]}, 1),
    ]
    cache, last = DynamicCache(), None
    for masks, tokens in steps:
        ordered = {first: masks[first], **masks}
        ids = torch.ones(2, tokens, dtype=torch.long)
        last = ForwardContext.from_arguments(Open(), (ids,), {"attention_mask": ordered, **behind(cache)}, last)
        cache = filled(3)
    assert last is not None
    assert last.token_mask is not None
    assert torch.equal(last.token_mask, padding)


class _WithAdaptor(tf.PreTrainedModel):
    """Layers over a sound beside a language model, whose cache the whole is passed, as FunAsrNano's."""

    config_class = tf.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
        adaptor = tf.BertConfig(**sizes, attn_implementation="sdpa")
        self.adaptor = torch.nn.ModuleList([BertLayer(adaptor) for _ in range(2)])
        self.language_model = tf.LlamaModel(config)
        self.post_init()

    def forward(self, input_ids: Any, sound: Any = None, **kwargs: Any) -> Any:
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        if sound is not None:
            for layer in self.adaptor:
                output = layer(sound)
                sound = output[0] if isinstance(output, tuple) else output
            embeddings = torch.cat([sound, embeddings], dim=1)
        return self.language_model(inputs_embeds=embeddings, use_cache=True, **kwargs)


@pytest.mark.parametrize("frames", [0, 6, 9])
@torch.no_grad()
def test_a_stack_hands_the_cache_on_to_the_stack_within_it(frames: int) -> None:
    """Nine frames beside no ids: as many as the cache then holds."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = tf.LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="eager")
    model = _WithAdaptor(config).eval()
    ids = torch.arange(3, 3 + (7 if frames < 9 else 0))[None]
    sound = torch.randn(1, frames, 32) if frames else None
    steps = [torch.tensor([[token]]) for token in (20, 30, 40)]
    weights = {name: [] for name in ("adaptor", "language_model")}  # type: ignore[var-annotated]

    def note(kind: str) -> Any:
        return lambda _module, _args, output: weights[kind].append(output[1].double().mean(-2)[0])

    whole = torch.cat([ids, *steps], dim=1)
    modules = [(model.language_model.layers[0].self_attn, "language_model")]
    handles = [module.register_forward_hook(note(kind)) for module, kind in modules]
    model(whole, sound)
    for handle in handles:
        handle.remove()
    with watching(model, "column_mass") as watch:
        cache = cache_of(model(ids, sound))
        for step in steps:
            model(step, **behind(cache))
    frame = watch.frame("column_mass", layer=0)
    decoder = frame[frame["site"] == "decoder"].sort_values(["head", "position"])["value"]
    expected = weights["language_model"][0].flatten()
    torch.testing.assert_close(torch.tensor(decoder.to_numpy()), expected, atol=1e-5, rtol=1e-4)
    sites = set(watch.frame()["site"])
    assert sites == ({"decoder", "encoder"} if frames else {"decoder"})
    if frames:
        positions = frame[frame["site"] == "encoder"]
        assert positions["position"].max() == frames - 1
        assert set(positions["n"]) == {1}


@torch.no_grad()
def test_a_stack_that_attends_behind_the_cache_of_one_within_it_is_refused() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = tf.LlamaConfig(**sizes, num_attention_heads=4)
    model, ids = _WithAdaptor(config).eval(), torch.arange(3, 10)[None]
    with watching(model):
        cache = cache_of(model(ids))
        with pytest.raises(UserError, match=r"goes on behind the 7 tokens in the cache of another part"):
            model(ids[:, :1], torch.randn(1, 4, 32), **behind(cache))
