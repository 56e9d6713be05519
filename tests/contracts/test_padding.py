"""Padding gets nothing and gives nothing: a padded batch counts as its samples would, one by one."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.hooks import watching
from regard.hooks.caches import read_cache
from tests.named_cache import behind

pytestmark = pytest.mark.sample(2)

# Only samples of one length enter input dependence, and in a batch only those without padding: told in its docstring.
OF_ONE_LENGTH = ("input_dependence",)


@pytest.mark.sample(1)
def test_a_padded_batch_is_its_samples_one_by_one(
    padded: tuple[Any, str], build: Any, inputs: Any, singles: Any, run: Any, table: Any, assert_same: Any
) -> None:
    family, padding = padded
    model, given = build(family, dtype=torch.float64), inputs(family, padding)
    with watching(model, "all") as together:
        run(model, given)
    with watching(model, "all") as apart:
        for single in singles(given):
            run(model, single)
    assert together.samples == apart.samples == 3
    assert_same(table(together, leave_out=OF_ONE_LENGTH), table(apart, leave_out=OF_ONE_LENGTH))


def scattered(seed: int, tokens: int = 18) -> tuple[Tensor, Tensor]:
    """Token ids and a mask of three rows, whose 6, 12 and 17 tokens stand anywhere in them."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.zeros(3, tokens, dtype=torch.long)
    for row, count in zip(real, (6, 12, 17), strict=True):
        row[torch.randperm(tokens, generator=generator)[:count]] = 1
    return torch.randint(3, 99, real.shape, generator=generator) * real, real


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [(18,), (9, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("name", ["Llama", "GPT2", "RegardBias", "RegardSigmoid", "Bert", "Electra"])
def test_padding_between_tokens_is_no_token(
    name: str, steps: tuple[int, ...], build: Any, families: Any, singles: Any, run: Any, table: Any, assert_same: Any
) -> None:
    """As of a batch of chats, whose turns are padded. Windows count columns in the models themselves."""
    model, (ids, real) = build(name, dtype=torch.float64), scattered(3)
    given = {"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    is_cached = families[name].kind == "decoder"
    left_out = (*OF_ONE_LENGTH, "spectral_bound") if is_cached and len(steps) > 1 else OF_ONE_LENGTH
    with torch.no_grad(), watching(model, "all") as together:
        cache, end = None, 0
        for tokens in steps if is_cached else (18,):
            start, end = end, end + tokens
            part = {"input_ids": ids[:, start:end], "position_ids": given["position_ids"][:, start:end]}
            options = behind(cache) | {"use_cache": True} if is_cached else {}
            output = model(**part, attention_mask=real[:, :end], **options)
            cache = read_cache(output)
    with watching(model, "all") as apart:
        for single in singles(given):
            run(model, single)
    assert_same(table(together, leave_out=left_out), table(apart, leave_out=left_out))


def test_padding_between_the_tokens_of_an_encoder(build: Any) -> None:
    """Cross-attention to an encoder's states: the first keys are the first real ones."""
    model, (ids, real) = build("Bart", dtype=torch.float64), scattered(4)
    decoder = torch.randint(3, 99, (3, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watching(model, ["first_mass", "column_mass"]) as seen:
        model(input_ids=ids, attention_mask=real, decoder_input_ids=decoder)
    for layer in range(2):
        first = seen.frame("first_mass", site="cross", layer=layer).set_index(["head", "position"])["value"]
        mass = seen.frame("column_mass", site="cross", layer=layer).set_index(["head", "position"])["value"]
        assert (first - mass.loc[first.index]).abs().max() < 1e-9


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_of_pairs_may_be_one_for_all_rows(side: str, build: Any, table: Any, assert_same: Any) -> None:
    model = build("Llama", dtype=torch.float64)
    ids = torch.randint(3, 99, (3, 14), generator=torch.Generator().manual_seed(0))
    real = torch.arange(14) >= 4 if side == "left" else torch.arange(14) < 10
    keep = torch.ones(14, 14, dtype=torch.bool).tril() & real
    tables = []
    with torch.no_grad():
        for rows in (1, 3):
            with watching(model, "all") as seen:
                model(ids, attention_mask=keep[None, None].expand(rows, 1, -1, -1).clone())
            assert seen.frame("entropy")["position"].max() == 9
            tables.append(table(seen))
    assert_same(*tables)


def test_what_stands_on_padding_does_not_matter(
    padded: tuple[Any, str], build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    family, padding = padded
    model, given = build(family), inputs(family, padding)
    filled = given | {"input_ids": given["input_ids"] + 7 * (1 - given["attention_mask"])}
    tables = []
    for arguments in (given, filled):
        with watching(model, "all") as seen:
            run(model, arguments)
        tables.append(table(seen))
    assert_same(tables[1], tables[0], rtol=1e-6, atol=1e-6)


def test_the_standard_error_is_that_of_the_samples(
    families: Any, build: Any, inputs: Any, singles: Any, run: Any
) -> None:
    family = families["Llama"]
    model, given = build(family, dtype=torch.float64), inputs(family, "left")
    values = []
    for single in singles(given):
        with watching(model, ["entropy"]) as seen:
            run(model, single)
        values.append([row.value for row in seen.rows() if row.position is None])
    expected = torch.tensor(values, dtype=torch.float64).std(0) / 3**0.5
    with watching(model, ["entropy"]) as seen:
        run(model, given)
    found = torch.tensor([row.standard_error for row in seen.rows() if row.position is None], dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-9)


@torch.no_grad()
def test_a_row_of_padding_alone_is_no_sample() -> None:
    """It has no token that could be one; statistics never counted it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=20
    )
    model = transformers.BertModel(config).eval()
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    with watching(model, "entropy") as watch:
        model(torch.arange(12).reshape(3, 4), attention_mask=mask)
    assert watch.samples == 2
    assert set(watch.frame("entropy", position=None)["n"]) == {2}
