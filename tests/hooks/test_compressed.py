"""DeepSeek-V4: compressed keys stand beside those of tokens, in the normalizer and in the output."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.average import average_attention
from regard.hooks.matrices import MatrixReader, weight_blocks
from regard.hooks.routing import observing
from regard.statistics import Statistic, StatisticInfo
from regard.statistics.sinks import FirstMass
from tests.contracts.conftest import randomised
from tests.named_cache import behind, cache_of
from tests.tiny_deepseek import HEADS, LAYERS, WINDOW, make_deepseek


@pytest.fixture(scope="module")
def deepseek() -> Any:
    model = randomised(make_deepseek())
    for layer in model.model.layers:  # sinks far from 0, that leave much to the keys
        layer.self_attn.sinks.data.copy_(torch.linspace(-1, 1, HEADS))
    return model


def ids(rows: int = 2, tokens: int = 21) -> Tensor:
    return torch.randint(3, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def definitions(weights: Tensor) -> dict[str, Tensor]:
    """Statistics of (head, query, key) whose rows do not sum to one, by token."""
    queries, keys = torch.arange(weights.shape[1])[:, None], torch.arange(weights.shape[2])
    return {
        "column_mass": weights.mean(1),
        "virtual_sink_mass": 1 - weights.sum(-1),
        "row_sum": weights.sum(-1),
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "distance": (weights * (queries - keys).abs()).sum(-1),
    }


class Tensors(Statistic):
    """The reductions of each layer as they are."""

    name, info = "tensors", StatisticInfo(title="", description="", source="")
    needs = frozenset({"entropy", "distance", "row_sum", "virtual_sink_mass", "column_mass", "key_norm"})

    def __init__(self) -> None:
        self.layers: dict[int, Any] = {}

    def update(self, layers: Any) -> None:
        self.layers |= {layer.layer: layer for layer in layers}

    def merge(self, other: Any) -> None:
        self.layers |= other.layers

    def result(self) -> list[Any]:
        return []

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Any) -> None:
        self.layers = {}


def check(observed: Tensors, attentions: list[Tensor], real: Tensor) -> None:
    """Compare what was observed with eager weights (batch, head, query, key and compressed key)."""
    for number, matrices in enumerate(attentions):
        layer = observed.layers[number]
        for row, tokens in enumerate(real):
            weights = matrices[row][:, tokens][:, :, : real.shape[1]][:, :, tokens].double()
            length = int(tokens.sum())
            for name, expected in definitions(weights).items():
                actual = layer.tensors[name][row, :, :length]
                actual = actual / length if name == "column_mass" else actual
                torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5, msg=f"{name} {number}")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_columns_of_tokens_are_those_of_eager_attention(deepseek: Any, side: str) -> None:
    """Compressed keys and the sink have what the weights of tokens lack to one."""
    real = torch.ones(2, 21, dtype=torch.bool)
    if side != "none":
        real[1, slice(0, 6) if side == "left" else slice(15, 21)] = False
    inputs = {"input_ids": ids() * real, "attention_mask": real.long()}
    expected = deepseek(**inputs, output_attentions=True)
    assert [weights.shape[-1] for weights in expected.attentions] == [21, 21 + 5, 21 + 2]
    observed = Tensors()
    with watching(deepseek, [observed]):
        logits = deepseek(**inputs).logits
    torch.testing.assert_close(logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)
    check(observed, expected.attentions, real)
    compressed = torch.stack([weights[0, :, :, 21:].sum(-1).mean() for weights in expected.attentions[1:]])
    assert bool((compressed > 0.02).all())  # they have a share that would be missed


def run_steps(model: Any, steps: list[int], **options: Any) -> Iterator[tuple[int, Any]]:
    """Read the text in steps over a cache; yield the end of each, and its output."""
    cache, end = None, 0
    for step in steps:
        output = model(ids()[:, end : end + step], **behind(cache), use_cache=True, **options)
        cache, end = cache_of(output), end + step
        yield end, output


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [[12] + [1] * 9, [12, 5, 4], [3, 18]])
@torch.no_grad()
def test_a_cache_has_the_columns_of_its_steps(deepseek: Any, steps: list[int]) -> None:
    """The window of the cache moves on, and compressed keys become more. The model's own steps are the reference."""
    expected = [torch.zeros(2, HEADS, 21, 21) for _ in range(LAYERS)]
    logits = []
    for end, output in run_steps(deepseek, steps, output_attentions=True):
        logits.append(output.logits)
        new = output.logits.shape[1]
        first = max(end - new - (WINDOW - 1), 0)
        for matrix, weights in zip(expected, output.attentions, strict=True):
            matrix[:, :, end - new : end, first:end] = weights[..., : end - first]
    observed = Tensors()
    with watching(deepseek, [observed]):
        actual = [output.logits for _, output in run_steps(deepseek, steps)]
    torch.testing.assert_close(torch.cat(actual, dim=1), torch.cat(logits, dim=1), rtol=1e-4, atol=1e-4)
    check(observed, expected, torch.ones(2, 21, dtype=torch.bool))


