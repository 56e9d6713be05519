"""Operations of single heads: each computes what `regard.replacing` has a layer compute, the others what they did."""

from typing import Any

import pytest
import torch
import transformers as tf

import regard
from regard.constants import Constants, Origin
from regard.constants.constants import SOURCES
from regard.errors import UserError
from regard.hooks import find_attention_layers
from regard.hooks.head_operations import ConstantHead, list_heads, replacing_each_head
from tests.named_cache import behind

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(4, 14)[None]


def make(kind: str) -> Any:
    torch.manual_seed(0)
    wide: dict[str, Any] = {**SMALL, "intermediate_size": 32, "initializer_range": 0.5}
    if kind == "encoder":
        return tf.BertModel(tf.BertConfig(**wide)).eval().double()
    return tf.LlamaModel(tf.LlamaConfig(**wide, num_key_value_heads=2)).eval().double()


def states(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).last_hidden_state


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["sigmoid", "softmax+window=3", "off-by-one", "elu-kernel-normalised"])
def test_all_heads_of_a_layer_compute_what_the_layer_would(kind: str, name: str) -> None:
    model = make(kind)
    with regard.replacing(model, name, layers=1):
        expected = states(model)
    with replacing_each_head(model, {(kind, 1, head): name for head in range(4)}):
        found = states(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found, states(model), atol=1e-3)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("source", list(SOURCES))
def test_a_constant_head_is_that_of_constants(kind: str, source: str) -> None:
    model = make(kind)
    matrices = {(kind, layer): SOURCES[source](10, 10).expand(4, -1, -1).clone() for layer in range(2)}
    heads = {(kind, 0, 2), (kind, 1, 3)}
    with regard.replacing(model, Constants(matrices=matrices, origin=Origin(source=source)), heads=heads):
        expected = states(model)
    with replacing_each_head(model, {head: SOURCES[source](12, 12) for head in heads}):
        found = states(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_heads_of_one_layer_compute_different_things_and_the_others_what_they_did() -> None:
    model = make("decoder")
    before = states(model)
    found: dict[str, dict[Any, float]] = {}
    for name, heads in {"none": {}, "some": {("decoder", 0, 1): torch.eye(10), ("decoder", 0, 2): "sigmoid"}}.items():
        with replacing_each_head(model, heads), regard.watching(model, "entropy", verify=False) as watch:
            states(model)
        found[name] = {(row.head, row.position): row.value for row in watch.rows() if row.layer == 0}
    changed = {place[0] for place, value in found["none"].items() if abs(value - found["some"][place]) > 1e-6}
    assert changed == {1, 2}
    torch.testing.assert_close(states(model), before, rtol=0, atol=0)


def oss(window: int | None = None) -> Any:
    """Return a model whose rows give a part of their mass to a learned logit."""
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        **SMALL, intermediate_size=32, initializer_range=0.5, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        num_experts_per_tok=1, sliding_window=window or 16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = tf.GptOssModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 4))
    return model


