"""Steps with a cache that are reduced together: the numbers of one forward, whatever comes between them."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks import Watch, module_tree, watching
from regard.hooks import watch as watch_module
from regard.hooks.kept_calls import KeptCalls, can_keep
from tests.named_cache import behind

IDS = torch.randint(5, 99, (2, 12), generator=torch.Generator().manual_seed(1))
NAMES = ["column_mass", "sink_deviation", "entropy", "distance", "key_norm", "hidden_norm", "over_smoothing"]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=99, num_key_value_heads=2, initializer_range=0.3, **sizes)
    return transformers.LlamaForCausalLM(config).double().eval()


def read(model: Any, lengths: list[int]) -> None:
    """Pass the tokens to a model in pieces, with a cache."""
    cache = transformers.DynamicCache(config=model.config)
    for part in IDS.split(lengths, dim=1):
        model(part, **behind(cache), use_cache=True)


def measured(model: Any, lengths: list[int], names: Any = NAMES) -> pd.DataFrame:
    with watching(model, names) as watch:
        read(model, lengths)
    return watch.frame()


@pytest.mark.parametrize("lengths", [[1] * 12, [4, 1, 1, 3, 1, 1, 1], [10, 2], [11, 1]])
def test_pieces_of_any_length_are_one_sequence(lengths: list[int]) -> None:
    model = llama()
    pd.testing.assert_frame_equal(measured(model, lengths), measured(model, [12]), rtol=1e-9, atol=1e-12)


def test_steps_are_reduced_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[int] = []

    def reduce(call: AttentionCall, request: Any) -> dict[str, Tensor]:
        queries.append(call.query.shape[2])
        return own_reduce(call, request)

    own_reduce = watch_module.reduce
    monkeypatch.setattr(watch_module, "reduce", reduce)
    measured(llama(), [5, *[1] * 7])
    assert queries == [5, 7, 7]  # of the prompt of both layers at once


def test_the_next_token_goes_a_shorter_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame of the long way is what is expected."""
    model, long_way = llama(), list[nn.Module]()

    def before_attention(self: Watch, module: nn.Module, call: AttentionCall) -> Any:
        long_way.append(module)
        return own(self, module, call)

    own = Watch.before_attention
    monkeypatch.setattr(Watch, "before_attention", before_attention)
    actual = measured(model, [5, *[1] * 7])
    assert len(long_way) == 2 + 2  # of the prompt, and of the step that is kept first
    monkeypatch.setattr(Watch, "attend_step", lambda *_: None)
    pd.testing.assert_frame_equal(actual, measured(model, [5, *[1] * 7]), rtol=0, atol=0)
    assert len(long_way) == 4 + 16


def test_a_forward_walks_over_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a walk finds does not change from one forward to the next."""
    model, walks = llama(), list[nn.Module]()
    own = module_tree._walk

    def walk(module: nn.Module) -> list[tuple[str, nn.Module]]:
        walks.append(module)
        return own(module)

    with watching(model):
        model(IDS)
        monkeypatch.setattr(module_tree, "_walk", walk)
        read(model, [5, 1, 6])
        assert not walks


def test_what_blocks_write_to_their_inputs_is_not_what_was_returned() -> None:
    model = llama()
    expected = measured(model, [12])

    class Reuses(nn.Module):
        """A block that works on a copy, and then writes to what it was passed."""

        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.self_attn, self.block = block.self_attn, block

        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = self.block(hidden.clone(), *args, **kwargs)
            hidden.zero_()
            return output

    model.model.layers[1] = Reuses(model.model.layers[1])
    actual = measured(model, [5, *[1] * 7])
    is_hidden = expected["statistic"].isin(["hidden_norm", "over_smoothing"])
    pd.testing.assert_frame_equal(actual[is_hidden], expected[is_hidden], rtol=1e-9, atol=1e-12)


def test_a_step_that_fails_leaves_no_sample() -> None:
    model = llama()

    def fail(*_args: Any) -> None:
        raise RuntimeError("on purpose")

    with watching(model, NAMES) as watch:
        cache = transformers.DynamicCache(config=model.config)
        model(IDS[:, :5], **behind(cache))
        model(IDS[:, 5:6], **behind(cache))
        handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(IDS[:, 6:7], **behind(cache))
        handle.remove()
        assert watch.samples == 0
        read(model, [5, *[1] * 7])
    assert watch.samples == 2
    pd.testing.assert_frame_equal(watch.frame(), measured(model, [12]), rtol=1e-9, atol=1e-12)


def test_blocks_that_keep_steps_and_those_that_do_not_may_overlap() -> None:
    model, names = llama(), [*NAMES, "head_output_norm"]
    with watching(model, NAMES) as keeps, watching(model, names) as reads:
        read(model, [5, *[1] * 7])
    pd.testing.assert_frame_equal(keeps.frame(), measured(model, [12]), rtol=1e-9, atol=1e-12)
    pd.testing.assert_frame_equal(reads.frame(), measured(model, [12], names), rtol=1e-9, atol=1e-12)


def stepwise(model: Any, between: Any, monkeypatch: pytest.MonkeyPatch, *, keeps: bool) -> pd.DataFrame:
    with monkeypatch.context() as patch, watching(model, NAMES) as watch:
        if not keeps:
            patch.setattr(watch_module, "can_keep", lambda call: False)
        cache = transformers.DynamicCache(config=model.config)
        model(IDS[:, :5], **behind(cache))
        for step in range(5, 12):
            model(IDS[:, step : step + 1], **behind(cache))
            if step == 8:
                between(cache.layers[1])
    return watch.frame()


def quantize(layer: Any) -> None:
    layer.keys = (layer.keys * 8).round() / 8


def scale(layer: Any) -> None:
    layer.keys.mul_(3)


def test_steps_before_earlier_keys_changed_are_not_those_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cache that quantizes its older keys from the second layer on."""
    model = llama()
    expected, actual = (stepwise(model, quantize, monkeypatch, keeps=keeps) for keeps in (False, True))
    pd.testing.assert_frame_equal(actual, expected, rtol=1e-9, atol=1e-12)


