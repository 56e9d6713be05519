"""Caches of models with constant heads: which keys they hold, and that what is decoded is what it would be without."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

import regard
from regard.constants import Constants, Head, Origin
from regard.errors import UserError
from regard.hooks.constant_heads import ConstantHeads, ConstantHeadsByCall
from regard.hooks.intercepted import find_intercepted
from regard.hooks.layers import find_attention_layers, model_fingerprint
from regard.models import RegardConfig, RegardForCausalLM
from tests.contracts.conftest import randomised
from tests.contracts.families import BY_NAME, COMMON
from tests.named_cache import behind, cache_of

LENGTH = 24
IDS = torch.randint(3, 99, (3, 14), generator=torch.Generator().manual_seed(1))
PADDING: dict[str, Any] = {
    "none": None,
    "left": torch.arange(14) >= torch.tensor([0, 3, 6])[:, None],
}
WHOLE, STEPS = (slice(0, 14),), (slice(0, 6), slice(6, 9), slice(9, 10), *(slice(i, i + 1) for i in range(10, 14)))
SOME = {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)}
"""Of the first layer the heads of the first group, of the second all."""


def build(name: str) -> Any:
    family = BY_NAME[name]
    config = getattr(transformers, family.config)(**family.settings)
    return randomised(getattr(transformers, family.model)._from_config(config)).double().eval()


def constants_for(model: Any) -> Constants:
    here, generator = find_attention_layers(model), torch.Generator().manual_seed(3)
    matrices = {(p.site, p.layer): torch.rand(p.heads, LENGTH, LENGTH, generator=generator) for p in here}
    return Constants(matrices=matrices, origin=Origin(source="test", model=model_fingerprint(model, here)))


def logits(model: Any, parts: Any, cache: Any, mask: Tensor | None = None) -> Tensor:
    """The logits of a sequence, part by part."""
    found = []
    for part in parts:
        given: dict[str, Any] = {"input_ids": IDS[:, part]}
        if mask is not None:
            given["attention_mask"] = mask[:, : part.stop].long()
            given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, part]
        found.append(model(**given, **behind(cache), use_cache=cache is not None).logits)
    return torch.cat(found, 1) * (1 if mask is None else mask[..., None])


@pytest.mark.every_value
@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["GPT2", "OPT", "GPTNeoX", "Llama", "LlamaMQA", "Mistral", "Qwen3", "Gemma2"])
def test_steps_that_drop_keys_are_the_whole_sequence(name: str, padding: str) -> None:
    model = build(name)
    constants, mask = constants_for(model), PADDING[padding]
    if name == "OPT" and mask is not None:
        return  # it takes no position ids, and makes others of a mask whose past is cut
    with regard.replacing(model, constants, SOME):
        expected = logits(model, WHOLE, None, mask)
        cache = DynamicCache(config=model.config)
        found = logits(model, STEPS, cache, mask)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    first, second = (layer.keys.shape for layer in cache.layers)
    heads = {"LlamaMQA": 1, "GPT2": 2, "OPT": 2, "GPTNeoX": 2}.get(name, 1)
    assert (first[1], first[3]) == (heads, cache.layers[0].values.shape[3])
    assert (second[1], second[3]) == (1, 1)
    assert (first[2], second[2]) == tuple(layer.values.shape[2] for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: None, DynamicCache], ids=["of the model", "without a config"])
def test_a_cache_that_grows_by_layers_drops_keys_too(make: Callable[[], Any]) -> None:
    model = build("Llama")
    fixed = regard.replaced(model, constants_for(model), SOME)
    output = fixed(IDS[:, :6], **behind(make()), use_cache=True)
    assert [layer.keys.shape[1:] for layer in cache_of(output).layers] == [(1, 6, 8), (1, 6, 1)]
    step = fixed(IDS[:, 6:7], **behind(cache_of(output))).logits
    torch.testing.assert_close(step, fixed(IDS[:, :7], use_cache=False).logits[:, -1:])


@pytest.mark.sample(1)
@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_beams_are_those_without_a_cache(name: str, static: bool) -> None:
    model = build(name)
    constants, given = constants_for(model), {"input_ids": IDS[:2, :6], "attention_mask": torch.ones(2, 6).long()}
    options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 3, "do_sample": False, "pad_token_id": 0}
    more = {"cache_implementation": "static", "disable_compile": True} if static else {}
    with regard.replacing(model, constants, SOME):
        expected = model.generate(**given, **options, use_cache=False)
        found = model.generate(**given, **options, **more)
    assert torch.equal(found, expected)
    plain = model.generate(**given, **options, use_cache=False)
    assert torch.equal(model.generate(**given, **options, **more), plain), "the cache of the block serves no more"


@torch.no_grad()
def test_a_static_cache_drops_the_keys_of_layers_without_other_heads() -> None:
    model = build("Llama")
    constants = constants_for(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with regard.replacing(model, constants, SOME):
        expected = logits(model, WHOLE, None)
        for _ in range(2):  # without a mask, which alone would say how much of the room is used
            torch.testing.assert_close(logits(model, STEPS, cache), expected)
            assert [layer.keys.shape[1:] for layer in cache.layers] == [(2, 16, 8), (2, 16, 1)]
            cache.reset()
    torch.testing.assert_close(logits(model, STEPS, cache), logits(model, WHOLE, None))
    assert [layer.keys.shape[1:] for layer in cache.layers] == [(2, 16, 8)] * 2


@torch.no_grad()
def test_caches_are_cut_copied_reordered_and_reset() -> None:
    model = build("Llama")
    fixed = regard.replaced(model, constants_for(model), SOME)
    expected = logits(fixed, WHOLE, None)
    cache = DynamicCache(config=model.config)
    logits(fixed, STEPS[:3], cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 8
    other = copy.deepcopy(cache)
    for held in (cache, other):
        found = torch.cat([fixed(IDS[:, i : i + 1], **behind(held)).logits for i in range(8, 12)], 1)
        torch.testing.assert_close(found, expected[:, 8:12])
    rows = torch.tensor([2, 0])
    cache.batch_select_indices(rows)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 1, 3]))
    rows = rows.repeat_interleave(2)[[2, 0, 1, 3]]
    torch.testing.assert_close(fixed(IDS[rows, 12:13], **behind(cache)).logits, expected[rows, 12:13])
    cache.reset()
    if cache.get_seq_length():
        pytest.skip("a cache of Transformers 5.16 keeps its tokens, as zeros")
    torch.testing.assert_close(logits(model, STEPS, cache), logits(model, WHOLE, None))
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2


@torch.no_grad()
def test_a_quantized_cache_rounds_the_keys_that_are_computed() -> None:
    """Keys of constant heads are zeros in it, so that its scale is that of the others."""
    model = build("Llama").float()
    try:
        plain, quantized = DynamicCache(config=model.config), QuantizedCache("fp8", model.config)
    except ValueError:
        pytest.skip("Transformers 5.16 has no cache of fp8")
    logits(model, STEPS[:1], plain)
    with regard.replacing(model, constants_for(model), SOME):
        logits(model, STEPS[:1], quantized)
    keys, scale = quantized.layers[0]._quantized_keys
    assert not keys[:, 0].float().any()
    computed = plain.layers[0].keys[:, 1]
    torch.testing.assert_close(scale, computed.abs().amax() / 448)
    torch.testing.assert_close(keys[:, 1].float() * scale, computed, rtol=0.07, atol=float(scale))


@torch.no_grad()
@pytest.mark.parametrize("other", [None, {(0, 2), (0, 3), (1, 0)}], ids=["no constant heads", "other constant heads"])
def test_other_models_refuse_a_cache_without_their_keys(other: set[Head] | None) -> None:
    model = build("Llama")
    constants = constants_for(model)
    cache = DynamicCache(config=model.config)
    with regard.replacing(model, constants, SOME):
        logits(model, STEPS[:1], cache)
    reader = model if other is None else regard.replaced(model, constants, other)
    with pytest.raises(UserError, match="holds no keys of the heads that were constant"):
        reader(IDS[:, 6:7], **behind(cache))
    cache.crop(-6)
    torch.testing.assert_close(reader(IDS, **behind(cache)).logits, reader(IDS, use_cache=False).logits)


@torch.no_grad()
@pytest.mark.parametrize("other", [SOME, {(0, 2), (0, 3), (1, 0)}], ids=["these constant heads", "others"])
@pytest.mark.parametrize("name", ["Llama", "LlamaMQA", "GPT2"])
def test_a_cache_rebuilt_from_keys_and_values_is_refused(name: str, other: set[Head]) -> None:
    """Nothing in it says whose keys they are. A copy and a cache of all keys go on."""
    model = build(name)
    constants = constants_for(model)
    cache = DynamicCache(config=model.config)
    with regard.replacing(model, constants, SOME):
        logits(model, STEPS[:1], cache)
        copied = copy.deepcopy(cache)
        expected = model(IDS[:, 6:7], **behind(copied)).logits
    rebuilt = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    with regard.replacing(model, constants, other), pytest.raises(UserError) as refusal:
        model(IDS[:, 6:7], **behind(rebuilt))
    assert str(refusal.value).startswith("this cache was made of the keys and values of another, which has no keys of ")
    assert "copy.deepcopy" in str(refusal.value)
    whole = DynamicCache(config=model.config)
    logits(model, STEPS[:1], whole)
    whole = DynamicCache([(layer.keys, layer.values) for layer in whole.layers])
    with regard.replacing(model, constants, SOME):
        assert model(IDS[:, 6:7], **behind(whole)).logits.shape == expected.shape


@torch.no_grad()
def test_a_cache_with_all_keys_goes_on_with_all() -> None:
    """A prompt that the model read before its heads were replaced: its keys are those of all heads."""
    model = build("Llama")
    constants = constants_for(model)
    cache = DynamicCache(config=model.config)
    logits(model, STEPS[:1], cache)
    with regard.replacing(model, constants, SOME):
        step = model(IDS[:, 6:7], **behind(cache)).logits
    assert [layer.keys.shape[1:] for layer in cache.layers] == [(2, 7, 8)] * 2
    assert step.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("change", ["keys", "values"])
def test_keys_stay_where_the_host_changes_what_the_cache_returns(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    constants, update = constants_for(model), DynamicCache.update

    def changed(cache: Any, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(cache, *given, **options)
        return (keys * 2, values) if change == "keys" else (keys, values + keys)

    monkeypatch.setattr(DynamicCache, "update", changed)
    cache = DynamicCache(config=model.config)
    with regard.replacing(model, constants, SOME):
        found = logits(model, STEPS, cache)
        torch.testing.assert_close(found, logits(model, WHOLE, DynamicCache(config=model.config)))
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 2]


@torch.no_grad()
def test_a_host_that_changes_keys_in_later_forwards_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    constants, update = constants_for(model), DynamicCache.update

    def changed(cache: Any, key: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(cache, key, *given, **options)
        return (keys if key.shape == keys.shape else keys.clone()), values

    monkeypatch.setattr(DynamicCache, "update", changed)
    with regard.replacing(model, constants, SOME), pytest.raises(UserError, match="LlamaAttention changes the keys"):
        logits(model, STEPS, DynamicCache(config=model.config))


@torch.no_grad()
def test_our_decoder_reads_its_keys_and_drops_none_but_all() -> None:
    config = RegardConfig(**BY_NAME["Llama"].settings, max_position_embeddings=64)
    model = randomised(RegardForCausalLM(config)).double().eval()
    with regard.replacing(model, constants_for(model), SOME):
        cache = DynamicCache(config=model.config)
        torch.testing.assert_close(logits(model, STEPS, cache), logits(model, WHOLE, None))
    assert [layer.keys.shape[1:] for layer in cache.layers] == [(2, 14, 8), (1, 14, 1)]


@torch.no_grad()
def test_a_watch_sees_the_heads_whose_keys_are_dropped() -> None:
    model = build("Llama")
    fixed = regard.replaced(model, constants_for(model), SOME)
    with regard.watching(fixed, ["sink_rate", "key_norm", "column_mass"]) as whole:
        logits(fixed, WHOLE, None)
    with regard.watching(fixed, ["sink_rate", "key_norm", "column_mass"]) as steps:
        logits(fixed, STEPS, DynamicCache(config=fixed.config))
    columns = ["statistic", "layer", "head", "position", "value"]
    left, right = (watch.frame()[columns] for watch in (whole, steps))
    assert len(left) == len(right) > 0
    torch.testing.assert_close(*(torch.tensor(frame["value"].to_numpy(float)) for frame in (left, right)))


@torch.no_grad()
def test_keys_that_a_later_layer_attends_to_are_computed() -> None:
    """Gemma3n's last layers have no keys of their own: they attend to those of the last one that has."""
    sizes = {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "head_dim": 8}
    sizes |= {"altup_num_inputs": 2, "num_kv_shared_layers": 1, "num_key_value_heads": 2, "num_hidden_layers": 3}
    kinds = {"activation_sparsity_pattern": [0.0] * 3, "layer_types": ["sliding_attention", *["full_attention"] * 2]}
    common = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**common, **sizes, **kinds))
    model = randomised(model).double().eval()
    lender, reader = (model.model.layers[index].self_attn for index in (1, 2))
    heads = {(1, head) for head in range(4)}
    fixed = regard.replaced(model, constants_for(model), heads)
    keys: dict[str, Tensor] = {}
    for name, one in (("plain", lender), ("fixed", fixed.model.layers[1].self_attn)):
        one.k_norm.register_forward_hook(lambda _module, _given, output, name=name: keys.update({name: output}))
        hidden = torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        one.k_norm(one.k_proj(hidden).view(1, 5, 2, 8))
    torch.testing.assert_close(keys["fixed"], keys["plain"])
    assert keys["plain"].abs().amin() > 0
    assert not hasattr(reader, "k_proj")
    torch.testing.assert_close(logits(fixed, STEPS, DynamicCache(config=model.config)), logits(fixed, WHOLE, None))