def test_a_logit_of_the_sink_counts_once() -> None:
    """Rows of heads that compute what they did lack to one what they lacked."""
    model = oss()
    expected = states(model)
    with regard.replacing(model, "softmax", heads=[(0, 1), (1, 0), (1, 3)]):
        torch.testing.assert_close(states(model), expected, rtol=1e-4, atol=1e-5)
    with regard.replacing(model, "sigmoid", layers=1):
        expected = states(model)
    with regard.replacing(model, "sigmoid", heads=[(1, head) for head in range(4)]):
        torch.testing.assert_close(states(model), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_heads_give_to_a_learned_logit_is_measured_beside_replaced_heads() -> None:
    """Heads of a layer with a replaced head were measured as A / Σ A: what they give to the logit was shown as 0."""
    model = oss()
    model.layers[1].self_attn.sinks += 8
    with regard.watching(model, ["column_mass", "virtual_sink_mass"], verify=False) as watch:
        states(model)
    plain = {(row.statistic, row.head, row.position): row.value for row in watch.rows() if row.layer == 1}
    sums = torch.full((10,), 0.75)
    heads = {("decoder", 1, 1): ConstantHead(torch.eye(10), sums), ("decoder", 1, 2): "sigmoid"}
    with (
        replacing_each_head(model, heads),
        regard.watching(model, ["column_mass", "virtual_sink_mass"], verify=False) as watch,
    ):
        states(model)
    found = {(row.statistic, row.head, row.position): row.value for row in watch.rows() if row.layer == 1}
    assert {place[0] for place in plain} == {"column_mass", "virtual_sink_mass"}
    for place, value in plain.items():
        if place[1] in (0, 3):
            assert found[place] == pytest.approx(value, rel=1e-4, abs=1e-5), place
    assert max(value for place, value in plain.items() if place[:2] == ("virtual_sink_mass", 3)) > 0.2
    for position in range(10):
        assert found["virtual_sink_mass", 1, position] == pytest.approx(0.25, abs=1e-5)
    with regard.replacing(model, "sigmoid", layers=1), regard.watching(model, "virtual_sink_mass") as watch:
        states(model)
    whole = {(row.head, row.position): row.value for row in watch.rows() if row.layer == 1}
    assert found["virtual_sink_mass", 2, 7] == pytest.approx(whole[2, 7], abs=1e-5)


@torch.no_grad()
def test_a_constant_stands_at_its_keys_where_a_sliding_cache_has_dropped_some() -> None:
    model, matrix = oss(window=4), torch.rand(10, 10, generator=torch.Generator().manual_seed(1))
    with regard.replacing(model, matrix, heads=[(0, 1), (1, 2)]):
        whole = states(model)
        cache = tf.DynamicCache(config=model.config)
        steps = [model(input_ids=IDS[:, [step]], **behind(cache)).last_hidden_state for step in range(10)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_row_of_a_matrix_is_divided_by_the_sum_of_its_sizes() -> None:
    model, seen = make("encoder"), {}
    matrix = torch.randn(10, 10, generator=torch.Generator().manual_seed(1)).double()
    attention = model.encoder.layer[0].attention.self
    attention.value.register_forward_hook(lambda _module, _args, output: seen.update(value=output))
    attention.register_forward_hook(lambda _module, _args, output: seen.update(output=output[0]))
    with regard.replacing(model, matrix, heads=[(0, 2)]):
        states(model)
    value, output = (seen[name].unflatten(-1, (4, 8))[0, :, 2] for name in ("value", "output"))
    expected = matrix / matrix.abs().sum(-1, keepdim=True) @ value
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_replaced_is_refused() -> None:
    model = make("encoder")
    assert list_heads(find_attention_layers(model)) == {("encoder", 0): 4, ("encoder", 1): 4}
    for heads, message in (
        ({("encoder", 0, 9): "sigmoid"}, "no head 9 in layer 0"),
        ({("encoder", 0, 4): "sigmoid"}, "no head 4 in layer 0"),
        ({("encoder", 0, -1): "sigmoid", ("encoder", 0, 1): "sigmoid"}, "no head -1 in layer 0"),
        ({("decoder", 0, 0): "sigmoid"}, "no head 0 in layer 0"),
        ({("encoder", 0, 0): "gated"}, "cannot be given"),
        ({("encoder", 0, 0): "softmax+window=4+prefix=1"}, "see no later key"),
    ):
        with pytest.raises(UserError, match=message), replacing_each_head(model, heads):  # type: ignore[arg-type]
            pass
    with regard.replacing(model, torch.eye(4), heads=[(0, 0)]), pytest.raises(UserError, match="at most 4 tokens"):
        states(model)
    shared = tf.AlbertModel(tf.AlbertConfig(**SMALL, embedding_size=8, intermediate_size=32)).eval()
    assert list_heads(find_attention_layers(shared)) == {}
    one = {("encoder", 0, 0): "elu"}
    with pytest.raises(UserError, match="no other layer shares"), replacing_each_head(shared, one):
        pass


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_replacing_takes_the_heads_of_an_operation(kind: str) -> None:
    model = make(kind)
    heads = [(0, 1), (1, 2)]
    full = {(kind, *head) for head in heads}
    for operation in ("zeros", "softmax+window=3", "sigmoid", torch.eye(10)):
        each = SOURCES["zeros"](10, 10) if operation == "zeros" else operation
        with replacing_each_head(model, dict.fromkeys(full, each)):
            expected = states(model)
        with regard.replacing(model, operation, heads=heads) as selected:
            found = states(model)
        assert set(selected) == full
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    with regard.replacing(model, "zeros", heads=[(kind, layer, head) for layer in range(2) for head in range(4)]):
        pruned = states(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "attention.output.dense.weight")):
                parameter.zero_()
    torch.testing.assert_close(states(model), pruned, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "heads, options, message",
    [
        ([(0, 7)], {}, r"heads: this model has no head \(0, 7\); choose heads such as \('encoder', 1, 3\)"),
        (0.5, {}, "heads: expected pairs"),
        ([(0, 1)], {"layers": [0]}, "expected pairs .*, and no layers, .* beside an operation of heads"),
        ([(0, "x")], {}, "heads: "),
        ([(0,)], {}, "heads: expected pairs"),
        ("0.1", {}, "heads: expected pairs"),
    ],
    ids=str,
)
def test_heads_that_an_operation_cannot_have(heads: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), regard.replacing(make("encoder"), "zeros", heads=heads, **options):
        pass


def test_heads_with_an_operation_of_their_own_stand_beside_no_constants() -> None:
    """In either order: their weights would be mixed or pruned with, or take what the constants have."""
    model = make("decoder")
    matrices = {("decoder", layer): SOURCES["toeplitz"](10, 10).expand(4, -1, -1).clone() for layer in range(2)}
    constants = Constants(matrices=matrices, origin=Origin(source="toeplitz"))
    heads = {(1, 0), (1, 1)}
    for block in (
        lambda: regard.replacing(model, constants, {(1, 2)}),
        lambda: regard.mixing(model, constants),
    ):
        with (
            block(),
            pytest.raises(UserError, match=r"^heads: expected a layer without constants.*; layer 1 \(decoder"),
        ):
            regard.replacing(model, "zeros", heads=heads).__enter__()
        with (
            regard.replacing(model, "zeros", heads=heads),
            pytest.raises(UserError, match=r"^constants: expected a layer whose heads all compute one thing"),
        ):
            block().__enter__()
    with regard.replacing(model, constants, {(0, 2)}), regard.replacing(model, "zeros", heads=heads):
        pass
