from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.models import load, maximum_length

Saved = Callable[..., Path]


@pytest.mark.parametrize(
    "kind,expected",
    [
        ("bert", 24),  # the table as it is
        ("roberta", 24),  # 26 rows, two of them before position 0
        ("gpt2", 20),
        ("opt", 22),  # 24 rows, two of them before position 0
        ("bart", 28),  # 30 rows, two of them before position 0
        ("llama", 32),  # rotary: what it was trained for
        ("t5", None),  # relative, and a tokenizer without a limit
    ],
)
def test_the_most_tokens_a_model_was_made_for(kind: str, expected: int | None, saved: Saved) -> None:
    loaded = load(str(saved(kind)))
    assert maximum_length(loaded.model, loaded.tokenizer) == expected


def test_relative_positions_leave_it_to_the_tokenizer(saved: Saved) -> None:
    loaded = load(str(saved("t5")))
    loaded.tokenizer.model_max_length = 512
    assert maximum_length(loaded.model, loaded.tokenizer) == 512


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", "opt"])
def test_a_model_takes_so_many_and_not_one_more(kind: str, saved: Saved) -> None:
    loaded = load(str(saved(kind)))
    longest = maximum_length(loaded.model, loaded.tokenizer)
    assert longest is not None

    def run(length: int) -> Any:
        return loaded.model(input_ids=torch.full((1, length), 5))

    assert run(longest).last_hidden_state.shape[1] == longest
    with pytest.raises((IndexError, RuntimeError)):
        run(longest + 1)
