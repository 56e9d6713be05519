"""Layers of one shape are one observation for the statistics that take it so, with the numbers of single layers."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
import transformers

import regard
from regard.hooks import joined_layers
from regard.statistics import ALL, STATISTICS, Observation, PerLayer, SampleValues, StatisticInfo

NAMES = [name for name in ALL if name != "modality_mass"]


def make_model(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    kinds: dict[str, Any] = {
        "bert": transformers.BertModel,
        "llama": transformers.LlamaModel,
        "gemma3": transformers.Gemma3TextModel,
    }
    torch.manual_seed(0)
    return kinds[kind](kinds[kind].config_class(vocab_size=99, **{**sizes, **options})).eval()


def watch(model: Any, statistics: Any, *lengths: int) -> Any:
    """Watch forwards over batches of two rows, the second of which ends three tokens before the first."""
    generator = torch.Generator().manual_seed(0)
    with regard.watching(model, statistics) as watch, torch.no_grad():
        for length in lengths:
            mask = torch.ones(2, length, dtype=torch.long)
            mask[1, -3:] = 0
            model(input_ids=torch.randint(1, 99, (2, length), generator=generator), attention_mask=mask)
    return watch


def assert_same(actual: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["bert", "llama", "gemma3"])
def test_the_statistics_of_joined_layers_are_those_of_single_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(kind, **({"head_dim": 8, "sliding_window": 8} if kind == "gemma3" else {}))
    joined = watch(model, NAMES, 16, 12).frame()
    monkeypatch.setitem(joined_layers.MAX_ENTRIES, "cpu", 0)
    assert_same(joined, watch(model, NAMES, 16, 12).frame())


def test_layers_with_a_learned_key_are_not_joined_with_others() -> None:
    """The query of such a key counts in the attention that goes to no token."""
    length, tensors = torch.tensor([2, 2]), {"column_mass": torch.ones(2, 1, 2)}
    parts = [
        Observation(
            site="decoder", layer=number, causal=True, length=length, keys=length, virtual_key=key, tensors=tensors
        )
        for number, key in enumerate([True, False, True])
    ]
    found = {layer.layers: layer.virtual_key for layer in joined_layers.join_layers(parts)}
    assert found == {(0, 2): True, (1,): False}


def test_layers_are_joined_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of 2 × 4 heads × 16 keys fit by two; a longer batch comes layer by layer. Keys stay the same."""
    seen: list[tuple[int, ...]] = []

    class Spy(regard.statistics.ColumnMass):
        def update(self, layers: Any) -> None:
            seen.extend(layer.layers for layer in layers)
            super().update(layers)

    model = make_model("llama")
    expected = watch(model, ["column_mass"], 16, 32).frame()
    monkeypatch.setitem(joined_layers.MAX_ENTRIES, "cpu", 2 * (2 * 4 * 16 + 2 * 16))
    actual = watch(model, [Spy()], 16, 32).frame()
    assert seen == [(0, 1), (2,), (0,), (1,), (2,)]
    assert_same(actual, expected)


def test_a_statistic_of_ones_own_gets_single_layers() -> None:
    class LastMass(PerLayer):
        name = "last_mass"
        info = StatisticInfo(title="Last", description="Attention to the last token.", source="this test")
        needs = frozenset({"column_mass"})

        def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
            assert layer.layers == (layer.layer,)
            yield SampleValues(self.key(layer, "head"), layer.tensors["column_mass"][..., -1])

    frame = watch(make_model("llama"), [LastMass(), "column_mass"], 16).frame("last_mass")
    assert sorted(set(frame["layer"])) == [0, 1, 2]
    assert (frame["n"] == 2).all()


def test_joined_values_under_the_key_of_one_layer_are_refused() -> None:
    class FirstColumn(regard.statistics.ColumnMass):
        def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
            key = regard.statistics.StatisticKey(self.name, layer.site, layer.layer, None, ("head",))
            yield SampleValues(key, layer.tensors["column_mass"][..., 0])

    with pytest.raises(regard.UserError, match="at most 2 samples for layer 0, got 6"):
        watch(make_model("llama"), [FirstColumn()], 16)
    FirstColumn.joins_layers = False
    assert len(watch(make_model("llama"), [FirstColumn()], 16).frame()) == 3 * 4


@pytest.mark.exhaustive
def test_states_of_joined_and_of_single_layers_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    both = watch(model, NAMES, 16, 16).frame()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(1, 99, (2, 16), generator=generator) for _ in range(2)]
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, -3:] = 0
    watches = []
    for batch in batches:
        with regard.watching(model, NAMES) as one, torch.no_grad():
            model(input_ids=batch, attention_mask=mask)
        watches.append(one)
        monkeypatch.setitem(joined_layers.MAX_ENTRIES, "cpu", 0)
    for name in NAMES:
        other = STATISTICS[name]()
        other.load(watches[1][name].state())
        watches[0][name].merge(other)
    assert_same(watches[0].frame(), both)
