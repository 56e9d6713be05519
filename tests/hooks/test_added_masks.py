"""Masks that modules of one's own add to scores hide keys as those do that say so."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.hooks import watching
from regard.hooks.attention_function import read_mask

HEADS, TOKENS, WIDTH = 2, 10, 16
SEEN = torch.arange(TOKENS) < torch.tensor([[TOKENS], [6]])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        projected: Tensor = self.proj(scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return projected


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, mask)
        return x


def added(number: float, seen: Tensor = SEEN[:, None, None]) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, number)


@torch.no_grad()
@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_a_key_that_a_number_hides_is_padding(number: float) -> None:
    model, states = Stack().eval(), torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    output = model(states, added(number))
    with watching(model, ["column_mass", "entropy"]) as watch:
        torch.testing.assert_close(model(states, added(number)), output)
    with watching(model, ["column_mass", "entropy"]) as expected:
        model(states, SEEN[:, None, None])
    found = watch.frame()
    assert found.equals(expected.frame())
    assert set(found.query("position == 9")["n"]) == {1}


def test_other_numbers_stay_what_they_are() -> None:
    distances = -500.0 * torch.arange(TOKENS).float().expand(1, 1, TOKENS, TOKENS)
    all_hidden = added(-1e9, torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool))
    for mask in (distances, added(-100.0), all_hidden):
        assert torch.equal(read_mask(mask, TOKENS)["bias"], mask)
