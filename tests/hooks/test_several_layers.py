"""A block with several attention layers (LongCat-Flash): each has the model's own number of it."""

import copy
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import regard
from regard.errors import UserError
from regard.hooks import find_attention_layers, watching
from regard.hooks.average import average_attention
from tests.named_cache import behind, cache_of
from tests.tiny_longcat import HEADS, LAYERS, make_longcat

NAMES = ["column_mass", "first_mass", "value_norm", "qk_cosine", "head_output_norm", "hidden_norm"]


@pytest.fixture(scope="module")
def longcat() -> Any:
    return make_longcat(99)


def ids(rows: int = 2, tokens: int = 12) -> Tensor:
    return torch.randint(3, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def mass_of(watch: Any, layer: int) -> Tensor:
    return torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy()).reshape(HEADS, -1)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_each_attention_has_the_number_of_its_module(longcat: Any, side: str) -> None:
    """The mean weight of each key is that of eager attention, which the model returns in the order of `layer_idx`."""
    real = torch.ones(2, 12, dtype=torch.bool)
    if side != "none":
        real[1, slice(0, 4) if side == "left" else slice(8, 12)] = False
    inputs = {"input_ids": ids() * real, "attention_mask": real.long()}
    expected = longcat(**inputs, output_attentions=True)
    with watching(longcat, ["column_mass", "value_norm"]) as watch:
        actual = longcat(**inputs)
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)
    assert sorted(watch.frame("column_mass")["layer"].unique()) == list(range(LAYERS))
    for layer, weights in enumerate(expected.attentions):
        total, count = torch.zeros(HEADS, 12, dtype=torch.float64), torch.zeros(12)
        for row, tokens in zip(weights, real, strict=True):
            matrix = row[:, tokens][:, :, tokens].double()
            total[:, : matrix.shape[-1]] += matrix.mean(1)
            count[: matrix.shape[-1]] += 1
        torch.testing.assert_close(mass_of(watch, layer), total / count, rtol=1e-4, atol=1e-6)
    assert len(expected.attentions) == LAYERS == longcat.config.num_hidden_layers


@torch.no_grad()
def test_a_cache_continues_both_layers_of_a_block(longcat: Any) -> None:
    with watching(longcat, NAMES) as whole:
        longcat(ids())
    with watching(longcat, NAMES) as cached:
        cache = cache_of(longcat(ids()[:, :7], use_cache=True))
        for token in range(7, 12):
            longcat(ids()[:, token : token + 1], **behind(cache))
    pd.testing.assert_frame_equal(whole.frame(), cached.frame(), rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_hidden_states_are_those_behind_the_last_layer_of_a_block(longcat: Any) -> None:
    with watching(longcat, ["hidden_norm", "column_mass"]) as watch:
        states = longcat(ids(), output_hidden_states=True).hidden_states
    frame = watch.frame("hidden_norm")
    assert sorted(frame["layer"].unique()) == [-1, 1, 3]
    for layer, state in ((-1, states[0]), (1, states[1])):  # behind the last comes a norm
        rows = frame[(frame["layer"] == layer) & frame["position"].notna()]
        norms = torch.tensor(rows["value"].to_numpy())
        torch.testing.assert_close(norms, state.norm(dim=-1).mean(0).double(), rtol=1e-4, atol=1e-6)
    with watching(longcat, ["hidden_norm", "column_mass"], layers=[0, 1]) as watch:
        longcat(ids())
    assert sorted(watch.frame("column_mass")["layer"].unique()) == [0, 1]
    assert sorted(watch.frame("hidden_norm")["layer"].unique()) == [1]
    message = "layers: no block ends with 0, 2, but hidden_norm measures"
    with pytest.raises(UserError, match=message), watching(longcat, ["hidden_norm", "column_mass"], layers=[0, 2]):
        pass


@torch.no_grad()
def test_constants_go_to_one_of_two_layers(longcat: Any, tmp_path: Any) -> None:
    sample, other = ids(1), ids(2)[1:]
    constants = average_attention(longcat, [sample], 12)
    assert constants.layers == [("decoder", layer) for layer in range(LAYERS)]
    paths = [layer.path for layer in find_attention_layers(longcat)]
    assert paths == [f"layers.{block}.self_attn.{number}" for block in (0, 1) for number in (0, 1)]
    with regard.replacing(longcat, constants):
        replaced = longcat(sample).logits
    torch.testing.assert_close(replaced, longcat(sample).logits, rtol=1e-3, atol=1e-3)
    with regard.replacing(longcat, constants, {(1, 2)}), watching(longcat, ["column_mass"], verify=False) as watch:
        replaced = longcat(other).logits
    plain = longcat(other, output_attentions=True)
    before = torch.stack([weights[0].double().mean(1) for weights in plain.attentions])
    expected = constants.matrices["decoder", 1][2].mean(0).double()
    torch.testing.assert_close(mass_of(watch, 1)[2], expected, atol=1e-6, rtol=1e-4)
    for layer, head in ((0, 2), (1, 0), (1, 1), (1, 3)):
        torch.testing.assert_close(mass_of(watch, layer)[head], before[layer, head], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(replaced, plain.logits, atol=1e-3)
    regard.replaced(longcat, constants, {(1, 2)}).save_pretrained(tmp_path)
    loaded = regard.ReplacedModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(loaded(other).logits, replaced, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_operation_goes_to_one_of_two_layers(longcat: Any) -> None:
    with regard.replacing(longcat, "sigmoid-normalised", layers=[2]), watching(longcat, "column_mass") as watch:
        longcat(ids())
    weights = longcat(ids(), output_attentions=True).attentions
    is_same = [torch.allclose(mass_of(watch, n), weights[n].double().mean((0, 2)), atol=1e-5) for n in range(LAYERS)]
    assert is_same == [True, True, False, False]


@pytest.mark.parametrize("numbers", [(0, 0, 1, 1), (0, 2, 1, 3), (None, None, None, None)])
@torch.no_grad()
def test_layers_without_a_number_of_their_own_are_refused(
    longcat: Any, numbers: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [module for layer in longcat.model.layers for module in layer.self_attn]
    for module, number in zip(modules, numbers, strict=True):
        monkeypatch.setattr(module, "layer_idx", number)
    with watching(longcat, "column_mass", verify=False), pytest.raises(UserError, match="several attention layers"):
        longcat(ids(), use_cache=False)


@torch.no_grad()
def test_an_attention_beside_those_that_are_numbered_is_refused(longcat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more in each block, which no number of the model's is for."""
    modules = [layer.self_attn for layer in longcat.model.layers]
    more = [copy.deepcopy(attentions[0]) for attentions in modules]
    for attentions, added in zip(modules, more, strict=True):
        added.layer_idx = None
        attentions.append(added)

        def forward(*args: Any, own: Any = attentions[0].forward, added: Any = added, **options: Any) -> Any:
            added(*args, **options)
            return own(*args, **options)

        monkeypatch.setattr(attentions[0], "forward", forward)
    try:
        with watching(longcat, "column_mass", verify=False), pytest.raises(UserError, match="several attention layers"):
            longcat(ids(), use_cache=False)
    finally:
        for attentions in modules:
            del attentions[-1]