@torch.no_grad()
@pytest.mark.every_value
@pytest.mark.parametrize("heads", [SOME, None], ids=["some", "all"])
@pytest.mark.parametrize("name", ["GPT2", "LlamaMQA", "Mistral"])
def test_the_short_way_of_one_token_is_the_long_one(name: str, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read off where a query sees all keys, and not where a window has lost some."""
    model, short = build(name), ConstantHeadsByCall.decode
    taken: list[bool] = []

    def decode(self: ConstantHeadsByCall, *args: Any) -> Tensor | None:
        output = short(self, *args)
        taken.append(output is not None)
        return output

    def write(mask: Tensor | None) -> Tensor:
        """A prompt that may be padded, and steps of which no mask says so."""
        cache = DynamicCache(config=model.config)
        prompt = logits(model, STEPS[:1], cache, mask)
        taken.clear()
        return torch.cat([prompt, logits(model, STEPS[1:], cache)], 1)

    tokens = sum(part.stop - part.start == 1 for part in STEPS)
    times = 0 if name == "Mistral" else 2 * tokens
    for mask in (None, PADDING["left"][:, :6]):
        with regard.replacing(model, constants_for(model), heads):
            monkeypatch.setattr(ConstantHeadsByCall, "decode", decode)
            found = write(mask)
            assert taken.count(True) == times
            monkeypatch.setattr(ConstantHeadsByCall, "decode", lambda *_args: None)
            torch.testing.assert_close(found, write(mask), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_rows_are_not_read_off_behind_keys_that_a_window_has_lost() -> None:
    """Also where no mask says so, as of kernels that take the window itself: six keys are not all of nine tokens."""
    model = build("GPT2")
    with regard.replacing(model, constants_for(model)):
        heads = next(module for module in model.modules() if isinstance(module, ConstantHeads))
        rows = heads.find_rows(5, 6)
        assert rows is not None
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[:, 0]))
        assert heads.find_rows(8, 6) is None


@torch.no_grad()
def test_a_step_whose_query_is_a_part_of_one_projection_reads_the_keys_of_all_heads() -> None:
    """GPT-2 takes queries out of one tensor with keys and values, so that rows of a batch are apart in memory."""
    model = build("GPT2")
    with regard.replacing(model, constants_for(model), {(0, 1)}):
        cache = StaticCache(config=model.config, max_cache_len=16)
        torch.testing.assert_close(logits(model, STEPS, cache), logits(model, WHOLE, None), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("heads", [SOME, None], ids=["some", "all"])
def test_scores_of_half_precision_take_the_long_way(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, short = build("Llama").bfloat16(), ConstantHeadsByCall.decode
    taken: list[bool] = []

    def decode(self: ConstantHeadsByCall, *args: Any) -> Tensor | None:
        output = short(self, *args)
        taken.append(output is not None)
        return output

    found = []
    with regard.replacing(model, constants_for(model), heads):
        for way in (decode, lambda *_args: None):
            monkeypatch.setattr(ConstantHeadsByCall, "decode", way)
            found.append(logits(model, STEPS, DynamicCache(config=model.config)))
    assert taken[:2] == [heads is None, True], "the second layer is all constant"
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)


class Around(transformers.PreTrainedModel):
    """A model whose file has attention of its own beside a model that it holds, so that its products are looked at."""

    config_class = transformers.LlamaConfig
    _supports_sdpa, _can_set_attn_implementation_cached_value = True, False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.held = transformers.LlamaForCausalLM(config)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        return self.held(input_ids, **options)


@torch.no_grad()
def test_the_short_way_is_no_attention_of_a_model_around() -> None:
    """Its products were taken for a call that the model computes itself, and refused. Whole sequences are expected."""
    model: Any = randomised(Around(transformers.LlamaConfig(**COMMON))).double().eval()
    assert find_intercepted(model)
    with regard.replacing(model, constants_for(model), {(0, 0), (0, 2), (1, 1)}):
        expected = logits(model, WHOLE, None)
        torch.testing.assert_close(logits(model, STEPS, DynamicCache(config=model.config)), expected)
