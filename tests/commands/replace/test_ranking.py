"""Orders of heads with values known by hand: which heads become constant first, and how many at each fraction."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import regard
from regard.commands.replace.config import RANKINGS
from regard.commands.replace.ranking import (
    HeadRanking,
    rank_by_gate,
    rank_by_input_dependence,
    rank_by_layer,
    rank_by_output_norm,
    rank_heads,
    rank_randomly,
    warn_of_few_heads,
)
from regard.constants import Constants, Head, Origin

HEADS: list[Head] = [("encoder", 0, 0), ("encoder", 0, 1), ("encoder", 0, 2), ("encoder", 1, 0), ("encoder", 1, 1)]
"""Three heads in the first layer and two in the second."""
SEEN = 4
"""Samples behind each entry of the averages."""
DEPENDENCE = {HEADS[0]: 0.25, HEADS[1]: 0.75, HEADS[2]: 0.0, HEADS[3]: 0.5, HEADS[4]: 1.0}
LAMBDA = {HEADS[0]: 0.3, HEADS[1]: 0.1, HEADS[2]: 0.6, HEADS[3]: 0.2, HEADS[4]: 0.9}
NORM = {HEADS[0]: 5.0, HEADS[1]: 3.0, HEADS[2]: 4.0, HEADS[3]: 1.0, HEADS[4]: 2.0}


def constants(dependence: dict[Head, float] = DEPENDENCE) -> Constants:
    """Uniform averages over two tokens, with Σ A² such that 1 − Σ n C² / Σ A², times 4/3 for four samples, is this."""
    layers = sorted({head[:2] for head in dependence})
    values = {layer: [v for head, v in sorted(dependence.items()) if head[:2] == layer] for layer in layers}
    return Constants(
        matrices={layer: torch.full((len(own), 2, 2), 0.5) for layer, own in values.items()},
        counts={site: torch.full((2, 2), SEEN) for site, _ in layers},
        squares={
            layer: torch.tensor([SEEN * 4 * 0.25 / (1 - value * (SEEN - 1) / SEEN) for value in own]).double()
            for layer, own in values.items()
        },
        origin=Origin(source="average"),
    )


def shares(values: dict[Head, float]) -> dict[tuple[str, int], Tensor]:
    layers = sorted({head[:2] for head in values})
    return {layer: torch.tensor([v for head, v in sorted(values.items()) if head[:2] == layer]) for layer in layers}


def unasked(_: Constants) -> HeadRanking:
    raise AssertionError("this order does not need it")


def named(name: str, seed: int = 0, *, found: Constants | None = None) -> HeadRanking:
    """The order of this name, asking for gates and norms only where it needs them."""
    return rank_heads(
        name,
        constants=constants() if found is None else found,
        seed=seed,
        lambdas=(lambda _: rank_by_gate(shares(LAMBDA))) if name in ("lambda", "reversed") else unasked,
        norms=(lambda _: HeadRanking.by(NORM)) if name == "output-norm" else unasked,
    )


# -- each name ----------------------------------------------------------------------------------------------------

# The heads by their place in HEADS, the one that stays dynamic longest first, and the values that they are ranked by.
EXPECTED: dict[str, tuple[list[int], list[float]]] = {
    "lambda": ([4, 2, 0, 3, 1], [0.9, 0.6, 0.3, 0.2, 0.1]),
    "reversed": ([1, 3, 0, 2, 4], [-0.1, -0.2, -0.3, -0.6, -0.9]),
    "input-dependence": ([4, 1, 3, 0, 2], [1.0, 0.75, 0.5, 0.25, 0.0]),
    "output-norm": ([0, 2, 1, 4, 3], [5.0, 4.0, 3.0, 2.0, 1.0]),
    "first-layers": ([4, 3, 2, 1, 0], [1.0, 1.0, 0.0, 0.0, 0.0]),
    "last-layers": ([2, 1, 0, 4, 3], [0.0, 0.0, 0.0, -1.0, -1.0]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_order_of_each_name_is_the_one_of_its_values(name: str) -> None:
    places, values = EXPECTED[name]
    found = named(name)
    assert [HEADS.index(head) for head in found.heads] == places
    assert found.values == pytest.approx(values)
    assert found == named(name, seed=1), "nothing is drawn"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_heads_behind_the_dynamic_ones_become_constant(name: str) -> None:
    """A half of five is two and a half, which Python rounds to two; a quarter is one."""
    places, _ = EXPECTED[name]
    found = named(name)
    for fraction, dynamic in ((0, 0), (0.25, 1), (0.5, 2), (1, 5)):
        assert found.constant(fraction) == [HEADS[place] for place in sorted(places[dynamic:])]


def test_every_name_is_known_here() -> None:
    assert {*EXPECTED, "random"} == set(RANKINGS)


def test_gates_and_norms_are_handed_on_as_they_are_given() -> None:
    known = HeadRanking(tuple(HEADS[::-1]), (9.0, 7.0, 5.0, 3.0, 1.0))
    given: dict[str, Any] = {"constants": constants(), "seed": 0}
    assert rank_heads("lambda", **given, lambdas=lambda _: known, norms=unasked) == known
    assert rank_heads("output-norm", **given, lambdas=unasked, norms=lambda _: known) == known
    turned = rank_heads("reversed", **given, lambdas=lambda _: known, norms=unasked)
    assert turned == HeadRanking(tuple(HEADS), (-1.0, -3.0, -5.0, -7.0, -9.0))
    assert turned.reversed() == known


# -- ties, layers and sites ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lambda", "input-dependence"])
def test_of_equal_heads_the_later_ones_stay_dynamic_longer(name: str) -> None:
    equal = dict.fromkeys(HEADS, 0.5) | {HEADS[1]: 0.75}
    found = rank_by_gate(shares(equal)) if name == "lambda" else rank_by_input_dependence(constants(equal))
    assert [HEADS.index(head) for head in found.heads] == [1, 4, 3, 2, 0]
    assert found.constant(0.5) == [HEADS[0], HEADS[2], HEADS[3]]


def test_a_tie_is_broken_the_same_way_whatever_the_order_of_the_values() -> None:
    turned = dict(reversed([(head, 0.0) for head in HEADS]))
    assert (
        HeadRanking.by(turned)
        == HeadRanking.by(dict.fromkeys(HEADS, 0.0))
        == HeadRanking(tuple(HEADS[::-1]), (0.0,) * 5)
    )


def test_layers_are_numbered_within_their_site() -> None:
    """Layers of the same number stand side by side, whichever stack they are in."""
    heads: list[Head] = [("cross", 0, 0), ("decoder", 0, 0), ("decoder", 1, 0), ("encoder", 0, 0), ("encoder", 1, 0)]
    several = constants(dict.fromkeys(heads, 0.5))
    first, last = rank_by_layer(several, first_replaced=True), rank_by_layer(several, first_replaced=False)
    assert set(first.constant(0.4)) == {heads[0], heads[1], heads[3]}
    assert set(last.constant(0.6)) == {heads[2], heads[4]}


@pytest.mark.parametrize("fraction,dynamic", [(1 / 16, 9), (1 / 8, 18), (0.5, 72), (0.25, 36), (1, 144), (0, 0)])
def test_the_fractions_of_the_paper_are_whole_heads_of_a_base_model(fraction: float, dynamic: int) -> None:
    heads = [("encoder", layer, head) for layer in range(12) for head in range(12)]
    found = rank_by_layer(constants(dict.fromkeys(heads, 0.5)), first_replaced=True).constant(fraction)
    assert found == heads[: 144 - dynamic]


# -- at random ----------------------------------------------------------------------------------------------------


def test_fractions_of_no_head_and_of_all_are_told() -> None:
    """Their scores stood in the table as those of a thousandth. Of 12 heads .04 is none, .05 one, .96 all."""
    with pytest.warns(UserWarning, match="dynamic-fractions") as warned:
        warn_of_few_heads((1.0, 0.96, 0.95, 0.05, 0.04, 0.0), 12)
    assert [str(one.message) for one in warned] == [
        "dynamic-fractions: 0.96 of 12 heads is rounded to all of them; its scores are those of 1",
        "dynamic-fractions: 0.04 of 12 heads is rounded to none of them; its scores are those of 0",
    ]


def test_a_random_order_depends_on_its_seed_alone() -> None:
    found = named("random", seed=3)
    random.seed(9)
    state = random.getstate()
    assert found == named("random", seed=3) == rank_randomly(constants(), 3)
    assert random.getstate() == state
    assert sorted(found.heads) == HEADS
    assert found.values == (5.0, 4.0, 3.0, 2.0, 1.0)
    for fraction, dynamic in ((0, 0), (0.25, 1), (0.5, 2), (1, 5)):
        assert found.constant(fraction) == sorted(found.heads[dynamic:])


def test_random_orders_prefer_no_head() -> None:
    """Of 1000 seeds each head is expected first, and last, 200 times, with a standard deviation of 12.6."""
    drawn = [named("random", seed).heads for seed in range(1000)]
    for end in (0, -1):
        assert all(abs(times - 200) < 60 for times in Counter(heads[end] for heads in drawn).values())
    assert len(set(drawn)) == 120, "each of the 5! orders comes up"


# -- what the values mean -----------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=60, max_position_embeddings=32, initializer_range=0.5, **SIZES)
    return BertModel._from_config(config, attn_implementation="sdpa").eval()


def rows(samples: int = 12) -> Tensor:
    return torch.randint(1, 60, (samples, 8), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_heads_whose_attention_is_always_the_same_become_constant_first() -> None:
    """Without queries a head attends uniformly, whatever the input: then its average explains it wholly."""
    model, still = bert(), [("encoder", 0, 2), ("encoder", 1, 0), ("encoder", 1, 3)]
    for _, layer, head in still:
        query = model.encoder.layer[layer].attention.self.query
        query.weight[4 * head : 4 * head + 4] = 0
        query.bias[4 * head : 4 * head + 4] = 0
    averages = regard.average_attention(model, [rows()], 8)
    found = rank_heads("input-dependence", constants=averages, seed=0, lambdas=unasked, norms=unasked)
    assert found.constant(5 / 8) == still
    assert found.values[-3:] == pytest.approx([0, 0, 0], abs=1e-6)
    assert min(found.values[:-3]) > 0.01


@torch.no_grad()
def test_heads_that_add_least_become_constant_first() -> None:
    """A head whose values are its bias alone puts out that bias everywhere, here (s, 0, 0, 0) of norm s behind W_O."""
    model = bert()
    sizes = {("encoder", layer, head): float(size) for layer, head, size in _SIZED}
    for layer, block in enumerate(model.encoder.layer):
        block.attention.self.value.weight.zero_()
        block.attention.self.value.bias.zero_()
        block.attention.output.dense.weight.copy_(torch.eye(16))
        for head in range(4):
            block.attention.self.value.bias[4 * head] = sizes["encoder", layer, head]
    mask = torch.ones(12, 8, dtype=torch.long)
    mask[:5, 6:] = 0
    batches = [{"input_ids": rows()[part], "attention_mask": mask[part]} for part in (slice(0, 7), slice(7, 12))]
    averages = constants(dict.fromkeys(sizes, 0.5))
    found = rank_by_output_norm(model, batches, averages)
    assert list(found.heads) == sorted(sizes, key=lambda head: -sizes[head])
    assert found.values == pytest.approx([8, 7, 6, 5, 4, 3, 2, 1], rel=1e-4)
    assert set(found.constant(0.5)) == {head for head, size in sizes.items() if size <= 4}
    some = {head: 0.5 for head in sizes if head[1] == 1}
    assert rank_by_output_norm(model, batches, constants(some)).values == pytest.approx([7, 6, 4, 3], rel=1e-4)


_SIZED = [(0, 0, 5), (0, 1, 2), (0, 2, 8), (0, 3, 1), (1, 0, 3), (1, 1, 7), (1, 2, 4), (1, 3, 6)]


@torch.no_grad()
def test_heads_with_the_smallest_gates_become_constant_first() -> None:
    """With σ(l) at 0 and 1 the mixture σ(l)·A + (1 − σ(l))·C is the model with just those heads constant."""
    model = bert()
    averages = regard.average_attention(model, [rows()], 8)
    with regard.mixing(model, averages) as mixed:
        for logits, gate in zip(([40.0, -40, 40, 40], [-40.0, -40, 40, -40]), mixed.parameters(), strict=True):
            gate.copy_(torch.tensor(logits))
        expected = model(input_ids=rows()).last_hidden_state
        found = rank_by_gate(mixed.gate_values())
    given: dict[str, Any] = {"constants": averages, "seed": 0, "lambdas": lambda _: found, "norms": unasked}

    def output(name: str) -> Tensor:
        with regard.replacing(model, averages, rank_heads(name, **given).constant(0.5)):
            return model(input_ids=rows()).last_hidden_state

    torch.testing.assert_close(output("lambda"), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output("reversed"), expected, rtol=1e-2, atol=1e-2)
