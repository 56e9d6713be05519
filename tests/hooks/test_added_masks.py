"""Masks that modules of one's own add to scores hide keys as those do that say so."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.attention.call import AttentionCall
from regard.attention.operator import attend
from regard.attention.reduction import ReductionRequest
from regard.hooks import watching
from regard.hooks.attention_function import read_mask
from regard.hooks.constant_heads import ConstantHeads

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


@torch.no_grad()
def test_constants_see_the_mask_of_each_call_though_it_stands_where_another_was() -> None:
    """A mask that is added is read anew in each layer, into memory that the one of the layer before has left."""
    torch.manual_seed(0)
    heads = ConstantHeads([torch.ones(1, 3, 3)], [0])
    value, memory = torch.tensor([[[[3.0], [6.0], [9.0]]]]), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    call = AttentionCall(query=value, key=value, value=value, scale=1.0, keep=memory)
    assert attend(heads.apply_to(call), ReductionRequest())[0].flatten().tolist() == [6.0, 6.0, 6.0]
    memory[..., 2] = False
    memory[..., 0, 1] = False
    assert attend(heads.apply_to(call), ReductionRequest())[0].flatten().tolist() == [3.0, 4.5, 4.5]