def test_keys_that_are_written_to_in_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    with pytest.raises(UserError, match=r"^cannot observe this cache: its keys or values were written to"):
        stepwise(model, scale, monkeypatch, keeps=True)
    with pytest.raises(UserError, match=r"^cannot observe this cache"):
        reset_at_the_end(model)


def reset_at_the_end(model: Any) -> None:
    with watching(model, NAMES):
        cache = transformers.DynamicCache(config=model.config)
        for part in IDS.split([5, *[1] * 7], dim=1):
            model(part, **behind(cache))
        cache.layers[1].values.zero_()


def test_a_mask_that_its_owner_goes_on_writing_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()

    def run() -> pd.DataFrame:
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[0, :2] = False
        cache = transformers.DynamicCache(config=model.config)
        with watching(model, NAMES) as watch:
            for end in (5, *range(6, 13)):
                start = 0 if end == 5 else end - 1
                model(IDS[:, start:end], attention_mask=mask[:, :end], **behind(cache))
                if end == 9:
                    mask[1, 8] = False
        return watch.frame()

    actual = run()
    monkeypatch.setattr(watch_module, "can_keep", lambda call: False)
    pd.testing.assert_frame_equal(actual, run(), rtol=1e-9, atol=1e-12)


def test_nothing_is_kept_of_inference_mode() -> None:
    model = llama()
    with torch.inference_mode():
        actual = measured(model, [5, *[1] * 7])
        assert not can_keep(call_over(torch.randn(1, 2, 8, 4), 7))
    pd.testing.assert_frame_equal(actual, measured(model, [12]), rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_the_end_of_a_block_reduces_no_steps_of_a_forward_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    cache = transformers.DynamicCache(config=model.config)
    with watching(model, ["column_mass"]) as watch:
        read(model, [12])
        for part in IDS[:, :6].split([4, 1, 1], dim=1):
            model(part, **behind(cache), use_cache=True)
        model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(IDS[:, 6:7], **behind(cache), use_cache=True)
        monkeypatch.setattr(watch_module, "reduce", lambda *_: pytest.fail("a step is reduced"))
    assert watch.samples == 2


def call_over(keys: Tensor, offset: int) -> AttentionCall:
    return AttentionCall(query=torch.ones(1, 2, 1, 4), key=keys, value=keys, scale=0.5, offset=offset)


def test_only_steps_over_all_keys_of_a_tensor_of_their_own_are_kept() -> None:
    keys = torch.randn(1, 2, 8, 4)
    assert can_keep(call_over(keys, 7))
    assert not can_keep(call_over(keys, 6)), "the last key is a later token"
    assert not can_keep(call_over(keys[:, :, :6], 5)), "the tensor is a part of a larger one"
    assert not can_keep(replace(call_over(keys, 7), keep=torch.ones(1, 1, 1, 8, dtype=torch.bool)))


def test_a_step_goes_on_where_its_keys_are_those_before_and_one_more() -> None:
    keys = torch.randn(1, 2, 9, 4)
    first, second, third = (keys[:, :, :end].clone() for end in (7, 8, 9))
    others = torch.randn(1, 2, 8, 4)
    kept = KeptCalls()
    kept.add(call_over(first, 6))
    assert kept.goes_on(call_over(second, 7))
    assert not kept.goes_on(call_over(third, 8)), "a step is missing"
    assert not kept.goes_on(call_over(first, 6)), "a sliding cache"
    assert not kept.goes_on(call_over(others, 7)), "other keys"
    padded = torch.tensor([[False, *[True] * 7]])
    assert not kept.goes_on(replace(call_over(second, 7), key_mask=padded)), "a mask appears"
    kept = KeptCalls()
    kept.add(replace(call_over(first, 6), key_mask=padded[:, :7]))
    assert kept.goes_on(replace(call_over(second, 7), key_mask=padded))
    assert not kept.goes_on(replace(call_over(second, 7), key_mask=~padded)), "another mask"
