"""Constant heads against the paper's formula written out entry by entry, in float64."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention.call import AttentionCall, ConstantHeadsInput
from regard.attention.constant import constant_output, constant_weights
from regard.attention.operator import attend, expand_bias
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest
from regard.attention.reference import weights as whole_weights

BATCH, HEADS, KEYS, WIDTH = 3, 4, 6, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrices(heads: int, length: int = KEYS, seed: int = 7) -> Tensor:
    return drawn(heads, length, length, seed=seed).abs()


def call(**changed: object) -> AttentionCall:
    """A call of random operands, without padding."""
    query, key, value = (drawn(BATCH, HEADS, KEYS, WIDTH, seed=seed) for seed in range(3))
    given = {"query": query, "key": key, "value": value, "scale": 0.5}
    return AttentionCall(**{**given, **changed})  # type: ignore[arg-type]


def by_hand(c: AttentionCall) -> Tensor:
    """L1-row-normalise(C ∘ m mᵀ) V, one number after the other."""
    constant = c.constant
    assert constant is not None
    batch, _, keys, width = c.value.shape
    queries = c.query.shape[2]
    result = torch.zeros(batch, queries, len(constant.heads), width, dtype=torch.float64)
    for b, n, i in itertools.product(range(batch), range(len(constant.heads)), range(queries)):
        if c.query_mask is not None and not c.query_mask[b, i]:
            continue
        row = i + constant.first_query - (0 if constant.query_shift is None else int(constant.query_shift[b]))
        weights = {}
        for j in range(keys):
            column = j + constant.first_key - (0 if constant.key_shift is None else int(constant.key_shift[b]))
            hidden = c.key_mask is not None and not c.key_mask[b, j]
            if c.keep is not None and not c.keep.expand(batch, 1, -1, -1)[b, 0, i, j]:
                hidden = True
            size = constant.matrices.shape[-1]
            if not hidden and 0 <= row < size and 0 <= column < size:
                weights[j] = float(constant.matrices[n, row, column].detach())
        total = sum(abs(weight) for weight in weights.values())
        group = constant.heads[n] * c.value.shape[1] // c.query.shape[1]
        for j, weight in weights.items():
            if total:
                result[b, i, n] += weight / total * c.value[b, group, j]
    return result


REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 1]]).bool()
LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]).bool()
SHIFT = torch.tensor([0, 2, 4])
CASES = {
    "whole": ({}, {}),
    "crop of longer matrices": ({}, {"matrices": matrices(2, 9)}),
    "padding": ({"key_mask": REAL, "query_mask": REAL}, {}),
    "padding on the left": (
        {"key_mask": LEFT, "query_mask": LEFT},
        {"query_shift": SHIFT, "key_shift": SHIFT},
    ),
    "keys alone begin late": ({"key_mask": LEFT}, {"key_shift": SHIFT}),
    "a step after a cache": ({"query": drawn(BATCH, HEADS, 1, WIDTH)}, {"first_query": 5}),
    "a step after a cache, padding on the left": (
        {"query": drawn(BATCH, HEADS, 1, WIDTH), "key_mask": LEFT},
        {"first_query": 5, "query_shift": SHIFT, "key_shift": SHIFT},
    ),
    "a cache that dropped keys": (
        {"query": drawn(BATCH, HEADS, 2, WIDTH)},
        {"first_query": 7, "first_key": 3, "matrices": matrices(2, 9)},
    ),
    "a full mask": ({"keep": drawn(BATCH, 1, KEYS, KEYS, seed=9) > 0}, {}),
    "negative entries": ({"key_mask": REAL}, {"matrices": drawn(2, KEYS, KEYS), "signed": True}),
    "rows of zeros": ({"key_mask": REAL}, {"matrices": matrices(2) * (torch.arange(KEYS)[:, None] > 2)}),
    "nothing": ({}, {"matrices": torch.zeros(2, KEYS, KEYS, dtype=torch.float64)}),
    "grouped values": ({"key": drawn(BATCH, 2, KEYS, WIDTH), "value": drawn(BATCH, 2, KEYS, WIDTH, seed=3)}, {}),
}


@pytest.mark.every_value
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("longer", [1, 3], ids=["short", "long"])
def test_output_is_the_formula_entry_by_entry(name: str, longer: int) -> None:
    changed, about = CASES[name]
    constant = ConstantHeadsInput(**{"matrices": matrices(2), "heads": (1, 3), **about})
    c = call(**changed, constant=constant)
    if longer > 1:  # long enough that shifted samples are moved about instead of looked up
        c = repeated(c, longer)
    torch.testing.assert_close(constant_output(c), by_hand(c))
    weights = constant_weights(c)
    value = c.value.repeat_interleave(c.num_key_value_groups, 1)[:, [1, 3]]
    torch.testing.assert_close(torch.einsum("bhqk,bhkd->bqhd", weights, value), by_hand(c))


def repeated(c: AttentionCall, times: int) -> AttentionCall:
    """The call with its keys, and as many queries if it had all of them, several times over."""
    assert c.constant is not None
    keys = {"value": c.value.repeat(1, 1, times, 1), "key": c.key.repeat(1, 1, times, 1)}
    if c.query.shape[2] == KEYS:
        keys["query"] = c.query.repeat(1, 1, times, 1)
    if c.key_mask is not None:
        keys["key_mask"] = torch.cat([c.key_mask] + [c.key_mask[:, -1:].expand(-1, KEYS)] * (times - 1), 1)
    if c.query_mask is not None:
        keys["query_mask"] = keys["key_mask"]
    if c.keep is not None:
        keys["keep"] = c.keep.repeat(1, 1, times, times)
    grown = c.constant.matrices.repeat(1, times, times)
    return replace(c, **keys, constant=replace(c.constant, matrices=grown))  # type: ignore[arg-type]


def test_normalised_matrices_need_no_sums() -> None:
    normal = matrices(2) / matrices(2).sum(-1, keepdim=True)
    told = call(constant=ConstantHeadsInput(matrices=normal, heads=(0, 2), normalised=True))
    torch.testing.assert_close(constant_output(told), by_hand(told))


@pytest.mark.parametrize("heads", [(0,), (1, 3), (2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["replaced", "mixed"])
@pytest.mark.parametrize("gradients", [False, True])
def test_heads_beside_constant_ones_attend(heads: tuple[int, ...], gated: bool, gradients: bool) -> None:
    gate = torch.linspace(0.1, 0.9, len(heads), dtype=torch.float64) if gated else None
    constant = ConstantHeadsInput(matrices=matrices(len(heads)).requires_grad_(gradients), heads=heads, gate=gate)
    plain = call(key_mask=REAL, query_mask=REAL)
    found, _ = attend(call(key_mask=REAL, query_mask=REAL, constant=constant), ReductionRequest())
    expected, _ = attend(plain, ReductionRequest())
    expected = expected.clone()
    fixed = by_hand(call(key_mask=REAL, query_mask=REAL, constant=constant)).transpose(1, 2)
    for n, head in enumerate(heads):
        share = 0 if gate is None else gate[n]
        expected[:, head] = share * expected[:, head] + (1 - share) * fixed[:, n]
    torch.testing.assert_close(found.detach(), expected.detach())


def test_gradients_reach_matrices_gates_and_values() -> None:
    value = drawn(2, 2, 4, 3, seed=2).requires_grad_()
    logits = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    kernel = matrices(1, 4).requires_grad_()
    query, key = drawn(2, 2, 4, 3, seed=0).requires_grad_(), drawn(2, 2, 4, 3, seed=1)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()

    def output(value: Tensor, logits: Tensor, kernel: Tensor, query: Tensor) -> Tensor:
        constant = ConstantHeadsInput(matrices=kernel, heads=(1,), gate=logits.sigmoid(), signed=True)
        c = AttentionCall(query=query, key=key, value=value, scale=0.5, key_mask=real, constant=constant)
        return attend(c, ReductionRequest())[0]

    assert torch.autograd.gradcheck(output, (value, logits, kernel, query))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("gated", [False, True], ids=["replaced", "mixed"])
def test_what_is_measured_is_what_was_used(gated: bool, padded: bool) -> None:
    """All reductions of a call with constants come from the matrix whose product with V is its output."""
    gate = torch.tensor([0.25, 0.5], dtype=torch.float64) if gated else None
    c = call(constant=ConstantHeadsInput(matrices=matrices(2), heads=(1, 3), gate=gate))
    real = torch.ones(BATCH, 1, KEYS, 1, dtype=torch.bool)
    if padded:
        c, real = replace(c, key_mask=REAL, query_mask=REAL), REAL[:, None, :, None]
    output, found = attend(c, ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS)))
    weights = whole_weights(c)
    torch.testing.assert_close((weights @ c.value) * real, output * real)
    torch.testing.assert_close(found["weights"], weights[real.all((1, 2, 3))].sum(0))
    torch.testing.assert_close(found["column_mass"], (weights * real).sum(-2))
    torch.testing.assert_close(found["row_sum"], weights.sum(-1))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, KEYS), min_size=BATCH, max_size=BATCH), st.integers(0, 3))
def test_rows_sum_to_one_or_are_empty_and_scaling_a_row_changes_nothing(lengths: list[int], seed: int) -> None:
    real = torch.arange(KEYS) < torch.tensor(lengths)[:, None]
    kernel = matrices(2, seed=seed)
    c = call(key_mask=real, query_mask=real, constant=ConstantHeadsInput(matrices=kernel, heads=(0, 3)))
    sums = constant_weights(c).sum(-1)
    torch.testing.assert_close(sums, real[:, None].expand_as(sums).double())
    scaled = kernel * torch.linspace(0.5, 9, KEYS, dtype=torch.float64)[:, None]
    again = call(key_mask=real, query_mask=real, constant=ConstantHeadsInput(matrices=scaled, heads=(0, 3)))
    torch.testing.assert_close(constant_output(c), constant_output(again))


@pytest.mark.sample(1)
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("gated", [False, True], ids=["replaced", "mixed"])
def test_dropout_leaves_out_weights_of_constant_heads(padding: bool, gated: bool) -> None:
    """Each entry is dropped alone, with the probability p, and those that stay are 1/(1 − p) as large."""
    gate = torch.tensor([0.3, 0.6], dtype=torch.float64) if gated else None
    constant = ConstantHeadsInput(matrices=matrices(2), heads=(1, 3), gate=gate)
    given = {"key_mask": REAL, "query_mask": REAL} if padding else {}
    identity = torch.eye(KEYS, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)  # so that the output is the weights
    whole = call(**given, value=identity, constant=constant)
    expected, _ = attend(whole, ReductionRequest())
    torch.manual_seed(0)
    draws = torch.stack([attend(replace(whole, dropout=0.25), ReductionRequest())[0] for _ in range(400)])
    ratio = draws[:, :, [1, 3]] / expected[:, [1, 3]]
    seen = expected[:, [1, 3]] > 0
    kept = ratio[:, seen]
    assert torch.allclose(kept[kept > 0], torch.tensor(4 / 3, dtype=torch.float64))
    assert abs(float((kept == 0).double().mean()) - 0.25) < 0.01
    assert not bool((draws[0, 0, 1] == 0).logical_xor(draws[0, 1, 1] == 0)[expected[0, 1] > 0].sum() == 0)


ONE_QUERY = {
    "alone": {},
    "padded": {"key_mask": LEFT},
    "a mask by pair": {"keep": torch.tensor([1, 0, 1, 1, 1, 1]).bool()[None, None, None]},
    "a bias of the others": {"bias": drawn(1, 2, 1, KEYS, seed=9)},
    "a learned sink": {"sink": drawn(HEADS, seed=4)},
    "a soft cap": {"softcap": 2.0},
    "shared keys": {"key": drawn(BATCH, 2, KEYS, WIDTH, seed=1), "value": drawn(BATCH, 2, KEYS, WIDTH, seed=2)},
    "one sample": {name: drawn(1, HEADS, 1 if name == "query" else KEYS, WIDTH) for name in ("query", "key", "value")},
}


@torch.no_grad()
@pytest.mark.parametrize("heads", [(0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("case", ONE_QUERY)
@pytest.mark.parametrize("kind", ["positive", "signed", "zeros", "shifted"])
def test_one_query_is_a_row_of_the_matrices(case: str, heads: tuple[int, ...], kind: str) -> None:
    """As when decoding: the last of six tokens, with heads that are constant, pruned, or begin late."""
    shift = {"query_shift": SHIFT, "key_shift": SHIFT} if kind == "shifted" else {}
    table = matrices(len(heads)) * (-1 if kind == "signed" else 1)
    table[0, 2:, :3] = 0  # rows of zeros where samples begin late
    if kind == "zeros":
        table[0] = 0
    constant = ConstantHeadsInput(matrices=table, heads=heads, first_query=KEYS - 1, signed=kind == "signed", **shift)
    changes: dict[str, object] = dict(ONE_QUERY[case])
    if (kind == "shifted" and case == "one sample") or ("bias" in changes and len(heads) == HEADS):
        return
    query = drawn(BATCH, HEADS, 1, WIDTH, seed=0)
    c = call(**{"query": query, "causal": True, "offset": KEYS - 1, "constant": constant, **changes})
    found, _ = attend(c, ReductionRequest())
    expected = whole_weights(expand_bias(c)) @ c.expand_groups(c.value)
    torch.testing.assert_close(found, expected)
    fixed = constant_output(c).transpose(1, 2)
    torch.testing.assert_close(fixed, found[:, list(heads)])
    assert bool((found[:, 0] == 0).all()) is (kind == "zeros")


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("groups, heads, key_heads", [(4, (0, 2), (1, 3)), (2, (0, 1), (1,)), (4, (3,), (0, 1, 2))])
@pytest.mark.parametrize("masked", [{}, {"key_mask": LEFT}, {"bias": drawn(1, HEADS, 1, KEYS, seed=9)}], ids=str)
def test_keys_of_constant_heads_may_be_missing(
    groups: int, heads: tuple[int, ...], key_heads: tuple[int, ...], queries: int, masked: dict[str, Tensor]
) -> None:
    key, value = drawn(BATCH, groups, KEYS, WIDTH, seed=1), drawn(BATCH, groups, KEYS, WIDTH, seed=2)
    first = KEYS - queries
    constant = ConstantHeadsInput(matrices=matrices(len(heads)), heads=heads, first_query=first)
    given = {"query": drawn(BATCH, HEADS, queries, WIDTH), "causal": True, "offset": first, "value": value, **masked}
    whole = call(**given, key=key, constant=constant)
    part = call(**given, key=key[:, list(key_heads)], constant=replace(constant, key_heads=key_heads))
    expected = whole_weights(whole) @ whole.expand_groups(value)
    torch.testing.assert_close(attend(whole, ReductionRequest())[0], expected)
    torch.testing.assert_close(attend(part, ReductionRequest())[0], expected)
    full = part.expand_keys().key
    torch.testing.assert_close(full[:, list(key_heads)], part.key)
    missing = [group for group in range(groups) if group not in key_heads]
    assert full.shape == key.shape
    assert not full[:, missing].any()


@torch.no_grad()
def test_decoding_copies_no_keys_and_values_of_single_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("heads are selected")

    monkeypatch.setattr(AttentionCall, "select_heads", refuse)
    constant = ConstantHeadsInput(matrices=matrices(2), heads=(1, 3), first_query=KEYS - 1)
    c = call(query=drawn(BATCH, HEADS, 1, WIDTH), causal=True, offset=KEYS - 1, constant=constant)
    attend(c, ReductionRequest())