@torch.no_grad()
def test_statistics_have_no_row_of_a_compressed_key(deepseek: Any) -> None:
    """Not even where the text is shorter than the first keys that are measured."""
    statistics = [FirstMass(8), "key_norm", "value_norm", "column_mass"]
    with watching(deepseek, statistics) as watch:
        deepseek(ids(tokens=5))
    weights = deepseek(ids(tokens=5), output_attentions=True, use_cache=False).attentions[1]
    assert weights.shape[-1] == 6
    frame = watch.frame(layer=1)
    assert frame["position"].max() == 4
    rows = watch.frame("first_mass", layer=1).dropna(subset=["head", "position"])
    mass = torch.tensor(rows.sort_values(["head", "position"])["value"].to_numpy()).reshape(HEADS, -1)
    alpha = weights[..., :5].double().mean(0).sum(1) / torch.arange(5, 0, -1)
    torch.testing.assert_close(mass, alpha, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_averages_are_those_of_the_columns_of_tokens(deepseek: Any) -> None:
    constants = average_attention(deepseek, [ids(1)], 21)
    weights = deepseek(ids(1), output_attentions=True).attentions
    for layer, matrix in enumerate(weights):
        torch.testing.assert_close(constants.matrices["decoder", layer], matrix[0, :, :, :21], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_matrices_of_a_look_have_the_columns_of_tokens(deepseek: Any) -> None:
    matrices: dict[int, Tensor] = {}

    def read(_site: str, layer: int, call: AttentionCall, _tiles: Tensor | None) -> None:
        matrices[layer] = torch.zeros(HEADS, 21, 21)
        for rows, columns, weights in weight_blocks(call):
            matrices[layer][:, rows, columns] = weights

    with watching(deepseek, "column_mass") as watch:
        deepseek(ids(1))
        with observing(deepseek, MatrixReader(watch, read), list(watch.locations)):
            deepseek(ids(1))
    for layer, weights in enumerate(deepseek(ids(1), output_attentions=True).attentions):
        torch.testing.assert_close(matrices[layer], weights[0, :, :, :21], rtol=1e-4, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "enter",
    [
        lambda model, constants: regard.replacing(model, constants),
        lambda model, constants: regard.replacing(model, constants, {(1, 0)}),
        lambda model, _: regard.replacing(model, "sigmoid", layers=[2]),
    ],
)
@torch.no_grad()
def test_layers_with_compressed_keys_are_not_replaced(deepseek: Any, enter: Callable[..., Any]) -> None:
    constants = average_attention(deepseek, [ids(1)], 21)
    message = "cannot replace heads of DeepseekV4Attention: it attends to compressed keys"
    with enter(deepseek, constants), pytest.raises(UserError, match=message):
        deepseek(ids(1))
    with regard.replacing(deepseek, constants, {(0, 1)}), watching(deepseek, "column_mass", verify=False) as watch:
        deepseek(ids(1))
    row = watch.frame("column_mass", layer=0, head=1).sort_values("position")["value"].to_numpy()
    matrix = constants.matrices["decoder", 0][1].double()
    torch.testing.assert_close(torch.tensor(row), matrix.mean(0), rtol=1e-4, atol=1e-6)
