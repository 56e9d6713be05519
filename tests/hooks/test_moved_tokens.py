"""Tokens that a module of nobody's library moves before it attends: refused, as positions would be those of slots."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.errors import UserError
from regard.hooks import watching
from tests.hooks.test_own_modules import HEADS, TOKENS, WIDTH, Attention, Model, Way, assert_exact, ids, plain

LINE = "its tokens, or its samples, stand in another order than outside of it"
ORDER = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))


def by_index(x: Tensor) -> Tensor:
    return x[:, ORDER]


def by_norm(x: Tensor) -> Tensor:
    """As routing and hashing put together what is alike."""
    return x.gather(1, x.norm(dim=-1).argsort(-1)[..., None].expand_as(x))


def backwards(x: Tensor) -> Tensor:
    return x.flip(1)


def round_(x: Tensor) -> Tensor:
    return torch.roll(x, 2, dims=1)


def behind_a_norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x.flip(1), x.shape[-1:])


MOVES: list[Callable[[Tensor], Tensor]] = [by_index, by_norm, backwards, round_, behind_a_norm]


def by_products(move: Callable[[Tensor], Tensor]) -> Way:
    return lambda attention, x: plain(attention, move(x))


def by_function(move: Callable[[Tensor], Tensor]) -> Way:
    def attend(attention: Attention, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*attention.split(move(x)), is_causal=True)

    return attend


@pytest.mark.every_value
@pytest.mark.parametrize("way", [by_products, by_function])
@pytest.mark.parametrize("move", MOVES)
@torch.no_grad()
def test_tokens_that_are_moved_in_a_block_are_refused(move: Callable[[Tensor], Tensor], way: Any) -> None:
    """They were measured at the positions of their slots, which differ from those outside of the block."""
    model = Model(way(move), num_heads=HEADS)
    for rows in (1, 3):
        with pytest.raises(UserError, match=LINE), watching(model, "column_mass"):
            model(ids(rows))


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, HEADS * WIDTH)
        self.blocks = nn.ModuleList(
            nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True).eval() for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            y = x.flip(1) if index else x
            x = x + block(y, y, y, need_weights=False)[0]
        return x


@torch.no_grad()
def test_tokens_that_are_moved_between_blocks_are_refused() -> None:
    """As where layers read a text in turn forwards and backwards: positions would differ between layers."""
    model = MultiHead().eval()
    with pytest.raises(UserError, match=LINE), watching(model, "column_mass"):
        model(ids())


def with_the_token_before(attention: Attention, x: Tensor) -> Tensor:
    return plain(attention, 0.5 * x + 0.5 * x.roll(1, 1))


def beside_the_token_before(attention: Attention, x: Tensor) -> Tensor:
    both = torch.cat([x, x.roll(1, 1)], -1)
    return plain(attention, both[..., : x.shape[-1]])


def there_and_back(attention: Attention, x: Tensor) -> Tensor:
    return plain(attention, nn.functional.gelu(x[:, ORDER])[:, ORDER.argsort()])


def in_some_channels(attention: Attention, x: Tensor) -> Tensor:
    """As models that shift a quarter of the channels by one token."""
    return plain(attention, torch.cat([x[..., :8].roll(1, 1), x[..., 8:]], -1))


def with_the_mean_of_moved(attention: Attention, x: Tensor) -> Tensor:
    return plain(attention, x[:, ORDER].mean(1, keepdim=True) + x)


def stacked(attention: Attention, x: Tensor) -> Tensor:
    return plain(attention, torch.stack([x.roll(1, 1), x]).mean(0))


def written_back(attention: Attention, x: Tensor) -> Tensor:
    y = nn.functional.gelu(x[:, ORDER])
    restored = torch.empty_like(y)
    restored[:, ORDER] = y
    return plain(attention, restored)


def copied_back(attention: Attention, x: Tensor) -> Tensor:
    y = nn.functional.gelu(x[:, ORDER])
    return plain(attention, y.new_zeros(y.shape).index_copy(1, ORDER, y))


def by_angles_from_the_end(attention: Attention, x: Tensor) -> Tensor:
    """As positions that count back from the last token: angles are moved, tokens are not."""
    q, k, v = attention.split(x)
    angles = torch.arange(TOKENS)[None, :, None] * torch.ones(len(x), 1, q.shape[-1])
    factors = angles.flip(1)[:, None]
    return scaled_dot_product_attention(factors * q, factors * k, v)


def behind_sorted_experts(attention: Attention, x: Tensor) -> Tensor:
    y = x[:, ORDER]
    parts = torch.cat([y[:, :5] * 2, y[:, 5:] * 3], 1)
    return plain(attention, parts[:, ORDER.argsort()])


def of_the_token_before(attention: Attention, x: Tensor) -> Tensor:
    return plain(attention, pad(x, (0, 0, 1, -1)))


def in_order(attention: Attention, x: Tensor) -> Tensor:
    return plain(attention, torch.cat([x[:, :3], x[:, 3:]], 1))


@pytest.mark.every_value
@pytest.mark.parametrize(
    "way",
    [
        with_the_token_before,
        beside_the_token_before,
        in_some_channels,
        with_the_mean_of_moved,
        stacked,
        there_and_back,
        written_back,
        copied_back,
        behind_sorted_experts,
        of_the_token_before,
        in_order,
    ],
)
@torch.no_grad()
def test_tokens_that_are_mixed_or_put_back_are_measured(way: Way) -> None:
    model = Model(way, num_heads=HEADS)
    with watching(model, "column_mass") as watch:
        model(ids())
    inputs = {
        with_the_token_before: lambda x: 0.5 * x + 0.5 * x.roll(1, 1),
        beside_the_token_before: lambda x: x,
        in_some_channels: lambda x: torch.cat([torch.cat([x[:, -1:, :8], x[:, :-1, :8]], 1), x[..., 8:]], -1),
        with_the_mean_of_moved: lambda x: x + x.mean(1, keepdim=True),
        stacked: lambda x: 0.5 * x + 0.5 * x.roll(1, 1),
        there_and_back: nn.functional.gelu,
        written_back: nn.functional.gelu,
        copied_back: nn.functional.gelu,
        behind_sorted_experts: lambda x: torch.where(ORDER.argsort()[:, None] < 5, 2, 3) * x,
        of_the_token_before: lambda x: pad(x, (0, 0, 1, -1)),
        in_order: lambda x: x,
    }
    model.inputs = [inputs[way](x) for x in model.inputs]  # type: ignore[index]
    assert_exact(watch, model)


@torch.no_grad()
def test_queries_and_keys_times_moved_angles_are_measured() -> None:
    model = Model(by_angles_from_the_end, num_heads=HEADS)
    with watching(model, "column_mass") as watch:
        model(ids())
    for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
        q, k = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).double() for part in (block.q, block.k))
        back = torch.arange(TOKENS - 1, -1, -1).double()
        weights = (q @ k.mT * back[:, None] * back * WIDTH**-0.5).softmax(-1)
        frame = watch.frame("column_mass", layer=layer)
        frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
        masses = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1)
        torch.testing.assert_close(masses, weights.mean((0, 2)), rtol=1e-4, atol=1e-5)


def in_halves(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, 1)[::-1], 1)


def in_parts(x: Tensor) -> Tensor:
    return torch.cat([x[:, 3:], x[:, :3]], dim=1)


def of_samples(x: Tensor) -> Tensor:
    return torch.cat([x[-1:], x[:-1]])


@pytest.mark.every_value
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("move", [by_index, backwards, in_halves, in_parts, of_samples])
@pytest.mark.parametrize("place", ["embedding", "blocks"])
def test_tokens_and_samples_that_are_moved_before_the_blocks_or_in_them_are_refused(
    move: Callable[[Tensor], Tensor], place: str, mode: Any
) -> None:
    """They had the positions, the padding and the ids of others, as did parts that are joined in another order."""
    if place == "blocks":
        model = Model(by_products(move), num_heads=HEADS)
    else:
        model = Model(plain, num_heads=HEADS)
        encode = model.embedding.forward
        model.embedding.forward = lambda given: move(encode(given))  # type: ignore[method-assign]
    with mode(), pytest.raises(UserError, match=LINE), watching(model, "column_mass"):
        model(ids(3))


@torch.no_grad()
def test_ids_that_are_moved_before_they_are_read_are_refused() -> None:
    """Positions and ids of tokens were those of others."""
    model = Model(plain, num_heads=HEADS)
    encode = model.encode
    line = "reads its token ids in another order than it is passed them"
    model.encode = lambda given: encode(given.flip(1))  # type: ignore[method-assign]
    with pytest.raises(UserError, match=line), watching(model, "column_mass"):
        model(ids())
    model.encode = lambda given: encode((given + 1) % 99)  # type: ignore[method-assign]
    with watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model)
