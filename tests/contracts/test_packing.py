"""Sequences packed into one row count as if each came alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.hooks import watching
from tests.contracts.test_replacing import constants_for, some_heads

pytestmark = pytest.mark.sample(2)

LENGTHS = (9, 14, 5)
# Of a packed row the matrices of its sequences are not told apart.
NOT_PACKED = ("spectral_bound", "input_dependence", "first_mass")


def packed(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and the position ids that start again with every sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (1, sum(LENGTHS)), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in LENGTHS])[None]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen3", "Gemma2", "Regard", "RegardSigmoid", "RegardBias", "RegardSink"]
)
def test_packed_sequences_are_those_sequences(name: str, build: Any, table: Any, assert_same: Any) -> None:
    model = build(name, dtype=torch.float64)
    ids, positions = packed()
    with torch.no_grad(), watching(model, "all") as seen:
        together = model(ids, position_ids=positions, use_cache=False).logits
    with torch.no_grad(), watching(model, "all") as apart:
        logits = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    assert torch.allclose(together, torch.cat(logits, dim=1), rtol=1e-6, atol=1e-6)
    assert seen.samples == len(LENGTHS)
    found = table(seen)
    assert not {key[0] for key in found} & {*NOT_PACKED}
    assert_same(found, table(apart, leave_out=NOT_PACKED), rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_two_rows_of_packed_sequences(build: Any, table: Any, assert_same: Any) -> None:
    model = build("Llama", dtype=torch.float64)
    rows = [packed(seed)[0] for seed in range(2)]
    positions = packed()[1].expand(2, -1)
    with torch.no_grad(), watching(model, "all") as seen:
        model(torch.cat(rows), position_ids=positions, use_cache=False)
    with torch.no_grad(), watching(model, "all") as apart:
        for row in rows:
            model(row, position_ids=positions[:1], use_cache=False)
    assert seen.samples == 2 * len(LENGTHS)
    assert_same(table(seen), table(apart))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "GptOss", "Bert", "Regard"])
def test_positions_that_start_again_without_packing(
    name: str, build: Any, families: Any, table: Any, assert_same: Any
) -> None:
    """Where the host attends across them, be it for a cache or because it knows no packing, they are one sequence."""
    model = build(name, dtype=torch.float64)
    ids, positions = packed()
    cached = {} if families[name].kind == "encoder" else {"use_cache": True}
    with torch.no_grad(), watching(model, "all") as seen:
        model(ids, position_ids=positions, **cached)
    with torch.no_grad(), watching(model, "all") as expected:
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), **cached)
    assert seen.samples == 1
    assert_same(table(seen), table(expected))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Regard"])
@pytest.mark.parametrize("lengths", [(24,), (10, 24)], ids=str)
def test_constants_of_packed_sequences_begin_with_each(name: str, lengths: tuple[int, ...], build: Any) -> None:
    model = build(name, dtype=torch.float64)
    ids, positions = packed()
    constants = [constants_for(model, length) for length in lengths[-1:]]
    constants += [regard.constants.to_length(constants[0], length) for length in lengths[:-1]]
    with torch.no_grad(), regard.replacing(model, constants, some_heads(constants[0])):
        together = model(ids, position_ids=positions, use_cache=False).logits
        apart = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(together, torch.cat(apart, dim=1))


@pytest.mark.parametrize("name", ["Llama", "Bert", "T5"])
@pytest.mark.parametrize("additive", [False, True])
def test_constants_begin_with_each_block_of_a_mask(name: str, additive: bool, build: Any, families: Any) -> None:
    model = build(name, dtype=torch.float64)
    ids, positions = packed()
    segments = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask = (segments[:, None] == segments)[None, None]
    mask = mask.tril() if families[name].kind == "causal" else mask
    if additive:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    stack = model.encoder if name == "T5" else model
    with torch.no_grad(), regard.replacing(model, constants_for(model)):
        given = {} if name == "T5" else {"position_ids": positions}
        together = stack(input_ids=ids, attention_mask=mask, **given)[0]
        apart = [stack(input_ids=part)[0] for part in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(together, torch.cat(apart, dim=1))


def test_a_mask_of_pairs_with_padding_is_one_block(build: Any, inputs: Any, families: Any) -> None:
    model = build("Llama", dtype=torch.float64)
    given = inputs(families["Llama"], "left")
    real = given["attention_mask"].bool()
    pairs = (real[:, None, :, None] & real[:, None, None, :]).tril() | torch.eye(real.shape[1], dtype=torch.bool)
    with torch.no_grad(), regard.replacing(model, constants_for(model)):
        expected = model(**given).logits
        output = model(**{**given, "attention_mask": pairs}).logits
    torch.testing.assert_close(output[real], expected[real])
