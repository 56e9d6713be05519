"""Windows with one token replaced by another."""

import random
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.tokenizers import ordinary_tokens
from regard.data.windows import Windows
from regard.errors import UserError, check_choice

Place = Literal["middle", "first"]
PLACES: tuple[Place, ...] = ("middle", "first")


def replace_one_token(
    windows: Windows, tokenizer: Any, *, place: Place = "middle", seed: int = 0
) -> Int64[Tensor, "sample token"]:
    """Return the windows' token ids with one token of each replaced by another, drawn by `seed` from the vocabulary.

    Special tokens are neither replaced nor drawn. `place` is the "first" of the others, or the one in their "middle",
    of an even number the earlier one. A window's replacement depends on its number alone, not on the other windows.
    """
    check_choice("perturb", place, PLACES)
    ordinary = ordinary_tokens(tokenizer)
    if len(ordinary) < 2:
        raise UserError("perturb: expected a vocabulary of at least two tokens that are not special, this has one")
    candidates = torch.isin(windows.input_ids, ordinary) & ~windows.special
    rng, replaced = random.Random(f"replaced tokens {seed}"), windows.input_ids.clone()
    for row, mask in enumerate(candidates):
        positions = mask.nonzero()[:, 0].tolist()
        if not positions:
            raise UserError(f"perturb: expected a token to replace, window {row} has special tokens alone")
        position = positions[0 if place == "first" else (len(positions) - 1) // 2]
        index = int(torch.searchsorted(ordinary, replaced[row, position]))
        replaced[row, position] = ordinary[(index + rng.randrange(1, len(ordinary))) % len(ordinary)]
    return replaced
