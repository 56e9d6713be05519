"""Blocks that are executed again are those of a loop if they read what blocks have returned, else of several inputs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.data_flow import FLOW

HEADS, WIDTH, TOKENS = 2, 4, 6
SIZE = HEADS * WIDTH
Mode = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def split(self, states: Tensor) -> list[Tensor]:
        return [part(states).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.maps]

    def forward(self, states: Tensor) -> Tensor:
        states = states.to(torch.float32)  # the same tensor, as in a norm that is computed in float32
        q, k, v = self.split(states)
        return states + scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Core(nn.Module):
    """Two blocks, behind a map of as many widths as it is passed."""

    def __init__(self, widths: int = 1) -> None:
        super().__init__()
        self.map = nn.Linear(widths * SIZE, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.read: list[Tensor] = []

    def forward(self, states: Tensor) -> Tensor:
        states = self.map(states)
        for block in self.blocks:
            self.read.append(states)
            states = block(states)
        return states


class Model(nn.Module):
    """Calls its core in some way."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], widths: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.core, self.table = way, Core(widths), nn.Parameter(torch.randn(TOKENS, SIZE))
        self.register_buffer("start", torch.zeros(1, 1, SIZE))
        self.eval()

    def forward(self, states: Tensor) -> Tensor:
        return self.way(self, states)


def of_features(model: Any, states: Tensor) -> Tensor:
    result: Tensor = model.core(states) - model.core(states.flip(1) * 2 + model.start)
    return result


def of_rows(model: Any, states: Tensor) -> Tensor:
    return torch.cat([model.core(row[None]) for row in states])


def of_smaller_states(model: Any, states: Tensor) -> Tensor:
    encode = nn.Sequential(*model.core.blocks)
    first = encode(states)
    result: Tensor = first - encode(states * 0.5)
    return result


def of_tables(model: Any, states: Tensor) -> Tensor:
    ids = torch.arange(TOKENS)[None]
    result: Tensor = model.core(embedding(ids, model.table)) - model.core(model.table[ids.flip(1)])
    return result


def of_written_states(model: Any, states: Tensor) -> Tensor:
    first = model.core(states)
    second = torch.zeros(len(states), TOKENS, SIZE)
    second[:, 1:] = states[:, :-1]
    result: Tensor = first - model.core(second)
    return result


@pytest.mark.every_value
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("way", [of_features, of_rows, of_smaller_states, of_tables, of_written_states])
def test_several_inputs_are_no_loop(way: Any, mode: Mode) -> None:
    """Layers 2 and 3 were those of the second input."""
    model, message = Model(way), "for several inputs in one forward, none of which is made of what the blocks have retu"
    with mode(), pytest.raises(UserError, match=message), watching(model, "column_mass"):
        model(torch.randn(2, TOKENS, SIZE))
    assert not FLOW.is_on
    assert not FLOW._notes


def joined(model: Any, states: Tensor) -> Tensor:
    hidden = torch.zeros_like(states)
    for _ in range(2):
        hidden = model.core(torch.cat([states, hidden], dim=-1))
    return hidden


def written(model: Any, states: Tensor) -> Tensor:
    kept = torch.zeros(len(states), TOKENS, SIZE)
    for _ in range(2):
        states = model.core(states + kept)
        kept[:, : TOKENS // 2].copy_(states[:, : TOKENS // 2])
        states = torch.ones_like(kept)
    return states


def written_out(model: Any, states: Tensor) -> Tensor:
    kept = torch.zeros(1, len(states), TOKENS, SIZE)
    torch.mul(model.core(states).detach(), 2, out=kept[0])
    result: Tensor = model.core(kept[0])
    return result


def from_elsewhere(model: Any, states: Tensor) -> Tensor:
    for _ in range(2):
        states = torch.tensor(model.core(states).tolist())
    return states


@pytest.mark.every_value
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("way", [joined, written, written_out, from_elsewhere])
def test_what_blocks_have_returned_is_read_in_a_loop(way: Any, mode: Mode) -> None:
    """A part that is passed more than it returned was refused."""
    model = Model(way, widths=2 if way is joined else 1)
    with mode(), watching(model, "column_mass") as watch:
        model.core.read.clear()
        model(torch.randn(2, TOKENS, SIZE))
    assert watch.samples == 2
    for layer, states in enumerate(model.core.read):
        q, k, _ = model.core.blocks[layer % 2].split(states.detach().clone())
        mass = (q @ k.mT * WIDTH**-0.5).softmax(-1).mean(2).mean(0)
        values = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy().reshape(HEADS, TOKENS))
        torch.testing.assert_close(values.float(), mass)
    assert len(model.core.read) == 4


def test_a_tensor_that_was_written_to_through_a_view_is_not_known() -> None:
    block = nn.Identity()
    given, memory = torch.zeros(2), torch.zeros(3)
    FLOW.begin(block, (given, memory), {})
    assert FLOW.is_made((given, None, 2.0), {"mask": [memory]}) is False
    assert FLOW.is_made((given, object()), {}) is None
    assert FLOW.is_made((), {}) is None
    FLOW.in_block = True
    made = FLOW.follow("add", (given, 1), {}, given + 1)
    parts = FLOW.follow("chunk", (given, 2), {}, given.chunk(2))
    FLOW.in_block = False
    assert FLOW.is_made((given, [made]), {}) is True
    assert FLOW.is_made(parts, {}) is True
    view = FLOW.follow("__getitem__", (memory, slice(2)), {}, memory[:2])
    assert FLOW.is_made((view,), {}) is False
    FLOW.follow("copy_", (view, made), {}, view.copy_(made))
    assert FLOW.is_made((view,), {}) is True
    assert FLOW.is_made((memory,), {}) is None
    FLOW.end()
    assert FLOW.is_made((made,), {}) is None
