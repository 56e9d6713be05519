from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from regard.models import load, maximum_length
from regard.models.limits import check_prompt

pytestmark = pytest.mark.every_value

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


def test_patches_of_a_tower_are_no_positions_of_tokens() -> None:
    """The tower of Idefics3 says, by default, that it reads token ids; 4 × 4 patches are no limit of its prompts."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    tower = {**sizes, "image_size": 32, "patch_size": 8}
    text = transformers.LlamaConfig(**sizes, vocab_size=40, max_position_embeddings=64, pad_token_id=1)
    model = transformers.Idefics3Model(transformers.Idefics3Config(vision_config=tower, text_config=text))
    assert model.vision_model.embeddings.position_embedding.num_embeddings == 16
    assert maximum_length(model, None) == 64
    check_prompt(model, {"input_ids": torch.zeros(1, 30, dtype=torch.long)})


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
