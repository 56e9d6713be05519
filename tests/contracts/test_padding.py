"""Padding gets nothing and gives nothing: a padded batch counts as its samples would, one by one."""

from typing import Any

import pytest
import torch

from regard.hooks import watching

pytestmark = pytest.mark.sample(6)

# Only samples of one length enter input dependence, and in a batch only those without padding: told in its docstring.
OF_ONE_LENGTH = ("input_dependence",)


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
